"""Reading what may be wrong: the pieces that the loaders' own tests do not reach."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from polyhop.datasets._arrays import Npz, as_features, as_tensor, read_npy, reading, split_number
from polyhop.errors import DatasetError
from polyhop.graph import DenseFeatures


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot read"):
        Npz(tmp_path)


def test_our_own_errors_pass_through(tmp_path: Path) -> None:
    def refuse() -> None:
        raise DatasetError("exactly this")

    with pytest.raises(DatasetError, match=r"^exactly this$"):
        reading(tmp_path, "anything", refuse)


def test_bugs_are_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        reading(tmp_path, "anything", lambda: 1 // 0)


def test_missing_array_suggests_a_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", edge_index=np.zeros(2))
    with Npz(tmp_path / "g.npz") as file:
        assert file.find("x") is None
        with pytest.raises(DatasetError, match=r"unknown array 'edges_index'\. Did you mean 'edge_index'"):
            file.read("edges_index")


def test_mapped_array_becomes_a_tensor_without_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5))
    assert as_tensor(read_npy(tmp_path / "a.npy", mmap=True)).tolist() == [0, 1, 2, 3, 4]


def test_dense_and_sparse_hold_the_same() -> None:
    store = DenseFeatures(torch.tensor([[0, 2], [3, 0]], dtype=torch.int8), torch.tensor([1.0, 0.5]))
    sparse = as_features(store, "sparse")
    dense = as_features(sparse, "dense")
    assert isinstance(dense, DenseFeatures)
    assert dense.all().tolist() == [[0, 1], [3, 0]]
    assert as_features(dense, "dense") is dense
    assert as_features(None, "dense") is None


@pytest.mark.parametrize("split", [-1, 2])
def test_split_number_out_of_range(split: int) -> None:
    with pytest.raises(DatasetError, match=rf"here: split {split} of 2"):
        split_number(split, ["a", "b"], "here")
