"""What ran, written down: one line (JSON) for each server and each function of a run, from which its bill is made.

    functions-0.jsonl    {"kind": "server", "session": 1763000000000, "name": "server0", "start_ms": ..., "end_ms": ..., ...}
                         {"kind": "function", "session": 1763000000000, "name": "server0-3", "init_ms": ..., ...}

Each rank has a file. A line replaces earlier ones of the same session and name: whatever still runs is noted now and then,
so that a rank which is killed is billed too, up to its last note. A run that goes on is a further session and adds lines.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyhop.errors import InputError
from polyhop.serverless.bill import FunctionTrace, ServerTrace, Trace

__all__ = ["Key", "Records", "from_line", "read_records", "record_file", "to_line", "traces_of"]

Key = tuple[int, str]
"""(session, name); a session is named by the Unix milliseconds of its start."""

_KINDS: dict[str, type[Any]] = {"server": ServerTrace, "function": FunctionTrace}
_NAME = re.compile(r"functions-(\d+)\.jsonl")


def to_line(key: Key, trace: Trace) -> str:
    """One line, exactly what the trace holds."""
    (kind,) = (name for name, each in _KINDS.items() if isinstance(trace, each))
    told = {("server" if name == "kind" else name): value for name, value in asdict(trace).items()}
    return json.dumps({"kind": kind, "session": key[0], "name": key[1], **told})


def from_line(text: str) -> tuple[Key, Trace]:
    """What ``to_line`` was given; InputError for anything else."""
    try:
        told = json.loads(text)
        made = _KINDS[told.pop("kind")]
        key = int(told.pop("session")), str(told.pop("name"))
        if "server" in told:
            told["kind"] = told.pop("server")
        return key, made(**told)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"no record of a server or a function: {text[:200]!r} ({error})") from error


def record_file(folder: Path, rank: int) -> Path:
    return folder / f"functions-{rank}.jsonl"


class Records:
    """The file of a rank, to which lines are added. A disk that refuses costs the records, with one warning, not the run."""

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, dict[Key, Trace]()
        self._is_lost = False

    def add(self, traces: Mapping[Key, Trace]) -> None:
        """Write what has changed since it was last written."""
        new = {key: trace for key, trace in traces.items() if self._written.get(key) != trace}
        if not new or self._is_lost:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                file.seek(max(file.seek(0, 2) - 1, 0))
                is_cut = file.read(1) not in (b"", b"\n")  # by a kill
                lines = "".join(to_line(key, trace) + "\n" for key, trace in new.items())
                file.write((("\n" if is_cut else "") + lines).encode())
        except OSError as error:
            self._is_lost = True
            warnings.warn(
                f"records of functions stopped, cannot write {self._path}: {error.strerror or error}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._written |= new


def read_records(path: Path) -> dict[Key, Trace]:
    """The newest of each session and name; a line that a kill cut short is left out. No file: none."""
    if not path.exists():
        return {}
    found: dict[Key, Trace] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if text.endswith("}"):
            key, trace = from_line(text)
            found[key] = trace
    return found


def traces_of(folder: Path) -> list[Trace]:
    """Everything that ran in a run, of all its ranks and sessions."""
    files = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return [trace for path in files for trace in read_records(path).values()]
