"""Sizes without loading: the same as those of the loaded graph, whatever the form, and no feature is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyhop import datasets
from polyhop.datasets import GraphSizes, load, save, sizes
from polyhop.errors import DatasetError
from polyhop.graph import DenseFeatures, SparseFeatures


def of(source: object, **given: object) -> GraphSizes:
    graph = load(source, **given)  # type: ignore[arg-type]
    found = GraphSizes(graph.name, graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes)
    if isinstance(graph.x, SparseFeatures):
        return replace(found, row_length=graph.x.rows.values.numel() / graph.num_nodes)
    if isinstance(graph.x, DenseFeatures):
        dtype = str(graph.x.values.dtype).removeprefix("torch.")
        return replace(found, row_dtype=dtype, has_scale=graph.x.scale is not None)
    return found


def test_embedded() -> None:
    assert sizes("debian-packages") == of("debian-packages")


def test_npz(tiny_dir: Path) -> None:
    assert sizes("tiny", data_dir=tiny_dir) == of("tiny", data_dir=tiny_dir)


def test_folder(tiny_dir: Path, tmp_path: Path) -> None:
    save(load("tiny", data_dir=tiny_dir), tmp_path / "saved")
    assert sizes(str(tmp_path / "saved")) == of(tmp_path / "saved")


ARRAYS = {
    "edges": {"edge_index": np.array([[0, 1, 2], [1, 2, 4]])},
    "labels": {"edge_index": np.array([[0, 1], [1, 2]]), "y": np.array([0, 3, -1, 1])},
    "several": {"edge_index": np.array([[0, 1], [1, 2]]), "y": np.zeros((4, 6))},
    "column": {"edge_index": np.array([[0, 1], [1, 2]]), "y": np.array([[0], [3], [1]])},
    "dense": {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.zeros((7, 5), "float32")},
    "given": {"edge_index": np.array([[0, 1], [1, 2]]), "num_nodes": np.array(9), "num_classes": np.array(8)},
    "sparse": {
        "edge_index": np.array([[0, 1], [1, 2]]), "x_indptr": np.array([0, 1, 1, 2]), "x_indices": np.array([3, 1]),
        "x_shape": np.array([3, 11]),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ARRAYS))
def test_arrays_of_all_kinds(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / f"{name}.npz", **ARRAYS[name])
    assert sizes(str(tmp_path / f"{name}.npz")) == of(tmp_path / f"{name}.npz")


def test_features_are_not_read(tmp_path: Path) -> None:
    """A file whose header promises more than it holds is good enough."""
    edges = np.array([[0, 1], [1, 2]])
    folder = tmp_path / "cut"
    folder.mkdir()
    np.save(folder / "edge_index.npy", edges)
    np.save(folder / "y.npy", np.array([0, 1, 2]))
    np.save(folder / "x.npy", np.zeros((3, 1000), "float32"))
    whole = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(whole[:200])
    assert sizes(str(folder)) == GraphSizes("cut", 3, 2, 1000, 3)


@pytest.mark.parametrize("name", ["synth:arxiv?scale=0.01", "synth:products?scale=0.001&features=8"])
def test_generators(name: str) -> None:
    found, made = sizes(name), of(name)
    assert (found.num_nodes, found.num_features, found.num_classes) == (
        made.num_nodes,
        made.num_features,
        made.num_classes,
    )
    assert found.num_edges == pytest.approx(made.num_edges, rel=0.02)


def test_large_generators_are_not_made() -> None:
    assert sizes("synth:papers").num_edges == 1_615_685_872
    found = sizes("synth:procedural?nodes=1e9&features=256&degree=20")
    assert (found.num_nodes, found.num_edges, found.num_features) == (10**9, 2 * 10**10, 256)


def test_text_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "e.csv").write_text("source,target\n0,1\n1,2\n")
    assert sizes(str(tmp_path / "e.csv")) == GraphSizes("e", 3, 2, 0, 0)
    assert sizes("sbm:?nodes=300&classes=3&p_in=0.05&p_out=0.005").num_classes == 3


def test_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz", y=np.zeros(3))
    with pytest.raises(DatasetError, match="no edges"):
        sizes(str(tmp_path / "none.npz"))
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    with pytest.raises(DatasetError, match="damaged"):
        sizes(str(tmp_path / "broken.npz"))
    with pytest.raises(DatasetError, match="unknown data set"):
        datasets.sizes("no-such-graph")
    with pytest.raises(DatasetError, match="unknown synthetic graph"):
        datasets.sizes("synth:nothing")
