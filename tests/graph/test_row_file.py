"""A file of rows is opened past the page cache where it can be, says what is wrong with it, and is measured once."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from polyhop.errors import InputError
from polyhop.graph import row_file
from polyhop.graph.row_file import RowFile, measure_disk, open_rows
from polyhop.kernels.read_rows import TYPICAL_DISK, plan_reads


def read(file: RowFile, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty(rows.numel(), file.row_bytes, dtype=torch.uint8)
    file.read(plan_reads(rows, file.row_bytes, offset=file.offset), rows, out, None)
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((500, 20)).astype(np.float32))
    return tmp_path / "x.npy"


def expected(path: Path, rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.load(path))[rows].view(torch.uint8)


def test_a_header_says_what_the_rows_are(path: Path) -> None:
    file, dtype, columns = open_rows(path, None, None, 0)
    assert (dtype, columns) == (torch.float32, 20)
    assert (file.num_rows, file.row_bytes, file.end) == (500, 80, path.stat().st_size)
    rows = torch.arange(0, 500, 7)
    assert torch.equal(read(file, rows), expected(path, rows))


def test_a_file_system_that_will_not_open_files_for_direct_reads(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(name: Path, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    file, _, _ = open_rows(path, None, None, 0)
    rows = torch.arange(100, 300)
    assert torch.equal(read(file, rows), expected(path, rows))
    assert not file.is_direct()


def test_a_file_system_that_refuses_the_direct_read_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _, _ = open_rows(path, None, None, 0)
    asked: list[bool] = []
    real = row_file.read_rows

    def refusing(*given, is_direct: bool, **more) -> bool:  # type: ignore[no-untyped-def]
        asked.append(is_direct)
        return not is_direct and real(*given, is_direct=False, **more)

    monkeypatch.setattr(row_file, "read_rows", refusing)
    rows = torch.arange(0, 500, 9)
    for _ in range(2):
        assert torch.equal(read(file, rows), expected(path, rows))
    assert asked[-1] is False
    assert asked.count(True) <= 1  # it is not asked for again
    assert len(os.listdir("/proc/self/fd")) < 1000


def test_in_memory_file_system() -> None:
    """tmpfs, which refuses direct reads on many systems."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no /dev/shm to write to")
    path = shared / f"polyhop-test-rows-{os.getpid()}.npy"
    try:
        np.save(path, np.arange(3000, dtype=np.float32).reshape(300, 10))
        file, _, _ = open_rows(path, None, None, 0)
        rows = torch.arange(0, 300, 2)
        assert torch.equal(read(file, rows), expected(path, rows))
    finally:
        path.unlink(missing_ok=True)


def test_a_copy_opens_the_file_again(path: Path) -> None:
    file, _, _ = open_rows(path, None, None, 0)
    rows = torch.tensor([4, 400])
    read(file, rows)
    other = pickle.loads(pickle.dumps(file))
    assert torch.equal(read(other, rows), expected(path, rows))


def test_handles_are_given_back(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        file, _, _ = open_rows(path, None, None, 0)
        read(file, torch.tensor([1]))
        del file
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_what_can_be_wrong_with_a_file(tmp_path: Path, path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.npy: No such file"):
        open_rows(tmp_path / "gone.npy", None, None, 0)
    with pytest.raises(InputError, match=r"gone\.bin: No such file"):
        open_rows(tmp_path / "gone.bin", (3, 4), torch.float32, 0)
    (tmp_path / "text.npy").write_text("not an array at all")
    with pytest.raises(InputError, match=r"text\.npy: not a \.npy file"):
        open_rows(tmp_path / "text.npy", None, None, 0)
    for array, message in (
        (np.zeros(5, np.float32), r"expected a matrix \[N, F\] in C order, got \[5\]"),
        (np.asfortranarray(np.zeros((5, 3), np.float32)), "in Fortran order"),
        (np.zeros((5, 3), np.float16), "float16 cannot be read in place"),
        (np.zeros((5, 3), ">f4"), "cannot be read in place"),
        (np.zeros((5, 3), np.int64), "int64 cannot be read in place"),
    ):
        np.save(tmp_path / "wrong.npy", array)
        with pytest.raises(InputError, match=message):
            open_rows(tmp_path / "wrong.npy", None, None, 0)
    with pytest.raises(InputError, match=r"holds float32, which cannot be torch\.bfloat16"):
        open_rows(path, None, torch.bfloat16, 0)
    with pytest.raises(InputError, match=r"torch\.int64 cannot be read in place"):
        open_rows(path, (5, 5), torch.int64, 0)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(
        InputError, match=r"40,127 bytes, expected 40,128 for 500 rows of 80 bytes from byte 128"
    ):
        open_rows(path, None, None, 0)


def test_a_file_that_goes_before_it_is_read(path: Path) -> None:
    file, _, _ = open_rows(path, None, None, 0)
    path.unlink()
    with pytest.raises(InputError, match=r"x\.npy: No such file"):
        read(file, torch.tensor([3]))


def test_mapped_rows(path: Path, tmp_path: Path) -> None:
    file, dtype, columns = open_rows(path, None, None, 0)
    assert torch.equal(file.mapped(dtype, columns), torch.from_numpy(np.load(path)))
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc" + path.read_bytes()[128:])
    askew, _, _ = open_rows(odd, (500, 20), torch.float32, 3)
    assert torch.equal(askew.mapped(torch.float32, 20), torch.from_numpy(np.load(path)))
    empty, _, _ = open_rows(odd, (0, 20), torch.float32, 3)
    assert list(empty.mapped(torch.float32, 20).shape) == [0, 20]


def test_a_disk_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "_MEASURED", {})
    path = tmp_path / "large"
    path.write_bytes(bytes(64 << 20))
    assert measure_disk(path, 64 << 20) == TYPICAL_DISK  # too small to be worth it
    monkeypatch.setattr(row_file, "_MEASURED_BYTES", 1 << 20)
    disk = measure_disk(path, 64 << 20)
    assert disk.reads_per_s > 0
    assert disk.gap_pages >= 2
    monkeypatch.setattr(row_file, "_measured", lambda pages: pytest.fail("measured twice"))
    assert measure_disk(path, 64 << 20) is disk
