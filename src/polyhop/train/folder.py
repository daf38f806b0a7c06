"""The run folder: what a run was asked, what it measured, what it came to.

    config.json  metrics.jsonl  trace-rank0.jsonl  partition.json  plan.json  checkpoints/  model.safetensors  result.json

One process at a time: a lock, released by the system when its holder dies, keeps a second one out.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from polyhop.errors import ConfigError
from polyhop.train.files import append_whole, pack, replace_file

__all__ = ["RunFolder", "automatic_name"]


def automatic_name(graph: str, model: str) -> Path:
    """``runs/<date>-<time>-<graph>-<model>``, in the working directory; a number is added if it is taken."""
    words = re.sub(r"[^a-z0-9.]+", "-", f"{graph}-{model}".lower()).strip("-")
    base = Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{words}"
    taken = (base.with_name(f"{base.name}-{number}") for number in range(2, 10_000))
    return base if not base.exists() else next(path for path in taken if not path.exists())


class RunFolder:
    """Files of one run. Logs that the disk refuses cost a warning; results and checkpoints raise."""

    def __init__(self, path: Path, *, may_continue: bool) -> None:
        self.path = path
        if not may_continue and ((path / "config.json").exists() or (path / "checkpoints").exists()):
            raise ConfigError(
                f"{path} already holds a run: continue it with resume='auto', or choose another run_dir"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path)
        except OSError as error:
            raise ConfigError(f"run_dir={str(path)!r} cannot be used: {error.strerror or error}") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trace(self) -> Path:
        return self.path / "trace-rank0.jsonl"

    def write_config(self, config: dict[str, Any]) -> None:
        self._write_json("config.json", config)

    def write_result(self, result: dict[str, Any]) -> None:
        self._write_json("result.json", result)

    def write_partition(self, quality: dict[str, Any]) -> None:
        """How good the parts are that ranks hold."""
        self._write_json("partition.json", quality)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """What the run was expected to take, and why it is trained so."""
        self._write_json("plan.json", plan)

    def write_model(self, weights: dict[str, Tensor]) -> None:
        """The weights that the run ended with, alone."""
        replace_file(self.path / "model.safetensors", pack(weights))

    def _write_json(self, name: str, record: dict[str, Any]) -> None:
        replace_file(self.path / name, (json.dumps(_finite(record), indent=2) + "\n").encode())

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop records past a global step (the run goes on from there) and return those kept."""
        path = self.path / "metrics.jsonl"
        kept: list[dict[str, Any]] = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    break  # cut short by a kill; what follows is newer than the checkpoint
                if record.get("step", 0) <= step:
                    kept.append(record)
        replace_file(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        return kept

    def append_metrics(self, record: dict[str, Any]) -> None:
        """One line to metrics.jsonl; NaN becomes null."""
        try:
            append_whole(self.path / "metrics.jsonl", (json.dumps(_finite(record)) + "\n").encode())
        except OSError as error:
            warnings.warn(
                f"a record of metrics.jsonl is lost: {error.strerror or error}", RuntimeWarning, stacklevel=2
            )

    def close(self) -> None:
        self._lock.close()


def _locked(path: Path) -> TextIO:
    """Hold ``.lock`` in the folder until closed."""
    file = (path / ".lock").open("a", encoding="utf-8")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return file  # no such lock on this system
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"{path} is in use by another process: choose another run_dir or end that one"
        ) from None
    return file


def _finite(value: Any) -> Any:
    """NaN and infinities are not JSON."""
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
