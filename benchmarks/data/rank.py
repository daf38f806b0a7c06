"""One rank of the bench: all sides live in it, train epoch by epoch in turn, and are measured alike.

Run as ``python -m benchmarks.data.rank PARTS ANSWER SIZE`` in each host of the lab; the local launcher calls ``measure``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data.workload import FAN_OUTS, SEED, SIDES, Size, config_of, model_of
from polyhop import launch
from polyhop.comm import Collective
from polyhop.exchange import Seeds
from polyhop.graph import SharedGraph
from polyhop.kernels import kept_memory
from polyhop.partition import open_parts
from polyhop.strategies import HeldPart, Team, data, part_step, place
from polyhop.trace import Trace
from polyhop.train import loop
from polyhop.train.loss import cross_entropy_sum
from polyhop.train.state import Session

__all__ = ["arguments", "measure", "options"]

PIECE_BYTES = 4 << 20  # what the link is measured with


def options(num_ranks: int | None = None) -> launch.Launch:
    """One thread a rank, on any core: the lab's hosts share the machine's, and both ways should be alike."""
    return launch.Launch(num_ranks=num_ranks, threads=1, pin=False)


def measure(context: launch.RankContext, parts: str, answer: str, size: dict[str, Any]) -> None:
    """Write what this rank saw of every epoch of every side to ANSWER/rank-<k>.json, and the rows its cache took."""
    line, wanted = context.comm, Size(**size)
    held = open_parts(Path(parts)).share(line.rank, line.num_ranks)
    found: dict[str, Any] = {"bytes_per_s": _bandwidth(line), "epochs": {name: [] for name in SIDES}}
    with kept_memory():
        made = _sides(held, line, wanted)
        names = list(made)
        for turn in range(wanted.repeats + 1):  # the first warms up
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                line.barrier()
                found["epochs"][name].append(made[name].epoch())
    np.save(Path(answer) / f"cached-{line.rank}.npy", _hot(held, line, wanted).numpy())
    (Path(answer) / f"rank-{line.rank}.json").write_text(json.dumps(found))


def _bandwidth(line: Collective) -> float:
    """Bytes a second that every rank sends when all send to all; median of five."""
    pieces = [torch.zeros(PIECE_BYTES, dtype=torch.uint8)] * line.num_ranks
    seconds = []
    for _ in range(6):
        line.barrier()
        start = time.perf_counter()
        line.all_to_all(pieces, kind="features", counts=[PIECE_BYTES] * line.num_ranks)
        seconds.append(time.perf_counter() - start)
    return PIECE_BYTES * (line.num_ranks - 1) / statistics.median(seconds[1:])


def _batch_size(line: Collective, held: SharedGraph, size: Size) -> int:
    assert held.split is not None
    num_train = line.all_reduce(torch.tensor([held.split.train.numel()]), kind="sizes")
    return size.batch_size(int(num_train))


def _sides(held: SharedGraph, line: Collective, size: Size) -> dict[str, _Side]:
    batch_size, rows = _batch_size(line, held, size), held.num_nodes / line.num_ranks
    configs = {name: config_of(name, batch_size, rows, held.num_features) for name in SIDES}
    whole = data.hold(held, place("cpu", "32-true"), Team(line), configs["data"])
    return {name: _Side(held, whole, line, config) for name, config in configs.items()}


class _Side:
    """A model of its own, trained by the project's loop without evaluation, one epoch at a time."""

    def __init__(self, held: SharedGraph, whole: HeldPart, line: Collective, config: data.Config) -> None:
        assert held.split is not None
        model = model_of(held.num_features, held.num_classes)
        self._line, self._trace, self._losses = line, Trace(), [0.0]
        step = data.build(
            model,
            held,
            config,
            train_ids=held.split.train,
            whole=whole,
            loss=cross_entropy_sum,
            trace=self._trace,
            team=Team(line),
        )
        self._session = Session(model, torch.optim.Adam(model.parameters(), lr=0.003), step)
        self._tools = loop.Tools(
            set_lr=lambda _: 0.003,
            evaluate=dict,
            save=lambda: None,
            on_step=lambda *_: None,
            on_epoch=self._keep_loss,
            stop=lambda: None,
            trace=self._trace,
        )

    def _keep_loss(self, record: dict[str, Any]) -> bool:
        self._losses.append(record["loss"])
        return False

    def epoch(self) -> dict[str, Any]:
        """Seconds, CPU-seconds and spans of the next epoch, and what this rank sent in it."""
        before, spans = self._line.traffic.now(), self._trace.totals()
        wall, cpu = time.perf_counter(), time.process_time()
        loop.train(self._session, loop.Options(self._session.state.epoch + 1, SEED), self._tools)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        cost = self._line.traffic.now() - before
        spent = {name: total - spans.get(name, 0.0) for name, total in self._trace.totals().items()}
        return {"s": wall, "cpu_s": cpu, "spans": spent, "loss": self._losses[-1], **cost.to_json()}


def _hot(held: SharedGraph, line: Collective, size: Size) -> torch.Tensor:
    """The remote rows that the sides with a cache keep, by new id: as ``data.build`` chose them."""
    assert held.split is not None
    part, train = held.part, held.split.train
    batch_size = _batch_size(line, held, size)
    config = config_of("cache", batch_size, held.num_nodes / line.num_ranks, held.num_features)
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=batch_size)
    likely = part_step.part_inclusion(held, train, seeds, FAN_OUTS, line)
    return part_step.hot_rows(likely, held, config.cache_bytes, line)


def arguments(parts: Path, answer: Path, size: Size) -> list[str]:
    """The command that is one rank, for whoever starts ranks from outside."""
    return [sys.executable, "-m", "benchmarks.data.rank", str(parts), str(answer), json.dumps(asdict(size))]


if __name__ == "__main__":
    from benchmarks.data.rank import measure as found_by_name

    launch.run(found_by_name, (sys.argv[1], sys.argv[2], json.loads(sys.argv[3])), options())
