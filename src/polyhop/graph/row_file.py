"""RowFile: one file of rows of equal length, opened to be read past the page cache, and how fast its disk is.

Legend: N stored rows, F features.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels.read_rows import PAGE, TYPICAL_DISK, Disk, ReadPlan, plan_reads, read_rows

__all__ = ["RowFile", "measure_disk", "open_rows"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8)
_STORED = {"float32": torch.float32, "float64": torch.float64, "int8": torch.int8, "uint8": torch.uint8}
_DEPTH = 16  # reads under way at a time: a flash drive is fastest with many
_MEASURED_BYTES = 256 << 20  # a file of fewer bytes is not worth measuring for
_PROBES, _PROBE_READS, _PROBE_BYTES = 3, 1024, 32 << 20
_LEAST_GAP = 2  # pages: reads of three in a row never cost more than two reads


class RowFile:
    """One file of rows, opened when first read from: past the page cache where the file system allows it."""

    def __init__(self, path: Path, offset: int, num_rows: int, row_bytes: int) -> None:
        self.path, self.offset, self.num_rows, self.row_bytes = path, offset, num_rows, row_bytes
        self._handle, self._is_direct = -1, True
        self._lock = threading.Lock()
        self.check_size()

    def __getstate__(self) -> tuple[Path, int, int, int]:
        return self.path, self.offset, self.num_rows, self.row_bytes

    def __setstate__(self, state: tuple[Path, int, int, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            os.close(self._handle)

    @property
    def end(self) -> int:
        """The bytes that the file must have."""
        return self.offset + self.num_rows * self.row_bytes

    def check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise _gone(self.path, error) from error
        if size < self.end:
            raise InputError(
                f"{self.path}: {size:,} bytes, expected {self.end:,} for {self.num_rows:,} rows of {self.row_bytes:,} bytes "
                f"from byte {self.offset:,}: it is cut short; copy it again"
            )

    def read(self, plan: ReadPlan, rows: Tensor, out: Tensor, at: Tensor | None) -> None:
        handle, is_direct = self._opened()
        more: dict[str, Any] = {"offset": self.offset, "at": at, "depth": _DEPTH, "name": str(self.path)}
        if read_rows(handle, plan, rows, self.row_bytes, out, is_direct=is_direct, **more):
            return
        handle, _ = self._opened(may_be_direct=False)
        read_rows(handle, plan, rows, self.row_bytes, out, is_direct=False, **more)

    def _opened(self, *, may_be_direct: bool = True) -> tuple[int, bool]:
        """The open file, and whether it is read past the page cache."""
        with self._lock:
            if not may_be_direct and self._is_direct:
                self._is_direct = False
                if self._handle >= 0:
                    # Kept open under its number: another thread may be reading from it.
                    plain = _open(self.path, os.O_RDONLY)
                    os.dup2(plain, self._handle, inheritable=False)
                    os.close(plain)
            if self._handle < 0 and self._is_direct:
                try:
                    self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
                    self._is_direct = hasattr(os, "O_DIRECT")
                except OSError:
                    self._is_direct = False
            if self._handle < 0:
                self._handle = _open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            return self._handle, self._is_direct

    def is_direct(self) -> bool:
        """Whether it is read past the page cache: known once it has been read from."""
        row = torch.zeros(1, dtype=torch.int64)
        self.read(
            plan_reads(row, self.row_bytes), row, torch.empty(1, self.row_bytes, dtype=torch.uint8), None
        )
        return self._is_direct

    def mapped(self, dtype: torch.dtype, columns: int) -> Tensor:
        """All rows [N, F] in mapped memory, which must not be written to."""
        if self.num_rows * self.row_bytes == 0:
            return torch.empty(self.num_rows, columns, dtype=dtype)
        self.check_size()
        raw = np.memmap(self.path, np.uint8, "c", self.offset, (self.num_rows * self.row_bytes,))
        flat = torch.from_numpy(raw)
        if self.offset % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(self.num_rows, columns)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags)
    except OSError as error:
        raise _gone(path, error) from error


def _gone(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: {error.strerror or error}; expected a file of feature rows")


def open_rows(
    path: Path, shape: tuple[int, int] | None, dtype: torch.dtype | None, offset: int
) -> tuple[RowFile, torch.dtype, int]:
    """The file, the dtype and the number of columns of its rows."""
    if shape is None:
        shape, dtype, offset = _npy_header(path, dtype)
    if dtype not in _DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise InputError(f"{path}: rows of {dtype} cannot be read in place; expected one of {names}")
    rows, columns = shape
    return RowFile(path, offset, rows, columns * dtype.itemsize), dtype, columns


def _npy_header(path: Path, dtype: torch.dtype | None) -> tuple[tuple[int, int], torch.dtype | None, int]:
    """(shape, dtype, byte of the first row) of a .npy file."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, is_fortran, stored = read(file)
            offset = file.tell()
    except OSError as error:
        raise _gone(path, error) from error
    except ValueError as error:
        raise InputError(f"{path}: not a .npy file ({error}); for a raw file give shape and dtype") from error
    if len(shape) != 2 or (is_fortran and min(shape) > 1):
        order = "Fortran" if is_fortran else "C"
        raise InputError(f"{path}: expected a matrix [N, F] in C order, got {list(shape)} in {order} order")
    found = _STORED.get(stored.name) if stored.isnative else None
    if dtype is None and found is None:
        raise InputError(
            f"{path}: rows of {stored} cannot be read in place; expected one of {', '.join(_STORED)} (two-byte values: give "
            "dtype=torch.bfloat16)"
        )
    if dtype is not None and dtype.itemsize != stored.itemsize:
        raise InputError(f"{path}: holds {stored}, which cannot be {dtype}")
    return (int(shape[0]), int(shape[1])), dtype or found, offset


_MEASURED: dict[int, Disk] = {}
_MEASURING = threading.Lock()


def measure_disk(path: Path, num_bytes: int) -> Disk:
    """How fast the file system of a file of ``num_bytes`` is, by a short look at that file; kept for all files on it."""
    if num_bytes < _MEASURED_BYTES:
        return TYPICAL_DISK
    with _MEASURING:
        device = path.stat().st_dev
        if device not in _MEASURED:
            _MEASURED[device] = _measured(RowFile(path, 0, num_bytes // PAGE, PAGE))  # its pages as rows
        return _MEASURED[device]


def _measured(pages: RowFile) -> Disk:
    """Pages far apart, then a stretch in file order; the best of a few, since others may be at work."""
    apart = torch.arange(_PROBE_READS) * (pages.num_rows // _PROBE_READS)
    stretch = torch.arange(_PROBE_BYTES // PAGE) + pages.num_rows // 4
    if not pages.is_direct():
        return TYPICAL_DISK  # pages that happen to be in memory would be measured
    each_s = _seconds(pages, apart, gap_pages=0) / _PROBE_READS
    bytes_per_s = _PROBE_BYTES / _seconds(pages, stretch, gap_pages=None)
    return Disk(1 / each_s, max(bytes_per_s, _LEAST_GAP * PAGE / each_s))


def _seconds(pages: RowFile, rows: Tensor, gap_pages: int | None) -> float:
    out = torch.zeros(rows.numel(), PAGE, dtype=torch.uint8)
    taken = []
    for k in range(_PROBES):
        moved = rows + 7 * k
        plan = plan_reads(moved, PAGE, gap_pages=gap_pages, disk=Disk(1e12, 1e9))
        began = time.perf_counter()
        pages.read(plan, moved, out, None)
        taken.append(time.perf_counter() - began)
    return max(min(taken), 1e-6)
