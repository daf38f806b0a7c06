"""Checkpoints: folders of safetensors files and one state.json, complete or absent, never half there.

    checkpoints/step-00000120/
        model.safetensors  optimizer.safetensors  best.safetensors  ...
        state.json         {"digest": ..., "body": {"format": 1, "step": 120, "files": {name: digest}, "record": {...}}}

A folder is written under a temporary name, synced, then renamed. Every file carries a digest, so damage is found when read.
Nothing here is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from polyhop.errors import CheckpointError
from polyhop.train.files import TEMPORARY, pack, read_tensors, sync_folder, write_synced

__all__ = ["Checkpoint", "Checkpoints", "find_checkpoint", "read_checkpoint", "run_folder_of"]

FORMAT = 1
_NAME = re.compile(r"^step-(\d{8,})$")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint as read back and verified."""

    path: Path
    step: int
    record: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]  # file stem -> tensor name -> CPU tensor


class _DamagedError(CheckpointError):
    """This folder cannot be used, but an older one may."""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint folder; CheckpointError names the file that is missing or damaged."""
    body = _read_body(path / "state.json")
    if body.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {body['format']}, this polyhop reads up to {FORMAT}: upgrade polyhop to resume it"
        )
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, digest in body["files"].items():
        file = path / name
        try:
            data = file.read_bytes()
        except OSError as error:
            raise _DamagedError(f"{file} is missing or unreadable: {error.strerror or error}") from error
        if _digest(data) != digest:
            raise _DamagedError(f"{file} is damaged ({len(data):,} bytes do not match their digest)")
        tensors[file.stem] = read_tensors(file)
    return Checkpoint(path, int(body["step"]), body["record"], tensors)


def _read_body(file: Path) -> dict[str, Any]:
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
        body, digest = whole["body"], whole["digest"]
    except OSError as error:
        raise _DamagedError(f"{file} is missing or unreadable: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"{file} is damaged (not a state record)") from error
    if _digest(_canonical(body)) != digest:
        raise _DamagedError(f"{file} is damaged (its digest does not match)")
    return dict(body)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


class Checkpoints:
    """The checkpoints of one run folder: keeps the newest ``keep`` and the newest one that was the best when written."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Remove what an interrupted writer left behind."""
        for path in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)

    def paths(self) -> list[Path]:
        """Checkpoint folders, oldest first, unverified."""
        found = [path for path in self.folder.iterdir() if _NAME.match(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; damaged ones are skipped with a warning naming the file."""
        for path in reversed(self.paths()):
            try:
                return read_checkpoint(path)
            except _DamagedError as error:
                warnings.warn(f"checkpoint skipped: {error}", RuntimeWarning, stacklevel=2)
        return None

    def save(
        self,
        step: int,
        files: Mapping[str, Mapping[str, Tensor]],
        record: dict[str, Any],
        *,
        is_best: bool = False,
    ) -> Path:
        """Write ``step-XXXXXXXX`` with one safetensors file per entry of ``files`` and the record, then drop old ones."""
        final = self.folder / f"step-{step:08d}"
        temporary = self.folder / f"{TEMPORARY}{final.name}-{os.getpid()}"
        try:
            self._fill(temporary, step, files, record, is_best)
            self._swap(temporary, final)
        except OSError as error:
            raise CheckpointError(self._cannot_write(final, error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._rotate()
        return final

    def _fill(
        self,
        temporary: Path,
        step: int,
        files: Mapping[str, Mapping[str, Tensor]],
        record: dict[str, Any],
        is_best: bool,
    ) -> None:
        temporary.mkdir()
        digests = {}
        for stem, tensors in files.items():
            data = pack(tensors)
            write_synced(temporary / f"{stem}.safetensors", data)
            digests[f"{stem}.safetensors"] = _digest(data)
        body = {"format": FORMAT, "step": step, "is_best": is_best, "files": digests, "record": record}
        # Through JSON once, so that the digest is of what a reader will see (tuples become lists).
        body = json.loads(json.dumps(body))
        whole = {"digest": _digest(_canonical(body)), "body": body}
        write_synced(temporary / "state.json", json.dumps(whole, indent=1).encode())
        sync_folder(temporary)

    def _swap(self, temporary: Path, final: Path) -> None:
        if final.exists():  # written before this step's evaluation, say: the newer one replaces it
            old = self.folder / f"{TEMPORARY}old-{final.name}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(final)
        sync_folder(self.folder)

    def _cannot_write(self, final: Path, error: OSError) -> str:
        good = self.paths()
        kept = f"the last good checkpoint is {good[-1]}" if good else "there is no earlier checkpoint"
        return (
            f"cannot write checkpoint {final}: {error.strerror or error}; {kept}. "
            "Free some space (or choose another run_dir) and continue with resume='auto'"
        )

    def _rotate(self) -> None:
        paths = self.paths()
        best = next((path for path in reversed(paths) if _was_best(path)), None)
        for path in paths[: -self.keep]:
            if path == best:
                continue
            doomed = path.with_name(f"{TEMPORARY}old-{path.name}")
            try:
                path.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                warnings.warn(f"old checkpoint {path} not removed: {error}", RuntimeWarning, stacklevel=3)


def _was_best(path: Path) -> bool:
    try:
        return bool(_read_body(path / "state.json").get("is_best"))
    except CheckpointError:
        return False


def run_folder_of(path: Path) -> Path:
    """The run folder of a path that is one, or that is a checkpoint inside one."""
    return path.parent.parent if _NAME.match(path.name) else path


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at a path, or the newest good one of the run folder at that path."""
    if _NAME.match(path.name):
        return read_checkpoint(path)
    folder = path / "checkpoints"
    found = Checkpoints(folder).newest() if folder.is_dir() else None
    if found is None:
        raise CheckpointError(
            f"no checkpoint to resume at {path}: expected a run folder or one of its checkpoints/step-*"
        )
    return found
