"""Scalars of a run as TensorBoard events (extra ``tensorboard``): its course; seconds, bytes and memory of every rank."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polyhop.errors import InputError, UnsupportedError
from polyhop.report.sections.phases import main_thread
from polyhop.report.traces.tally import RankTally

__all__ = ["write_tensorboard"]

_Scalar = tuple[str, int, float]  # name, epoch, value


def write_tensorboard(run: dict[str, Any], tallies: Sequence[RankTally], folder: Path) -> Path:
    """The folder of events: ``folder/<run>``, and in it one for every rank. InputError where it exists.

    ``run``: of the report's document. The folder appears when all of it is written.
    """
    target = folder / str(run["name"]).replace("/", "-")
    if target.exists():
        raise InputError(f"{target} exists already: remove it, or give another folder to --tensorboard")
    began = run["about"]["began"] or 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as temporary:
            made = Path(temporary) / "run"
            _write(made, _course(run), began, run["course"])
            for tally in tallies:
                _write(made / f"rank{tally.rank}", _of_rank(tally), began, run["course"])
            made.rename(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def _write(folder: Path, scalars: Iterator[_Scalar], began: float, course: dict[str, Any]) -> None:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UnsupportedError("TensorBoard events need: pip install 'polyhop[tensorboard]'") from error
    seconds = dict(zip(course["epoch"], course.get("seconds") or [], strict=False))
    folder.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(folder))
    try:
        for name, epoch, value in scalars:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            at = began + (seconds.get(epoch) or 0.0)
            writer.add_event(Event(wall_time=at, step=epoch, summary=summary))
    finally:
        writer.close()


def _course(run: dict[str, Any]) -> Iterator[_Scalar]:
    course = run["course"]
    for name, values in course.items():
        if name not in ("epoch", "step"):
            yield from _scalars(name, course["epoch"], values)
    if run["phases"]:
        yield from _scalars("seconds/training", run["phases"]["epochs"], run["phases"]["train_s"])
        for name, values in run["phases"]["over_epochs"].items():
            yield from _scalars(f"seconds/{name}", run["phases"]["epochs"], values)
    if run["traffic"]:
        for kind, values in run["traffic"]["over_epochs"].items():
            yield from _scalars(f"bytes/{kind}", run["traffic"]["epochs"], values)


def _of_rank(tally: RankTally) -> Iterator[_Scalar]:
    epochs, sums, main = tally.sums.last_epochs(), tally.sums, main_thread(tally)
    for key in sums.keys:
        if key[:2] == ("own", main):
            yield from _scalars(f"seconds/{key[2]}", epochs, sums.means(key).tolist())
        elif key[0] == "bytes":
            yield from _scalars(f"bytes/{key[1]}", epochs, sums.means(key).tolist())
    for name in tally.most.keys:
        yield from _scalars(f"memory/{name}", tally.most.last_epochs(), tally.most.values(name).tolist())


def _scalars(name: str, epochs: list[int], values: list[Any]) -> Iterator[_Scalar]:
    for epoch, value in zip(epochs, values, strict=False):
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, int(epoch), float(value)
