"""Rows kept beside the parts: found again if made from the same, never half-written, named where damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.partition.kept import KeptRows, made_from

ROWS = torch.arange(60, dtype=torch.float32).view(10, 6)


@pytest.fixture
def kept(tmp_path: Path) -> KeptRows:
    for part in range(2):
        (tmp_path / f"part-{part:05d}").mkdir()
    return KeptRows(tmp_path, "aggregate-mean-float32", "abc")


def pieces() -> Iterator[Tensor]:
    yield from (ROWS[:3], ROWS[3:3], ROWS[3:])


def files(kept: KeptRows) -> set[str]:
    return {str(path.relative_to(kept.folder)) for path in kept.folder.rglob("*") if path.is_file()}


def test_what_is_written_is_found_again(kept: KeptRows) -> None:
    assert kept.open(1) is None
    assert torch.equal(kept.write(1, ROWS.dtype, (10, 6), pieces()), ROWS)
    found = kept.open(1)
    assert found is not None
    assert torch.equal(found, ROWS)
    assert kept.open(0) is None
    assert files(kept) == {"part-00001/aggregate-mean-float32.npy", "part-00001/aggregate-mean-float32.json"}


def test_no_rows_are_kept_too(kept: KeptRows) -> None:
    assert list(kept.write(0, torch.float64, (0, 6), iter([])).shape) == [0, 6]
    found = kept.open(0)
    assert found is not None
    assert found.dtype == torch.float64


def test_rows_made_from_something_else_are_not_found_and_are_replaced(kept: KeptRows) -> None:
    kept.write(0, ROWS.dtype, (10, 6), pieces())
    other = KeptRows(kept.folder, kept.name, "abd")
    assert other.open(0) is None
    other.write(0, ROWS.dtype, (10, 6), [ROWS * 2])
    assert kept.open(0) is None
    found = other.open(0)
    assert found is not None
    assert torch.equal(found, ROWS * 2)


def test_rows_that_are_read_stay_when_others_take_their_name(kept: KeptRows) -> None:
    old = kept.write(0, ROWS.dtype, (10, 6), pieces())
    KeptRows(kept.folder, kept.name, "abd").write(0, ROWS.dtype, (10, 6), [ROWS * 2])
    assert torch.equal(old, ROWS)


@pytest.mark.parametrize("damage", ["short", "changed", "gone", "entry", "half an entry"])
def test_damage_is_named(kept: KeptRows, damage: str) -> None:
    kept.write(0, ROWS.dtype, (10, 6), pieces())
    file = kept.folder / "part-00000" / "aggregate-mean-float32.npy"
    data = file.read_bytes()
    if damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "changed":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "gone":
        file.unlink()
    else:
        file = file.with_suffix(".json")
        file.write_text("{" if damage == "entry" else '{"format": 1, "made_from": "abc"}')
    with pytest.raises(PartitionError, match=rf"{file.name}: .*(computed again|remove )"):
        kept.open(0)


WRITER = """
import os, signal, sys, torch
from pathlib import Path
from polyhop.partition.kept import KeptRows

def pieces():
    yield torch.ones(3, 6)
    print("half", flush=True)
    if sys.argv[2] == "wait":
        sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)

KeptRows(Path(sys.argv[1]), "aggregate-mean-float32", "abc").write(0, torch.float32, (10, 6), pieces())
"""


def writer(kept: KeptRows, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(kept.folder), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_writer_that_is_killed_leaves_nothing_that_could_be_taken_for_rows(kept: KeptRows) -> None:
    with writer(kept, "die") as process:
        assert process.wait() == -signal.SIGKILL
    assert kept.open(0) is None
    assert not any("/aggregate" in name for name in files(kept))
    assert len(files(kept)) == 1  # a temporary name
    kept.write(0, ROWS.dtype, (10, 6), pieces())
    assert files(kept) == {"part-00000/aggregate-mean-float32.npy", "part-00000/aggregate-mean-float32.json"}


def test_a_writer_that_lives_keeps_its_file(kept: KeptRows) -> None:
    with writer(kept, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        kept.write(0, ROWS.dtype, (10, 6), pieces())
        assert sum(".tmp-" in name for name in files(kept)) == 1
        process.kill()


def test_a_failing_sum_leaves_nothing(kept: KeptRows) -> None:
    def failing() -> Iterator[Tensor]:
        yield ROWS[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.write(0, ROWS.dtype, (10, 6), failing())
    assert files(kept) == set()


def test_killed_between_rows_and_entry(kept: KeptRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """New rows under an old entry would be taken for the old ones: the entry goes first."""
    kept.write(0, ROWS.dtype, (10, 6), pieces())
    rename = Path.rename

    def once(self: Path, to: Path) -> Any:
        rename(self, to)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", once)
    other = KeptRows(kept.folder, kept.name, "abd")
    with pytest.raises(KeyboardInterrupt):
        other.write(0, ROWS.dtype, (10, 6), [ROWS * 2])
    assert kept.open(0) is None
    assert other.open(0) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written(kept: KeptRows) -> None:
    (kept.folder / "part-00000").chmod(0o500)
    with pytest.raises(PartitionError, match=r"cannot write .*aggregate-mean-float32.npy: Permission denied"):
        kept.write(0, ROWS.dtype, (10, 6), pieces())


def test_a_part_that_is_not_there(kept: KeptRows) -> None:
    with pytest.raises(PartitionError, match=r"cannot write .*part-00007.*: No such file"):
        kept.write(7, ROWS.dtype, (10, 6), pieces())


def test_made_from_tells_what_sums_depend_on() -> None:
    about = {
        "bounds": [0, 3],
        "files": {
            name: {"blake2b": name}
            for name in ("new_ids.npy", "part-00000/x.npy", "part-00000/indices.npy", "part-00000/y.npy")
        },
    }
    base = made_from(about, "mean")
    assert made_from(json.loads(json.dumps(about)), "mean") == base
    assert made_from(about, "sum") != base
    for name, matters in (
        ("part-00000/x.npy", True),
        ("part-00000/indices.npy", True),
        ("part-00000/y.npy", False),
    ):
        changed = json.loads(json.dumps(about))
        changed["files"][name]["blake2b"] = "other"
        assert (made_from(changed, "mean") != base) == matters, name
    assert made_from({**about, "bounds": [0, 4]}, "mean") != base
