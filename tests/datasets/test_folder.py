"""Folders of .npy: written and opened again, mapped and not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyhop.datasets.folder import is_folder, load_folder, save
from polyhop.errors import DatasetError, GraphError, InputError
from polyhop.graph import DenseFeatures, Graph

EDGES = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])


def write(folder: Path, **arrays: Any) -> Path:
    for name, array in {"edge_index": EDGES, **arrays}.items():
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return folder


@pytest.mark.parametrize("mmap", [None, True, False])
def test_edge_index_form(tmp_path: Path, mmap: bool | None) -> None:
    x = np.random.default_rng(0).random((3, 4), np.float32)
    path = write(
        tmp_path, x=x, y=np.array([0, 1, 1]), train=np.array([0]), val=np.array([False, True, False])
    )
    assert is_folder(path)
    graph = load_folder(path, mmap=mmap)
    assert isinstance(graph.x, DenseFeatures)
    assert graph.x.is_mapped is (mmap is not False)
    assert torch.equal(graph.x.all(), torch.from_numpy(x))
    assert graph.split is not None
    assert (graph.split.train.tolist(), graph.split.val.tolist()) == ([0], [1])
    assert graph.indices.tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("mmap", [None, True, False])
def test_save_and_load_give_the_same_graph(
    tmp_path: Path, make_graph: Callable[..., Graph], kind: str, sparse: bool, mmap: bool | None
) -> None:
    graph = make_graph(60, kind=kind, sparse=sparse, weighted=True)
    if kind == "single":
        assert graph.y is not None
        graph.y[graph.y < 0] = 0  # the fixture leaves one label out
    again = load_folder(save(graph, tmp_path / "g"), mmap=mmap)
    assert graph.x is not None
    assert again.x is not None
    for name in ("indptr", "indices", "y", "edge_weight"):
        assert torch.equal(getattr(again, name), getattr(graph, name))
    ids = torch.tensor([5, 0, 59])
    got, want = again.x.gather(ids), graph.x.gather(ids)
    assert torch.equal(
        got if isinstance(got, torch.Tensor) else got.dense(),
        want if isinstance(want, torch.Tensor) else want.dense(),
    )
    assert again.split is not None
    assert graph.split is not None
    assert torch.equal(again.split.test, graph.split.test)
    assert (again.name, again.num_classes, again.metric) == (graph.name, graph.num_classes, graph.metric)


def test_opening_reads_no_features(tmp_path: Path) -> None:
    """A feature file far larger than memory, holes on disk: opening and gathering a row must not touch the rest."""
    rows, width = 1 << 18, 1 << 16  # 64 GiB
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(rows, width))
    mapped[rows - 1, 0] = 7.0
    del mapped
    np.save(tmp_path / "edge_index.npy", EDGES)
    graph = load_folder(tmp_path)
    assert graph.num_nodes == rows
    assert graph.x is not None
    row = graph.x.gather(torch.tensor([rows - 1]))
    assert isinstance(row, torch.Tensor)
    assert float(row[0, 0]) == 7.0


def test_saving_again_replaces(tmp_path: Path, make_graph: Callable[..., Graph]) -> None:
    save(make_graph(60, sparse=True, weighted=True, kind="multi"), tmp_path)
    save(make_graph(40, kind="multi"), tmp_path)
    again = load_folder(tmp_path)
    assert (again.num_nodes, again.edge_weight) == (40, None)
    assert isinstance(again.x, DenseFeatures)
    assert not list(tmp_path.glob("*.partial*"))


def test_other_feature_kinds(tmp_path: Path) -> None:
    half = load_folder(write(tmp_path, x=np.ones((3, 2), np.float16)))
    assert isinstance(half.x, DenseFeatures)
    assert half.x.values.dtype == torch.float32
    assert not half.x.is_mapped
    with pytest.raises(DatasetError, match=r"mmap=True: .*x\.npy holds float16"):
        load_folder(tmp_path, mmap=True)
    scaled = load_folder(
        write(tmp_path, x=np.ones((3, 2), np.int8), x_scale=np.array([2.0, 3.0], np.float32))
    )
    assert scaled.x is not None
    assert scaled.x.all()[0].tolist() == [2.0, 3.0]  # type: ignore[index]
    assert load_folder(tmp_path, features="none").x is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"edge_index": np.array([[0, 1], [1, 9]]), "y": np.array([0, 1, 1])}, "nodes 0 .. 2"),
        ({"x": np.ones(3, np.float32)}, r"x\.npy: expected a numeric matrix"),
        ({"x": np.ones((4, 2), np.float32), "y": np.zeros(3, int)}, r"y: expected int64 \[4\]"),
        ({"y": np.array([0, 1, 1]), "train": np.zeros(3, bool)}, "train set is empty"),
        ({"y": np.array([0, 1, 1]), "train": np.array([0]), "val": np.array([0])}, "in both train and val"),
        (
            {"edge_index": None, "indptr": np.array([0, 1, 2]), "indices": np.array([1.0, 0])},
            "expected int32 or int64",
        ),
        ({"edge_index": None, "indptr": np.array([0, 1, 3]), "indices": np.array([1, 0])}, "from 0 to 2"),
        ({"edge_index": None, "indices": np.array([1, 0])}, r"indptr\.npy: no such file"),
        ({"edge_weight": np.array([1.0, 2.0])}, "one per edge"),
    ],
)
def test_wrong_arrays(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_folder(write(tmp_path, **arrays))


def test_nan_in_memory_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, x=np.full((3, 2), np.nan, np.float32))
    with pytest.raises(GraphError, match="node 0, feature 0 is nan"):
        load_folder(path, mmap=False)


@pytest.mark.parametrize("mmap", [None, True])
def test_truncated_and_pickled(tmp_path: Path, mmap: bool | None) -> None:
    path = write(tmp_path, x=np.ones((3, 200), np.float32))
    file = path / "x.npy"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DatasetError, match=r"x\.npy: cannot read"):
        load_folder(path, mmap=mmap)
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DatasetError, match=r"x\.npy"):
        load_folder(path, mmap=mmap)
    np.savez(path / "x.npz", a=np.ones(3))
    (path / "x.npz").replace(file)
    with pytest.raises(DatasetError, match="found an archive"):
        load_folder(path, mmap=mmap)


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_bad_manifest(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "graph.json").write_text(text)
    with pytest.raises(DatasetError, match=r"graph\.json"):
        load_folder(tmp_path)
