"""Rows read from a file are its bytes, whatever the reads; a plan covers every row, reads through gaps by the rule, and
scans exactly where that is cheaper.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels.read_rows import CHUNK_BYTES, PAGE, TYPICAL_DISK, Disk, plan_reads, read_rows

SLOW_SEEKS = Disk(reads_per_s=100, bytes_per_s=4e8)
FAST_SEEKS = Disk(reads_per_s=1e9, bytes_per_s=1e9)


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("POLYHOP_KERNELS", request.param)
    return str(request.param)


@contextmanager
def opened(path: Path, *, direct: bool = False) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError as error:
        pytest.skip(f"no direct reads here: {error}")
    try:
        yield handle
    finally:
        os.close(handle)


def some_file(path: Path, num_rows: int, row_bytes: int, offset: int) -> Tensor:
    """A file of random rows behind a header; its rows, uint8 [N, row_bytes]."""
    values = torch.randint(256, (num_rows, row_bytes), dtype=torch.uint8)
    path.write_bytes(os.urandom(offset) + values.numpy().tobytes())
    return values


def pages_of(row: int, row_bytes: int, offset: int) -> range:
    start = offset + row * row_bytes
    return range(start // PAGE, (start + row_bytes - 1) // PAGE + 1)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("row_bytes", "offset"), [(512, 128), (100, 0), (4096, 4096), (5000, 7), (1, 80), (9000, 128)]
)
def test_rows_are_the_bytes_of_the_file(
    kernels: str, tmp_path: Path, row_bytes: int, offset: int, direct: bool
) -> None:
    values = some_file(tmp_path / "rows", 300, row_bytes, offset)
    gen = torch.Generator().manual_seed(1)
    wanted = {
        "random": torch.randperm(300, generator=gen)[:40].sort().values,
        "adjacent": torch.arange(100, 140),
        "all": torch.arange(300),
        "none": torch.zeros(0, dtype=torch.int64),
        "first": torch.tensor([0]),
        "last": torch.tensor([299]),
        "ends": torch.tensor([0, 299]),
    }
    with opened(tmp_path / "rows", direct=direct) as handle:
        for name, rows in wanted.items():
            for disk in (TYPICAL_DISK, SLOW_SEEKS, FAST_SEEKS):
                plan = plan_reads(rows, row_bytes, offset=offset, disk=disk, chunk_bytes=8192)
                out = torch.zeros(rows.numel(), row_bytes, dtype=torch.uint8)
                assert read_rows(handle, plan, rows, row_bytes, out, offset=offset, is_direct=direct)
                assert torch.equal(out, values[rows]), (name, disk)


def test_rows_go_where_they_are_told(kernels: str, tmp_path: Path) -> None:
    values = some_file(tmp_path / "rows", 50, 300, 11)
    rows, at = torch.tensor([3, 4, 20, 49]), torch.tensor([5, 0, 2, 1])
    out = torch.zeros(6, 300, dtype=torch.uint8)
    plan = plan_reads(rows, 300, offset=11)
    with opened(tmp_path / "rows") as handle:
        assert read_rows(handle, plan, rows, 300, out, offset=11, at=at)
    assert torch.equal(out[at], values[rows])
    assert not bool(out[[3, 4]].any())


@pytest.mark.parametrize("depth", [1, 2, 16, 64])
def test_any_number_of_reads_under_way(tmp_path: Path, native_only: None, depth: int) -> None:
    values = some_file(tmp_path / "rows", 5000, 512, 128)
    rows = torch.randperm(5000)[:300].sort().values
    out = torch.empty(300, 512, dtype=torch.uint8)
    plan = plan_reads(rows, 512, offset=128, disk=FAST_SEEKS)
    assert plan.num_reads > 100
    with opened(tmp_path / "rows", direct=True) as handle:
        assert read_rows(handle, plan, rows, 512, out, offset=128, is_direct=True, depth=depth)
    assert torch.equal(out, values[rows])


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_cut_short_is_named(kernels: str, tmp_path: Path, direct: bool) -> None:
    some_file(tmp_path / "rows", 100, 512, 128)
    rows = torch.tensor([1, 50, 99])
    plan, out = plan_reads(rows, 512, offset=128), torch.empty(3, 512, dtype=torch.uint8)
    os.truncate(tmp_path / "rows", 128 + 99 * 512 + 100)
    with (
        opened(tmp_path / "rows", direct=direct) as handle,
        pytest.raises(InputError, match=r"x\.npy: ends after 50,916 bytes, expected at least 51,328"),
    ):
        read_rows(handle, plan, rows, 512, out, offset=128, is_direct=direct, name="x.npy")


def test_a_read_that_fails_is_named(kernels: str, tmp_path: Path) -> None:
    some_file(tmp_path / "rows", 10, 512, 0)
    handle = os.open(tmp_path / "rows", os.O_WRONLY)
    rows = torch.arange(10)
    try:
        with pytest.raises(
            InputError, match=r"x\.npy: cannot read 8,192 bytes at byte 0: Bad file descriptor"
        ):
            read_rows(
                handle,
                plan_reads(rows, 512),
                rows,
                512,
                torch.empty(10, 512, dtype=torch.uint8),
                name="x.npy",
            )
    finally:
        os.close(handle)


def test_refused_direct_reads_are_told(kernels: str, tmp_path: Path) -> None:
    """What a file system without them answers, brought about by a read inside a sector."""
    some_file(tmp_path / "rows", 100, 512, 0)
    rows = torch.arange(100)
    plan = plan_reads(rows, 512)
    askew = type(plan)(plan.starts + 1, plan.sizes, plan.first, 1, 1, is_scan=False)
    with opened(tmp_path / "rows", direct=True) as handle:
        with suppress(OSError):
            os.preadv(handle, [bytearray(10)], 1)
            pytest.skip("this file system reads anything directly")
        out = torch.empty(100, 512, dtype=torch.uint8)
        assert not read_rows(handle, askew, rows, 512, out, offset=1, is_direct=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([3, 2], r"rows\[1\] = 2 after 3"), ([3, 3], r"rows\[1\] = 3 after 3"), ([-1, 2], r"rows\[0\] = -1")],
)
def test_rows_must_rise(rows: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_reads(torch.tensor(rows), 512)


def test_wrong_arguments() -> None:
    rows = torch.arange(3)
    plan = plan_reads(rows, 8)
    with pytest.raises(InputError, match="int64"):
        plan_reads(rows.int(), 8)
    for wrong in ({"row_bytes": 0}, {"row_bytes": 8, "offset": -1}, {"row_bytes": 8, "chunk_bytes": 5000}):
        with pytest.raises(InputError, match="expected row_bytes"):
            plan_reads(rows, **wrong)
    for out in (torch.empty(3, 3), torch.empty(3, 4).t(), torch.empty(24)):
        with pytest.raises(InputError, match="out must be contiguous"):
            read_rows(0, plan, rows, 8, out)
    with pytest.raises(InputError, match="out has 2 rows, expected 3"):
        read_rows(0, plan, rows, 8, torch.empty(2, 2))
    with pytest.raises(InputError, match=r"at holds 0 \.\. 3"):
        read_rows(0, plan, rows, 8, torch.empty(3, 2), at=torch.tensor([0, 1, 3]))


def test_the_share_above_which_a_scan_is_cheaper() -> None:
    disk = Disk(reads_per_s=39_000, bytes_per_s=4.5e9)
    assert disk.scan_share == pytest.approx(0.0355, rel=1e-3)
    assert disk.gap_pages == 28
    every = PAGE // 512  # rows of a page
    near = plan_reads(torch.arange(0, 100_000, 29 * every), 512, disk=disk)  # gaps of 28 pages
    far = plan_reads(torch.arange(0, 100_000, 30 * every), 512, disk=disk)
    assert near.is_scan
    assert near.num_runs == 1
    assert not far.is_scan
    assert far.num_reads == far.pages_read == far.pages_wanted


def test_a_dense_stretch_is_swept_and_a_thin_one_is_not() -> None:
    disk = Disk(reads_per_s=10_000, bytes_per_s=1e9)  # 24 pages
    dense, thin = torch.arange(0, 8_000, 8), torch.arange(100_000, 900_000, 8_000)
    plan = plan_reads(torch.cat([dense, thin]), 512, disk=disk)
    assert plan.num_runs == 1 + thin.numel()
    assert not plan.is_scan


@st.composite
def requests(draw: st.DrawFn) -> tuple[Tensor, int, int, Disk, int | None, int]:
    rows = draw(
        st.lists(
            st.integers(0, draw(st.sampled_from([20, 400, 100_000]))), min_size=1, max_size=60, unique=True
        )
    )
    disk = Disk(draw(st.floats(10, 1e6)), draw(st.floats(1e6, 1e10)))
    return (
        torch.tensor(sorted(rows)),
        draw(st.integers(1, 12_000)),
        draw(st.integers(0, 9_000)),
        disk,
        draw(st.one_of(st.none(), st.integers(0, 40))),
        PAGE * draw(st.sampled_from([1, 2, 3, 16, 256])),
    )


@settings(max_examples=300, deadline=None)
@given(requests())
def test_plans(request: tuple[Tensor, int, int, Disk, int | None, int]) -> None:
    rows, row_bytes, offset, disk, gap_pages, chunk_bytes = request
    plan = plan_reads(rows, row_bytes, offset=offset, disk=disk, gap_pages=gap_pages, chunk_bytes=chunk_bytes)
    reads = [
        range(s // PAGE, (s + z) // PAGE)
        for s, z in zip(plan.starts.tolist(), plan.sizes.tolist(), strict=True)
    ]
    # Every row is in exactly the read that is said to hold it, and every read holds one.
    assert plan.first[0] == 0
    assert plan.first[-1] == rows.numel()
    assert bool((plan.first.diff() >= 1).all())
    held = torch.repeat_interleave(torch.arange(plan.num_reads), plan.first.diff()).tolist()
    pages = [pages_of(row, row_bytes, offset) for row in rows.tolist()]
    for which, own in zip(held, pages, strict=True):
        assert own[0] in reads[which]
        assert own[-1] in reads[which]
    # No read begins or ends with a page that nobody wants; buffers are bounded.
    wanted = set().union(*pages)
    assert all(read[0] in wanted and read[-1] in wanted for read in reads)
    assert max(map(len, reads)) * PAGE <= chunk_bytes + (row_bytes // PAGE + 1) * PAGE
    assert plan.buffer_bytes == max(map(len, reads)) * PAGE
    assert plan.pages_wanted == len(wanted)
    assert plan.pages_read == sum(map(len, reads))
    # Gaps: read through up to the limit, or everywhere, where all at once is no dearer.
    limit = disk.gap_pages if gap_pages is None else gap_pages
    gaps = [b[0] - a[-1] - 1 for a, b in pairwise(pages)]
    left = [gap for gap in gaps if gap > limit]
    span = pages[-1][-1] - pages[0][0] + 1
    is_cheaper = disk.seconds(1, span) <= disk.seconds(1 + len(left), span - sum(left))
    assert plan.num_runs == (1 if is_cheaper else 1 + len(left))
    assert plan.is_scan == (is_cheaper and span * PAGE > chunk_bytes)
    if gap_pages is None:
        assert is_cheaper == (not left)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_planned_reads_give_the_rows(tmp_path_factory: pytest.TempPathFactory, request) -> None:
    rows, row_bytes, offset, disk, gap_pages, chunk_bytes = request
    rows = rows[rows < 400]
    row_bytes = min(row_bytes, 5000)
    path = tmp_path_factory.mktemp("rows") / "rows"
    values = some_file(path, 400, row_bytes, offset)
    plan = plan_reads(rows, row_bytes, offset=offset, disk=disk, gap_pages=gap_pages, chunk_bytes=chunk_bytes)
    out = torch.empty(rows.numel(), row_bytes, dtype=torch.uint8)
    with opened(path) as handle:
        assert read_rows(handle, plan, rows, row_bytes, out, offset=offset)
    assert torch.equal(out, values[rows])
    path.unlink()


def test_memory_is_bounded_by_the_chunk(tmp_path: Path) -> None:
    plan = plan_reads(torch.arange(1 << 20), 512, offset=128)
    assert plan.is_scan
    assert plan.buffer_bytes <= CHUNK_BYTES + 2 * PAGE
    assert plan.num_reads == (1 << 29) // CHUNK_BYTES
    assert plan.pages_read <= plan.pages_wanted + plan.num_reads


def test_float_rows(kernels: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((200, 33)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    offset = (tmp_path / "x.npy").stat().st_size - values.nbytes
    rows = torch.arange(0, 200, 3)
    out = torch.empty(rows.numel(), 33)
    with opened(tmp_path / "x.npy") as handle:
        assert read_rows(handle, plan_reads(rows, 132, offset=offset), rows, 132, out, offset=offset)
    assert np.array_equal(out.numpy(), values[rows.numpy()])
