"""Work that survives being killed: a folder with a journal of the stages that are done.

A stage is recorded once all its files are written; started again with the same command and the same input, finished stages
are skipped and the unfinished one begins anew. Files are not synced to the disk, which would cost as much as the work: the
system keeps them when the process dies, and the journal names the boot, so nothing is trusted after a crash of the host.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.partition.files import put, take

__all__ = ["Work"]

_JOURNAL = "journal.json"


class Work:
    """The folder ``.work`` inside ``folder``, locked while entered. ``command`` is what must be the same to go on."""

    def __init__(self, folder: Path, command: dict[str, Any]) -> None:
        self.folder, self.path = folder, folder / ".work"
        self._command = {**command, "boot": _boot()}
        self._stages: dict[str, Any] = {}
        self._lock = -1
        self.is_resumed = False

    def __enter__(self) -> Work:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise PartitionError(
                f"{self.folder}: another run is writing it; wait for it, or give another --out"
            ) from None
        self._stages = self._read()
        if not self._stages:
            self._clear()
        self.is_resumed = bool(self._stages)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def stage(self, name: str, make: Callable[[], Any]) -> Any:
        """What ``make`` gave (plain JSON), now or in a run before."""
        if name not in self._stages:
            made = make()
            self._stages[name] = made
            self._write()
        return self._stages[name]

    def has(self, name: str) -> bool:
        """Whether a stage is done."""
        return name in self._stages

    def file(self, name: str) -> Path:
        """Where an intermediate file stands."""
        return self.path / name

    def save(self, name: str, values: Tensor) -> None:
        """Keep one array for later stages."""
        about = {"descr": values.numpy().dtype.str, "fortran_order": False, "shape": tuple(values.shape)}
        with self.file(f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, about)
            put(file, values.numpy())

    def load(self, name: str) -> Tensor:
        """An array kept before, in memory."""
        with self.file(f"{name}.npy").open("rb", buffering=0) as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            return take(file, dtype, math.prod(shape)).reshape(shape)

    def find(self, name: str) -> Tensor | None:
        """An array kept before, or None."""
        return self.load(name) if self.file(f"{name}.npy").exists() else None

    def remove(self, *names: str) -> None:
        """Delete intermediate files that no later stage reads; patterns are allowed."""
        for name in names:
            for path in self.path.glob(name):
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Delete everything but the result."""
        shutil.rmtree(self.path)

    def _read(self) -> dict[str, Any]:
        """Stages done by the same command, or nothing."""
        try:
            found = json.loads((self.path / _JOURNAL).read_text())
        except (OSError, ValueError):
            return {}
        is_same = isinstance(found, dict) and found.get("command") == json.loads(json.dumps(self._command))
        return dict(found["stages"]) if is_same else {}

    def _write(self) -> None:
        fresh = self.path / f"{_JOURNAL}.new"
        fresh.write_text(json.dumps({"command": self._command, "stages": self._stages}))
        fresh.replace(self.path / _JOURNAL)

    def _clear(self) -> None:
        """Remove what another command left."""
        for path in (*self.folder.iterdir(), *self.path.iterdir()):
            if path in (self.path, self.path / "lock"):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
