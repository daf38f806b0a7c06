"""``polyhop.load``: one door for every source, and every wrong source told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import polyhop
from polyhop.datasets import load, names, save
from polyhop.errors import DatasetError, GraphError
from polyhop.graph import DenseFeatures, Graph, SparseFeatures


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_DATA", raising=False)


def test_embedded_graph() -> None:
    graph = polyhop.load("debian-packages")
    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (63_436, 637_940, 50)
    assert isinstance(graph.x, SparseFeatures)
    assert (graph.num_features, len(graph.meta["classes"])) == (2048, 50)
    assert graph.split is not None
    assert [part.numel() for part in vars(graph.split).values()] == [37_960, 12_369, 12_752]
    assert graph.y is not None
    assert int((graph.y < 0).sum()) > 0
    other = polyhop.load("debian-packages", split=4, features="none")
    assert other.split is not None
    assert not torch.equal(other.split.train, graph.split.train)


def test_a_name_in_a_folder(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("tiny", data_dir=tiny_dir).num_nodes == 80
    assert load("tiny.npz", data_dir=tiny_dir).num_nodes == 80
    assert "tiny" in names(tiny_dir)
    monkeypatch.setenv("POLYHOP_DATA", str(tiny_dir))
    assert load("tiny").name == "tiny"


def test_paths(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(tiny_dir / "tiny.npz").num_nodes == 80
    assert load(str(tiny_dir / "tiny.npz")).num_nodes == 80
    np.savez(tmp_path / "near.npz", edge_index=np.array([[0], [1]]))
    monkeypatch.chdir(tmp_path)
    assert load("near.npz").num_nodes == 2
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "edges.csv").write_text("src,dst\n0,1\n")
    assert load("tables").num_nodes == 2
    assert load(tmp_path / "tables").name == "tables"
    (tmp_path / "more.csv").write_text("id,label\n0,1\n1,0\n2,1\n")
    assert load(tmp_path / "tables" / "edges.csv", nodes=tmp_path / "more.csv").num_nodes == 3


def test_a_folder_of_arrays(tmp_path: Path, make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(kind="multi")
    again = load(save(graph, tmp_path / "g"))
    assert isinstance(again.x, DenseFeatures)
    assert again.x.is_mapped
    assert torch.equal(again.indices, graph.indices)


def test_an_ogb_folder(tmp_path: Path) -> None:
    raw = tmp_path / "ogbn_tiny" / "raw"
    raw.mkdir(parents=True)
    np.savez(raw / "data.npz", edge_index=np.array([[0], [1]]), num_nodes_list=[3])
    assert load("ogbn-tiny", data_dir=tmp_path).num_nodes == 3


def test_generators(tmp_path: Path) -> None:
    text = "synth:arxiv?scale=0.005"
    graph = load(text)
    assert graph.num_nodes == 847
    assert load(text, features="none").x is None
    mapped = load(text, data_dir=tmp_path, mmap=True)
    assert isinstance(mapped.x, DenseFeatures)
    assert isinstance(graph.x, DenseFeatures)
    assert mapped.x.is_mapped
    assert torch.equal(mapped.x.values, graph.x.values)
    assert torch.equal(mapped.indices, graph.indices)
    assert mapped.name == text
    before = {file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")}
    load(text, data_dir=tmp_path, mmap=True)
    assert {
        file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("*.npy")
    } == before  # opened, not made anew
    with pytest.raises(DatasetError, match="needs data_dir"):
        load(text, mmap=True)


def test_objects_and_graphs() -> None:
    graph = load((np.array([[0, 1], [1, 0]]), np.eye(2), [0, 1]))
    assert graph.num_nodes == 2
    assert load(graph) is graph
    with pytest.raises(DatasetError, match="cannot be mapped"):
        load((np.array([[0], [1]]),), mmap=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "debian-package",
            r"unknown data set 'debian-package'\. Did you mean 'debian-packages'\?.*POLYHOP_DATA",
        ),
        ("synth:product", r"unknown synthetic graph 'product'\. Did you mean 'products'"),
        ("no/such/file.npz", r"no/such/file\.npz: no such file or folder"),
        ("nowhere.csv", r"nowhere\.csv: no such file"),
        (3.5, "cannot make a graph of float"),
    ],
)
def test_unknown_sources(source: object, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load(source)


def test_known_names_carry_no_hint_of_the_environment(tiny_dir: Path) -> None:
    with pytest.raises(DatasetError, match=r"Did you mean 'tiny'\?") as caught:
        load("tinny", data_dir=tiny_dir)
    assert "POLYHOP_DATA" not in str(caught.value)


def test_errors_name_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", edge_index=np.array([[0, 0], [1, 1]]))
    with pytest.raises(GraphError, match=r"bad\.npz: 1 duplicate edges"):
        load(tmp_path / "bad.npz")
    assert load(tmp_path / "bad.npz", duplicates="keep").num_edges == 2


def test_other_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DatasetError, match=r"notes\.txt: unknown kind of file"):
        load(tmp_path / "notes.txt")
    with pytest.raises(DatasetError, match=r"no graph here; expected edge_index\.npy"):
        load(tmp_path)
    (tmp_path / "edges.csv").write_text("src,dst\n0,1\n")
    for source in (tmp_path, tmp_path / "edges.csv"):
        with pytest.raises(
            DatasetError, match=r"cannot be mapped; load it once and polyhop\.datasets\.save it"
        ):
            load(source, mmap=True)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "features", "classes", "sizes"),
    [
        ("cora", 2708, 10_556, 1433, 7, [140, 500, 1000]),
        ("citeseer", 3327, 9104, 3703, 6, [120, 500, 1000]),
        ("pubmed", 19_717, 88_648, 500, 3, [60, 500, 1000]),
        ("tolokers", 11_758, 1_038_000, 10, 2, [5879, 2939, 2940]),
        ("ogbn-arxiv-struct", 169_343, 2_315_598, 128, 40, [90_941, 29_799, 48_603]),
    ],
)
def test_real_graphs(
    data_dir: Path, name: str, nodes: int, edges: int, features: int, classes: int, sizes: list[int]
) -> None:
    graph = load(name, data_dir=data_dir)
    assert (graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes) == (
        nodes,
        edges,
        features,
        classes,
    )
    assert graph.split is not None
    assert [part.numel() for part in vars(graph.split).values()] == sizes
    assert graph.metric == ("roc_auc" if name == "tolokers" else "accuracy")
