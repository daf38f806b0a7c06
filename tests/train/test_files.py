"""A file is replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyhop.errors import CheckpointError
from polyhop.train import files
from polyhop.train.files import pack, read_tensors, replace_file


def test_replace(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"one")
    replace_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_file(path, b"one")

    def refuse(path: Path, data: bytes) -> None:
        path.write_bytes(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_synced", refuse)
    with pytest.raises(CheckpointError, match=r"a\.json: No space left"):
        replace_file(path, b"two")
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_tensors_survive_and_damage_is_named(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    path = tmp_path / "w.safetensors"
    replace_file(path, pack({"a": weight, "same": weight, "turned": weight.T}))
    back = read_tensors(path)
    assert torch.equal(back["a"], weight)
    assert torch.equal(back["same"], weight)
    assert torch.equal(back["turned"], weight.T)
    path.write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"w.safetensors"):
        read_tensors(path)
