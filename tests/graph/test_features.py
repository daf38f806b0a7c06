"""Feature stores: the same rows by gather and by all, whatever holds them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyhop.errors import GraphError, InputError
from polyhop.graph import DenseFeatures, FeatureStore, SparseFeatures, SparseRows

IDS = torch.tensor([3, 0, 3, 1])


def sparse() -> SparseFeatures:
    rows = SparseRows(
        torch.tensor([0, 2, 2, 3, 5]),
        torch.tensor([0, 2, 1, 0, 1], dtype=torch.int32),
        torch.arange(1.0, 6.0),
        3,
    )
    return SparseFeatures(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8])
def test_dense_gather_equals_all(dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (4, 5)).to(dtype)
    for scale in (None, torch.rand(5)) if dtype != torch.float64 else (None,):
        store = DenseFeatures(values, scale)
        assert torch.equal(store.gather(IDS), store.all()[IDS])
        assert store.gather(IDS).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert isinstance(store, FeatureStore)
    assert (store.num_rows, store.num_features) == (4, 5)


def test_dense_all_shares_memory_where_it_can() -> None:
    values = torch.rand(4, 5)
    assert DenseFeatures(values).all() is values


def test_sparse_gather_equals_dense_rows() -> None:
    store = sparse()
    dense = store.all().dense()
    assert dense.tolist() == [[1, 0, 2], [0, 0, 0], [0, 3, 0], [4, 5, 0]]
    rows = store.gather(IDS)
    assert torch.equal(rows.dense(), dense[IDS])
    assert rows.ids is not None
    assert torch.equal(rows.ids, IDS)
    assert isinstance(store, FeatureStore)
    assert (store.num_rows, store.num_features) == (4, 3)


def test_sparse_slice_and_device() -> None:
    rows = sparse().all()
    part = rows.slice(2, 4)
    assert torch.equal(part.dense(), rows.dense()[2:4])
    assert part.ids is not None
    assert part.ids.tolist() == [2, 3]
    assert torch.equal(rows.to("cpu").dense(), rows.dense())


def test_mapped_rows_are_gathered_from_the_file(tmp_path: object) -> None:
    file = f"{tmp_path}/x.npy"
    values = np.random.default_rng(0).random((50, 3), np.float32)
    np.save(file, values)
    store = DenseFeatures(torch.from_numpy(np.load(file, mmap_mode="c")), is_mapped=True)
    assert torch.equal(store.gather(torch.tensor([49, 0])), torch.from_numpy(values[[49, 0]]))


def test_wrong_shape_and_ids() -> None:
    with pytest.raises(GraphError, match="expected a matrix"):
        DenseFeatures(torch.zeros(4))
    with pytest.raises(InputError):
        DenseFeatures(torch.zeros(4, 2)).gather(torch.tensor([4]))
