"""Rows of a file larger than memory, by few large reads in file order instead of one page fault per row.

Wanted rows become pages (4 KiB), each once; neighbouring pages become runs. Between two runs lies a gap of unwanted pages:
it is read through where that takes no longer than another read would. So a stretch of the file of which more than
``Disk.scan_share`` is wanted is read in one sweep, and where that holds everywhere, the whole span is: a scan. Reads go past
the page cache where the file system allows it, by threads that wait for the disk, each with one buffer of bounded size.

Legend: n wanted rows, R reads, F columns.
"""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import InputError, KernelError
from polyhop.kernels import checks, native

__all__ = ["CHUNK_BYTES", "PAGE", "TYPICAL_DISK", "Disk", "ReadPlan", "plan_reads", "read_rows"]

PAGE = 4096
CHUNK_BYTES = 1 << 20
"""Of one read at most, but for a row that crosses its end."""
_SHORT, _FAILED, _NO_MEMORY = -1, -2, -3


@dataclass(frozen=True)
class Disk:
    """How fast a file system is, with many reads under way."""

    reads_per_s: float  # of single pages anywhere
    bytes_per_s: float  # in file order

    @property
    def scan_share(self) -> float:
        """The share of pages wanted above which reading all of them is faster: IOPS x 4096 / bandwidth."""
        return self.reads_per_s * PAGE / self.bytes_per_s

    @property
    def gap_pages(self) -> int:
        """Pages whose transfer takes no longer than one read more."""
        return int(self.bytes_per_s / (self.reads_per_s * PAGE))

    def seconds(self, num_runs: int, num_pages: int) -> float:
        """To read so many pages in so many stretches."""
        return num_runs / self.reads_per_s + num_pages * PAGE / self.bytes_per_s


