"""Checkpoints are whole or absent; damage is found and named; a full disk leaves the last good one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyhop.errors import CheckpointError
from polyhop.train import checkpoint
from polyhop.train.checkpoint import Checkpoints, find_checkpoint, read_checkpoint, run_folder_of


def files(seed: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, generator=generator)
    odd = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 2),
        "bf16": weight.bfloat16(),
        "flag": torch.tensor([True]),
    }
    return {
        "model": {"weight": weight, "tied": weight, "turned": weight.T, **odd},
        "optimizer": {"weight/step": torch.tensor(2)},
    }


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def names(store: Checkpoints) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_round_trip(store: Checkpoints) -> None:
    record = {"state": {"epoch": 3, "loss": 0.1}, "fan": (1, 2)}
    path = store.save(7, files(0), record)
    assert path.name == "step-00000007"
    found = store.newest()
    assert found is not None
    assert (found.step, found.record) == (7, {"state": {"epoch": 3, "loss": 0.1}, "fan": [1, 2]})
    for stem, tensors in files(0).items():
        for name, tensor in tensors.items():
            back = found.tensors[stem][name]
            assert back.dtype == tensor.dtype
            assert torch.equal(back, tensor)
    assert names(store) == ["step-00000007"]


def test_old_ones_go_but_the_best_stays(store: Checkpoints) -> None:
    for step in range(1, 8):
        store.save(step, files(step), {}, is_best=step in (1, 3))
    assert names(store) == ["step-00000003", "step-00000006", "step-00000007"]


def test_newest_is_by_number_not_by_spelling(store: Checkpoints) -> None:
    store.save(99_999_999, files(0), {})
    store.save(100_000_000, files(1), {})
    found = store.newest()
    assert found is not None
    assert found.step == 100_000_000


def test_the_same_step_can_be_written_again(store: Checkpoints) -> None:
    store.save(5, files(0), {"n": 1})
    store.save(5, files(1), {"n": 2})
    found = store.newest()
    assert found is not None
    assert found.record == {"n": 2}
    assert names(store) == ["step-00000005"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize(
    "harm", ["missing", "truncated", "empty", "flipped at the end", "flipped in the middle"]
)
def test_a_damaged_checkpoint_is_skipped_and_named(store: Checkpoints, name: str, harm: str) -> None:
    store.save(1, files(1), {"n": 1.25})
    bad = store.save(2, files(2), {"n": 2.25}) / name
    size = bad.stat().st_size
    if harm == "missing":
        bad.unlink()
    elif harm == "truncated":
        os.truncate(bad, size // 2)
    elif harm == "empty":
        os.truncate(bad, 0)
    else:
        flip(bad, size - 2 if harm.endswith("end") else size // 2)
    with pytest.warns(RuntimeWarning, match=f"checkpoint skipped: .*{name}"):
        found = store.newest()
    assert found is not None
    assert found.record == {"n": 1.25}
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(bad.parent)


def test_all_damaged_is_none(store: Checkpoints) -> None:
    assert store.newest() is None
    shutil.rmtree(store.save(1, files(1), {}))
    (store.folder / "step-00000001").mkdir()
    with pytest.warns(RuntimeWarning, match="state.json is missing"):
        assert store.newest() is None


def test_a_newer_format_is_refused_not_skipped(store: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 9)
    store.save(1, files(1), {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"format 9.*upgrade polyhop"):
        store.newest()


def test_a_writer_that_was_killed_leaves_nothing_that_counts(store: Checkpoints) -> None:
    store.save(1, files(1), {})
    half = store.folder / ".tmp-step-00000002-4711"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    found = store.newest()
    assert found is not None
    assert found.step == 1
    store.clean()
    assert names(store) == ["step-00000001"]


def test_a_disk_that_fills_up_midway_keeps_the_last_good_one(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, files(1), {"n": 1})
    real = checkpoint.write_synced

    def full(path: Path, data: bytes) -> None:
        if path.name == "optimizer.safetensors":
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    with pytest.raises(
        CheckpointError, match=r"step-00000002: No space left.*last good checkpoint is .*step-00000001"
    ):
        store.save(2, files(2), {"n": 2})
    assert names(store) == ["step-00000001"]
    found = store.newest()
    assert found is not None
    assert found.record == {"n": 1}


def test_a_really_full_disk(small_disk: Path) -> None:
    store = Checkpoints(small_disk / "checkpoints", keep=5)
    for step in (1, 2):
        store.save(step, {"model": {"w": torch.full((80_000,), float(step))}}, {})
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(3, {"model": {"w": torch.zeros(100_000)}}, {})
    assert names(store) == ["step-00000001", "step-00000002"]
    found = store.newest()
    assert found is not None
    assert torch.equal(found.tensors["model"]["w"], torch.full((80_000,), 2.0))


def test_paths_given_by_people(store: Checkpoints) -> None:
    saved = store.save(4, files(4), {})
    run = store.folder.parent
    assert run_folder_of(saved) == run_folder_of(run) == run
    assert find_checkpoint(saved).step == find_checkpoint(run).step == 4
    with pytest.raises(CheckpointError, match="no checkpoint to resume"):
        find_checkpoint(run / "elsewhere")


def test_nothing_is_pickled(store: Checkpoints) -> None:
    path = store.save(1, files(1), {})
    json.loads((path / "state.json").read_text())
    assert all(file.suffix in (".safetensors", ".json") for file in path.iterdir())
