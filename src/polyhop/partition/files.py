"""The files of a partition folder: their names, how each is written, and the manifest's entry that it must match.

``save_parts`` writes whole arrays; out of core they come in pieces. Both give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PartitionError

__all__ = ["FORMAT", "MANIFEST", "SETS", "TEMPORARY", "ArrayFile", "digest_file", "finish_folder", "part_name",
    "put",
           "sync_file", "take",
    "write_array"]  # fmt: skip

FORMAT = 1
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"
"""Start of the name of a folder that is not yet complete."""
SETS = ("train", "val", "test")


def part_name(index: int) -> str:
    """Name of a part's own folder."""
    return f"part-{index:05d}"


class ArrayFile:
    """One .npy file written from its first row to its last; the checksum is made on the way. Use as a context manager."""

    def __init__(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.path, self._is_bfloat16 = path, dtype == torch.bfloat16
        stored = torch.empty(0, dtype=torch.int16 if self._is_bfloat16 else dtype).numpy().dtype
        head = io.BytesIO()
        about = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(head, about)
        self._values = int(np.prod(shape))
        self._left = self._values
        self._digest = hashlib.blake2b(digest_size=16)
        self._bytes = 0
        self._file = path.open("wb", buffering=0)
        self._put(head.getbuffer())

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, rows: Tensor) -> None:
        """The next rows."""
        array = (rows.view(torch.int16) if self._is_bfloat16 else rows).contiguous().numpy()
        self._left -= array.size
        if array.size:
            self._put(array.reshape(-1).view(np.uint8).data)

    def entry(self, *, sync: bool = True) -> dict[str, Any]:
        """What the manifest says of the file; ``sync``: wait until the disk has all of it."""
        assert self._left == 0, f"{self.path}: {self._left} values are missing"
        if sync:
            os.fsync(self._file.fileno())
        entry = {"bytes": self._bytes, "blake2b": self._digest.hexdigest(), "values": self._values}
        return {**entry, "dtype": "bfloat16"} if self._is_bfloat16 else entry

    def _put(self, data: memoryview) -> None:
        self._digest.update(data)
        self._bytes += len(data)
        while data:
            data = data[self._file.write(data) :]


def write_array(path: Path, tensor: Tensor, *, sync: bool = True) -> dict[str, Any]:
    """Write one file; its entry in the manifest. ``sync``: wait until the disk has it."""
    with ArrayFile(path, tensor.dtype, tuple(tensor.shape)) as file:
        file.write(tensor)
        return file.entry(sync=sync)


def put(file: BinaryIO, array: np.ndarray[Any, Any]) -> None:
    """Append an array's bytes. Not ``array.tofile``: in there, Ctrl-C becomes a TypeError."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while data:
        data = data[file.write(data) :]


def take(file: BinaryIO, dtype: Any, count: int, *, into: np.ndarray[Any, Any] | None = None) -> Tensor:
    """The next ``count`` values of a file that must have them; ``into`` is memory to use again."""
    array = np.empty(count, dtype) if into is None else into[:count]
    data = array.view(np.uint8).data
    while data:
        got = file.readinto(data)  # type: ignore[attr-defined]
        if not got:
            raise PartitionError(f"{file.name}: ends {len(data):,} bytes early; it changed while it was read")
        data = data[got:]
    return torch.from_numpy(array)


def digest_file(path: Path) -> str:
    """Checksum as the manifest has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def sync_file(path: Path) -> None:
    """Wait until the disk has a file, or the names inside a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finish_folder(temporary: Path, path: Path, about: dict[str, Any]) -> None:
    """Write the manifest, then give the whole folder its name."""
    (temporary / MANIFEST).write_text(json.dumps(about, indent=1) + "\n")
    sync_file(temporary)
    temporary.rename(path)
    sync_file(path.parent)
