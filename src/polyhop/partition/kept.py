"""Rows that were computed from the parts of a folder and are kept beside them, part by part, for the next run.

    part-00000/NAME.npy      one row for each of the part's nodes
    part-00000/NAME.json     size and checksum of the file, and what it was made from

Each is written under a temporary name, synced and renamed, the .json last: where it is, the rows are whole. Rows that were
made from something else (other features, edges, weights) are not found; damaged ones are named.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.partition.files import TEMPORARY, ArrayFile, digest_file, part_name, sync_file

__all__ = ["KeptRows", "made_from"]

_FORMAT = 1
_SMALL = 1 << 24  # files up to this many bytes are checked whole when opened, larger ones by their size
_UNRELATED = ("y", "train", "val", "test", "src_ids", "out_degree")  # sums do not depend on these
_AGAIN = "remove it, and it is computed again"


def made_from(about: dict[str, Any], *more: str) -> str:
    """Digest of what sums over in-edges depend on, by a folder's manifest, and of ``more``."""
    files = {
        name: entry["blake2b"]
        for name, entry in about["files"].items()
        if "/" in name and Path(name).stem not in _UNRELATED
    }
    text = json.dumps([_FORMAT, about["bounds"], sorted(files.items()), *more])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class KeptRows:
    """Rows of one name, made from one thing, in one partition folder."""

    folder: Path
    name: str
    made_from: str

    def open(self, part: int) -> Tensor | None:
        """A part's rows, mapped; None where there are none that were made from the same. PartitionError if damaged."""
        file, entry = self.file(part), self._entry(part)
        if entry is None:
            return None
        try:
            size = file.stat().st_size
        except OSError as error:
            raise PartitionError(f"{file}: {error.strerror or error}; remove {self._about(part)}") from error
        if size != entry["bytes"]:
            raise PartitionError(f"{file}: {size:,} bytes, expected {entry['bytes']:,}: damaged; {_AGAIN}")
        if size <= _SMALL and digest_file(file) != entry["blake2b"]:
            raise PartitionError(f"{file}: its content changed since it was written; {_AGAIN}")
        try:
            array = np.load(file, mmap_mode="c" if entry["values"] else None, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise PartitionError(f"{file}: cannot be read: {error}; {_AGAIN}") from error
        return torch.from_numpy(array)

    def write(
        self, part: int, dtype: torch.dtype, shape: tuple[int, int], pieces: Iterable[Tensor]
    ) -> Tensor:
        """Keep a part's rows, given in pieces from the first to the last; the rows, mapped."""
        file, about = self.file(part), self._about(part)
        temporary = file.with_name(f"{TEMPORARY}{os.getpid()}-{file.name}")
        try:
            self._sweep(file)
            try:
                with ArrayFile(temporary, dtype, shape) as array, temporary.open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)  # says that its writer lives
                    for rows in pieces:
                        array.write(rows)
                    entry = {**array.entry(), "format": _FORMAT, "made_from": self.made_from}
                    about.unlink(missing_ok=True)  # of rows that are replaced now
                    temporary.rename(file)
            finally:
                temporary.unlink(missing_ok=True)
            try:
                temporary.write_text(json.dumps(entry, indent=1) + "\n")
                sync_file(temporary)
                temporary.rename(about)
                sync_file(file.parent)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise PartitionError(f"cannot write {file}: {error.strerror or error}") from error
        kept = self.open(part)
        assert kept is not None, "it was written just now"
        return kept

    def _sweep(self, file: Path) -> None:
        """Remove what a writer that was killed has left."""
        for left in file.parent.glob(f"{TEMPORARY}*-{file.name}"):
            with left.open("rb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue  # its writer lives
                left.unlink(missing_ok=True)

    def _entry(self, part: int) -> dict[str, Any] | None:
        about = self._about(part)
        try:
            entry = json.loads(about.read_text())
            is_same = (entry["format"], entry["made_from"]) == (_FORMAT, self.made_from)
            return {name: entry[name] for name in ("bytes", "values", "blake2b")} if is_same else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PartitionError(f"{about}: cannot be read: {error}; {_AGAIN}") from error

    def file(self, part: int) -> Path:
        """Where a part's rows are, or would be."""
        return self.folder / part_name(part) / f"{self.name}.npy"

    def _about(self, part: int) -> Path:
        return self.file(part).with_suffix(".json")