TYPICAL_DISK = Disk(reads_per_s=50_000, bytes_per_s=2e9)
"""A flash drive, where nothing was measured."""


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Which stretches of a file to read for some rows. Every row lies wholly in one of them."""

    starts: Tensor  # int64 [R]: byte of the file, a multiple of PAGE, ascending
    sizes: Tensor  # int64 [R]: bytes, a multiple of PAGE; the last may reach beyond the end of the file
    first: Tensor  # int64 [R + 1]: read r holds rows first[r] .. first[r + 1] - 1 of those wanted
    num_runs: int  # stretches without a gap between them; each is one or more reads
    pages_wanted: int  # distinct pages that hold a wanted row
    is_scan: bool  # all pages from the first wanted to the last

    @property
    def num_reads(self) -> int:
        return self.starts.numel()

    @property
    def bytes_read(self) -> int:
        return int(self.sizes.sum())

    @property
    def pages_read(self) -> int:
        return self.bytes_read // PAGE

    @property
    def buffer_bytes(self) -> int:
        """Memory that each thread needs."""
        return int(self.sizes.max()) if self.num_reads else 0


def plan_reads(
    rows: Tensor,
    row_bytes: int,
    *,
    offset: int = 0,
    disk: Disk = TYPICAL_DISK,
    gap_pages: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> ReadPlan:
    """The reads for rows (int64 [n], ascending, distinct) of ``row_bytes`` each, row 0 at byte ``offset`` of the file.

    ``gap_pages``: read through gaps of up to so many pages (None: as the disk says). A read is at most ``chunk_bytes`` long,
    a multiple of PAGE, but for the pages of a row that begins in it and ends behind it.
    """
    checks.require(
        rows.dim() == 1 and rows.dtype == torch.int64,
        f"plan_reads: rows must be int64 [n], got {rows.dtype} {list(rows.shape)}",
    )
    checks.require(
        row_bytes > 0 and offset >= 0 and chunk_bytes >= PAGE and chunk_bytes % PAGE == 0,
        f"plan_reads: expected row_bytes of at least 1, an offset of at least 0 and chunk_bytes in whole pages of {PAGE}, "
        f"got {row_bytes}, {offset} and {chunk_bytes}",
    )
    if rows.numel() == 0:
        none = rows.new_zeros(0)
        return ReadPlan(none, none, rows.new_zeros(1), 0, 0, is_scan=False)
    _check_ascending(rows)
    start = rows * row_bytes + offset
    low, high = start // PAGE, (start + row_bytes - 1) // PAGE  # first and last page of each row
    gaps = low[1:] - high[:-1] - 1  # -1: the same page
    begins = gaps > (disk.gap_pages if gap_pages is None else gap_pages)  # a run with row k + 1
    skipped, span = int(gaps[begins].sum()), int(high[-1] - low[0]) + 1
    num_runs = 1 + int(begins.sum())
    is_cheaper = disk.seconds(1, span) <= disk.seconds(num_runs, span - skipped)
    if is_cheaper:
        begins, num_runs = torch.zeros_like(begins), 1
    first = _cuts(low, begins, chunk_bytes // PAGE)
    starts = low[first[:-1]] * PAGE
    return ReadPlan(
        starts,
        (high[first[1:] - 1] + 1) * PAGE - starts,
        first,
        num_runs,
        pages_wanted=int((high - low + 1).sum() - (gaps < 0).sum()),
        is_scan=is_cheaper and span * PAGE > chunk_bytes,
    )


def _check_ascending(rows: Tensor) -> None:
    checks.require(int(rows[0]) >= 0, f"read_rows: rows[0] = {int(rows[0])}, expected at least 0")
    falls = rows[1:] <= rows[:-1]
    if bool(falls.any()):
        at = int(falls.nonzero()[0]) + 1
        raise InputError(
            f"read_rows: rows[{at}] = {int(rows[at])} after {int(rows[at - 1])}, expected ascending distinct rows"
        )


def _cuts(low: Tensor, begins: Tensor, chunk_pages: int) -> Tensor:
    """int64 [R + 1]: the row each read begins with, and n behind: at every run, and at every chunk of pages inside one."""
    one = torch.ones(1, dtype=torch.bool)
    is_run = torch.cat([one, begins])
    base = low[is_run.nonzero()[:, 0]][is_run.cumsum(0) - 1]  # first page of each row's run
    chunk = (low - base) // chunk_pages
    is_read = is_run | torch.cat([one, chunk[1:] != chunk[:-1]])
    return torch.cat([is_read.nonzero()[:, 0], torch.tensor([low.numel()])])


def read_rows(
    handle: int,
    plan: ReadPlan,
    rows: Tensor,
    row_bytes: int,
    out: Tensor,
    *,
    offset: int = 0,
    at: Tensor | None = None,
    is_direct: bool = False,
    depth: int = 16,
    name: str = "the file",
) -> bool:
    """Read the rows that a plan was made for into ``out`` [m, F] (contiguous, rows of row_bytes), as they are stored.

    ``handle``: an open file; ``is_direct``: opened to go past the page cache (else what was read is dropped from it).
    ``at`` int64 [n]: distinct rows of out to put them in (None: the first n). ``depth`` reads are under way at a time, each
    with its own buffer of ``plan.buffer_bytes``. False where direct reads are refused: nothing is known of ``out`` then.
    InputError names a file that is too short or cannot be read.
    """
    _check(rows, row_bytes, out, at)
    if plan.num_reads == 0:
        return True
    if native.serves(rows, at, op="ph_read_rows"):
        where = torch.zeros(2, dtype=torch.int64)
        status = native.call(
            "ph_read_rows", handle, plan.starts, plan.sizes, plan.first, plan.num_reads, rows.contiguous(),
            None if at is None else at.contiguous(), row_bytes, offset, out, plan.buffer_bytes, int(is_direct), depth, where,
        )  # fmt: skip
        which, detail = where.tolist()
    else:
        status, which, detail = _read_plainly(
            handle, plan, rows, row_bytes, out, offset=offset, at=at, is_direct=is_direct
        )
    if status == _FAILED and detail == errno.EINVAL and is_direct:
        return False
    if status:
        if status == _SHORT:
            detail = os.fstat(handle).st_size
        raise _failure(status, plan, which, detail, name, offset + (int(rows[-1]) + 1) * row_bytes)
    return True


def _check(rows: Tensor, row_bytes: int, out: Tensor, at: Tensor | None) -> None:
    width = out.shape[1] * out.element_size() if out.dim() == 2 else -1
    checks.require(
        width == row_bytes and out.is_contiguous() and out.device.type == "cpu",
        f"read_rows: out must be contiguous [m, F] in memory with rows of {row_bytes} bytes, got {out.dtype} "
        f"{list(out.shape)} on {out.device}",
    )
    if at is None:
        enough = out.shape[0] >= rows.numel()
        checks.require(enough, f"read_rows: out has {out.shape[0]} rows, expected {rows.numel()}")
        return
    checks.vector("read_rows", "at", at, rows.numel())
    checks.require(at.dtype == torch.int64, f"read_rows: at must be int64, got {at.dtype}")
    if at.numel():
        low, high = (int(bound) for bound in torch.aminmax(at))
        checks.require(
            low >= 0 and high < out.shape[0],
            f"read_rows: at holds {low} .. {high}, but out has rows 0 .. {out.shape[0] - 1}",
        )


def _failure(status: int, plan: ReadPlan, which: int, detail: int, name: str, end: int) -> Exception:
    start, size = int(plan.starts[which]), int(plan.sizes[which])
    if status == _NO_MEMORY:
        return KernelError(f"read_rows: no memory for a buffer of {detail:,} bytes to read {name}")
    if status == _SHORT:
        return InputError(
            f"{name}: ends after {detail:,} bytes, expected at least {end:,}: it was cut short since it was opened, or was "
            "never whole; copy it again"
        )
    return InputError(f"{name}: cannot read {size:,} bytes at byte {start:,}: {os.strerror(detail)}")


def _read_plainly(
    handle: int,
    plan: ReadPlan,
    rows: Tensor,
    row_bytes: int,
    out: Tensor,
    *,
    offset: int,
    at: Tensor | None,
    is_direct: bool,
) -> tuple[int, int, int]:
    """The same one read after the other, without the native library: (status, read, detail)."""
    target = out.view(torch.uint8).numpy()
    place = np.arange(rows.numel()) if at is None else at.numpy()
    wanted, first = rows.numpy(), plan.first.tolist()
    with mmap.mmap(
        -1, plan.buffer_bytes
    ) as memory:  # anonymous memory begins with a page, as direct reads need
        buffer = np.frombuffer(memory, np.uint8)
        for which, (start, size) in enumerate(zip(plan.starts.tolist(), plan.sizes.tolist(), strict=True)):
            begin, end = first[which], first[which + 1]
            from_byte = offset + wanted[begin:end] * row_bytes - start
            try:
                got = os.preadv(handle, [buffer[:size].data], start)
            except OSError as error:
                del buffer
                return _FAILED, which, error.errno or errno.EIO
            if got < int(from_byte[-1]) + row_bytes:
                del buffer
                return _SHORT, which, 0
            target[place[begin:end]] = buffer[from_byte[:, None] + np.arange(row_bytes)]
            if not is_direct:
                os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)
        del buffer  # or the memory could not be given back
    return 0, 0, 0
