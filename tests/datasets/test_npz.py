"""The .npz format: what is read, and what is refused, with the file named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyhop.datasets.npz import load_npz
from polyhop.errors import DatasetError, GraphError, InputError
from polyhop.graph import DenseFeatures, SparseFeatures

PLAIN: dict[str, Any] = {
    "edge_index": np.array([[0, 1, 1, 2], [1, 0, 2, 1]], np.int32),
    "x": np.array([[1, 0], [0, 2], [3, 0]], np.uint8),
    "y": np.array([0, 1, -1], np.int8),
    "train_mask": np.array([True, False, False]),
    "val_mask": np.array([False, True, False]),
    "test_mask": np.array([False, False, False]),
    "num_nodes": np.int32(3),
    "num_classes": np.int32(2),
    "meta": np.array(json.dumps({"metric": "ROC AUC", "source": "made up"})),
}


def write(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    path = folder / "g.npz"
    np.savez_compressed(path, **{k: v for k, v in {**PLAIN, **changes}.items() if k not in drop})
    return path


def test_reads_everything(tmp_path: Path) -> None:
    graph = load_npz(write(tmp_path))
    assert (graph.name, graph.num_nodes, graph.num_edges, graph.num_classes) == ("g", 3, 4, 2)
    assert graph.indices.tolist() == [1, 0, 2, 1]
    assert isinstance(graph.x, DenseFeatures)
    assert graph.x.values.dtype.itemsize == 1
    assert graph.x.all().tolist() == [[1, 0], [0, 2], [3, 0]]
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1, -1]
    assert graph.split is not None
    assert (graph.split.train.tolist(), graph.split.val.tolist(), graph.split.test.tolist()) == ([0], [1], [])
    assert graph.metric == "roc_auc"
    assert graph.meta["source"] == "made up"


def test_scaled_features(tmp_path: Path) -> None:
    graph = load_npz(write(tmp_path, x_scale=np.array([0.5, 2.0], np.float32)))
    assert graph.x is not None
    assert graph.x.all().tolist() == [[0.5, 0], [0, 4], [1.5, 0]]  # type: ignore[union-attr]


@pytest.mark.parametrize("with_data", [True, False])
def test_sparse_features(tmp_path: Path, with_data: bool) -> None:
    indptr, columns = np.array([0, 1, 1, 3], np.int32), np.array([4, 0, 2], np.uint16)
    csr: dict[str, Any] = {"x_indptr": indptr, "x_indices": columns, "x_shape": np.array([3, 5])}
    if with_data:
        csr["x_data"] = np.array([7, 8, 9], np.uint8)
    graph = load_npz(write(tmp_path, drop=("x",), **csr))
    assert isinstance(graph.x, SparseFeatures)
    a, b, c = (7, 8, 9) if with_data else (1, 1, 1)
    assert graph.x.all().dense().tolist() == [[0, 0, 0, 0, a], [0] * 5, [b, 0, c, 0, 0]]
    dense = load_npz(write(tmp_path, drop=("x",), **csr), features="dense")
    assert isinstance(dense.x, DenseFeatures)
    assert dense.x.all().tolist() == graph.x.all().dense().tolist()


def test_feature_modes(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert load_npz(path, features="none").x is None
    sparse = load_npz(path, features="sparse").x
    assert isinstance(sparse, SparseFeatures)
    assert sparse.all().dense().tolist() == [[1, 0], [0, 2], [3, 0]]
    with pytest.raises(DatasetError, match=r"unknown features 'spares'. Did you mean 'sparse'"):
        load_npz(path, features="spares")


def test_splits_by_number_and_name(tmp_path: Path) -> None:
    codes = np.array([[1, 2, 0], [2, 1, 0]], np.uint8)
    path = write(tmp_path, split_codes=codes, split_names=np.array(["public", "other"]))
    for split, train in ((0, [0]), (1, [1]), ("public", [0]), ("other", [1])):
        graph = load_npz(path, split=split)
        assert graph.split is not None
        assert graph.split.train.tolist() == train
    assert graph.meta["split"] == "other"
    with pytest.raises(DatasetError, match=r"unknown split 'publik'. Did you mean 'public'"):
        load_npz(path, split="publik")
    with pytest.raises(DatasetError, match=r"split 2 of 2; expected 0 .. 1 \(public, other\)"):
        load_npz(path, split=2)


def test_only_edges(tmp_path: Path) -> None:
    path = tmp_path / "e.npz"
    np.savez(path, edge_index=PLAIN["edge_index"])
    graph = load_npz(path)
    assert (graph.x, graph.y, graph.split, graph.num_nodes) == (None, None, None, 3)
    with pytest.raises(DatasetError, match="has no splits"):
        load_npz(path, split=1)


def test_truncated(tmp_path: Path) -> None:
    path = write(tmp_path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        with pytest.raises(DatasetError, match=r"g\.npz: .*(damaged|cannot read)"):
            load_npz(path)


def test_damaged_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, edge_index=np.random.default_rng(0).integers(0, 3, (2, 5000)))
    whole = bytearray(path.read_bytes())
    whole[500:520] = b"\xff" * 20
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"g\.npz"):
        load_npz(path)


@pytest.mark.parametrize("name", ["edge_index", "x", "y", "meta"])
def test_pickled_arrays_are_refused(tmp_path: Path, name: str) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    path = write(tmp_path, **{name: np.array([Evil()], dtype=object)})
    with pytest.raises(DatasetError, match="pickled Python objects, which are never loaded"):
        load_npz(path)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_file_is_refused(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "g.npz"
    path.write_bytes(pickle.dumps({"edge_index": [[0], [1]]}))
    with pytest.raises(DatasetError, match="never loaded"):
        load_npz(path)


def test_other_files(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("src,dst\n0,1\n")
    with pytest.raises(DatasetError, match=r"text\.npz"):
        load_npz(text)
    single = tmp_path / "single.npz"
    with single.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DatasetError, match="found a single array"):
        load_npz(single)
    with pytest.raises(DatasetError, match="no such file"):
        load_npz(tmp_path / "missing.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": np.array([[0, 1, 1, 3], [1, 0, 2, 1]])}, r"= 3, but the graph has nodes 0 .. 2"),
        ({"edge_index": np.array([[0, 1, 1, -1], [1, 0, 2, 1]])}, "= -1"),
        ({"edge_index": np.zeros((3, 4), int)}, r"expected \[2, E\]"),
        ({"edge_index": np.array([["a"], ["b"]])}, "expected numbers"),
        ({"edge_index": np.array([[0, 0], [1, 1]])}, "1 duplicate edges, the first 0 -> 1"),
        ({"x": np.zeros((2, 2), np.float32)}, "2 rows for 3 nodes"),
        ({"x": np.zeros(3, np.float32)}, r"numeric matrix \[N, F\]"),
        ({"x": np.array([[1, np.nan]] * 3, np.float32)}, "node 0, feature 1 is nan"),
        ({"x_scale": np.ones(3, np.float32)}, "x scale"),
        ({"y": np.array([0, 2, -1])}, "node 1 has label 2"),
        ({"y": np.array([0, 1])}, r"y: expected int64 \[3\]"),
        ({"y": np.array(["a", "b", "c"])}, "y: expected class numbers"),
        ({"train_mask": np.zeros(3, bool)}, "train set is empty"),
        ({"val_mask": np.array([True, True, False])}, "node 0 is in two of train, val and test"),
        ({"val_mask": np.zeros(4, bool)}, "masks of different shapes"),
        ({"train_mask": np.array([True, False, True])}, "node 2 has no label"),
        ({"split_codes": np.zeros(3, np.uint8)}, r"split_codes must be \[S, N\]"),
        ({"num_nodes": np.array([3, 4])}, "num_nodes must be one whole number"),
        ({"meta": np.array("{not json")}, "'meta' is not JSON"),
    ],
)
def test_wrong_contents(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_npz(write(tmp_path, **changes))


def test_sparse_features_of_wrong_shape(tmp_path: Path) -> None:
    csr = {"x_indptr": np.array([0, 1]), "x_indices": np.array([0]), "x_shape": np.array([3, 2])}
    with pytest.raises(DatasetError, match=r"indptr has shape \[2\], expected \[4\]"):
        load_npz(write(tmp_path, drop=("x",), **csr))
    with pytest.raises(DatasetError, match="x_shape must hold two numbers"):
        load_npz(write(tmp_path, drop=("x",), **{**csr, "x_shape": np.array([3])}))
    with pytest.raises(DatasetError, match="unknown array 'x_shape'"):
        load_npz(write(tmp_path, drop=("x",), x_indptr=csr["x_indptr"], x_indices=csr["x_indices"]))
    with pytest.raises(GraphError, match="columns run from 0 to 9"):
        load_npz(
            write(
                tmp_path, drop=("x",), x_indptr=np.array([0, 1, 2, 2]), x_indices=np.array([0, 9]), x_shape=np.array([3, 2])
            )
        )  # fmt: skip


def test_no_edges_names_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no array 'edge_index'; it has meta, num_classes"):
        load_npz(write(tmp_path, drop=("edge_index",)))


def test_duplicates_can_be_dropped(tmp_path: Path) -> None:
    path = write(tmp_path, edge_index=np.array([[0, 0], [1, 1]]))
    assert load_npz(path, duplicates="drop").num_edges == 1
    assert load_npz(path, duplicates="keep").num_edges == 2
