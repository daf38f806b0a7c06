"""Generated graphs: published counts, repeatable, and worth a GNN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import polyhop
from polyhop.datasets import sizes
from polyhop.datasets.synth import PRESETS, generate, is_synthetic
from polyhop.errors import DatasetError
from polyhop.graph import DenseFeatures, Graph
from polyhop.kernels import spmm

SMALL = {"arxiv": 0.05, "products": 0.005, "reddit": 0.02, "papers": 0.0002}


def accuracy(graph: Graph, x: Tensor) -> float:
    """Test accuracy of ridge regression on one-hot labels: a stand-in for the best that these inputs allow."""
    assert graph.split is not None
    assert graph.y is not None
    train, test = graph.split.train, graph.split.test
    rows = torch.cat([x.double(), torch.ones(len(x), 1)], 1)
    target = torch.nn.functional.one_hot(graph.y[train], graph.num_classes).double()
    gram = rows[train].T @ rows[train] + 1e-3 * len(train) * torch.eye(rows.shape[1])
    weight = torch.linalg.solve(gram, rows[train].T @ target)
    return float(((rows[test] @ weight).argmax(1) == graph.y[test]).double().mean())


def neighbour_mean(graph: Graph, x: Tensor) -> Tensor:
    scale = 1 / graph.in_degree.clamp(min=1).float()
    return spmm(graph.indptr, graph.indices, x, num_src=graph.num_nodes, dst_scale=scale)


@pytest.mark.parametrize("name", list(PRESETS))
def test_published_counts_scale(name: str) -> None:
    scale, preset = SMALL[name], PRESETS[name]
    graph = generate(f"synth:{name}?scale={scale}")
    assert graph.num_nodes == round(preset.nodes * scale)
    room = graph.num_nodes**2 // 64
    assert graph.num_edges == 2 * min(round(preset.edges * scale / 2), room)
    assert (graph.num_features, graph.num_classes) == (preset.features, preset.classes)
    assert graph.split is not None
    train, val, test = (part.numel() for part in vars(graph.split).values())
    assert (train, val) == (round(preset.split[0] * scale), round(preset.split[1] * scale))
    assert abs(test - preset.split[2] * scale) <= 2  # the rest, where the published split has every node
    assert graph.check() is graph
    degree = graph.in_degree.double()
    assert degree.median() < 0.85 * degree.mean()  # skewed
    assert degree.max() > 4 * degree.mean()


def test_arxiv_at_full_size() -> None:
    graph = generate("synth:arxiv?features=0")
    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (169_343, 2_315_598, 40)
    assert graph.split is not None
    assert [part.numel() for part in vars(graph.split).values()] == [90_941, 29_799, 48_603]


@pytest.mark.parametrize("name", list(PRESETS))
def test_neighbours_help_by_ten_points(name: str) -> None:
    graph = generate(f"synth:{name}?scale={SMALL[name] * (1 if name == 'reddit' else 4)}")
    assert isinstance(graph.x, DenseFeatures)
    own = graph.x.all()
    alone = accuracy(graph, own)
    together = accuracy(graph, neighbour_mean(graph, neighbour_mean(graph, own)))
    assert alone > 3 / graph.num_classes  # features say something
    assert together > alone + 0.1


def test_same_seed_same_graph_for_any_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for threads in ("1", "3"):
        monkeypatch.setenv("POLYHOP_THREADS", threads)
        made.append(generate("synth:arxiv?scale=0.01&seed=4"))
    a, b = made
    for name in ("indptr", "indices", "y"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    assert isinstance(a.x, DenseFeatures)
    assert isinstance(b.x, DenseFeatures)
    assert torch.equal(a.x.values, b.x.values)
    other = generate("synth:arxiv?scale=0.01&seed=5")
    assert not torch.equal(a.indices, other.indices)


def test_graph_does_not_change_between_versions() -> None:
    """A generated graph is a benchmark's input: its bits are part of the format."""
    graph = generate("synth:arxiv?scale=0.01&features=4")
    assert isinstance(graph.x, DenseFeatures)
    assert graph.y is not None
    position = torch.arange(graph.num_edges)
    found = (
        int((graph.indices * (position % 1009)).sum()),
        int((graph.y * torch.arange(graph.num_nodes)).sum()),
    )
    assert found == (9594465009, 21819802)
    assert [round(float(v), 6) for v in graph.x.values[0]] == [-1.577667, -2.025297, 0.838427, 0.497292]


def test_papers_labels_only_its_split() -> None:
    graph = generate("synth:papers?scale=0.0005&features=0")
    assert graph.y is not None
    assert graph.split is not None
    labelled = sum(part.numel() for part in vars(graph.split).values())
    assert int((graph.y >= 0).sum()) == labelled < graph.num_nodes


def test_rmat() -> None:
    graph = generate("rmat:?scale=12&edge_factor=8&features=5&classes=3&seed=2")
    assert graph.num_nodes == 4096
    assert 0.5 * 65536 < graph.num_edges < 65536
    assert (graph.num_features, graph.num_classes) == (5, 3)
    assert graph.check().in_degree.max() > 10 * graph.in_degree.double().mean()
    plain = generate("rmat:?scale=8")
    assert (plain.x, plain.y, plain.split) == (None, None, None)


def test_sbm_edge_counts_are_the_expected_ones() -> None:
    graph = generate("sbm:?nodes=1000&classes=4&p_in=0.05&p_out=0.01")
    within, across = 4 * (250 * 249 // 2), 6 * 250 * 250
    assert graph.num_edges == 2 * round(0.05 * within + 0.01 * across)
    assert graph.y is not None
    assert torch.bincount(graph.y).tolist() == [250] * 4
    equal = (graph.y[graph.indices.long()] == graph.y[graph.destinations]).double().mean()
    assert abs(float(equal) - 0.05 * within / (0.05 * within + 0.01 * across)) < 0.05
    assert generate("sbm:?nodes=500&classes=1").num_classes == 1


def test_heterophilous_sbm() -> None:
    graph = generate("sbm:?nodes=1000&classes=2&p_in=0&p_out=0.02")
    assert graph.y is not None
    assert bool((graph.y[graph.indices.long()] != graph.y[graph.destinations]).all())


def test_features_in_a_file(tmp_path: Path) -> None:
    text = "synth:arxiv?scale=0.005"
    mapped = generate(text, features_file=tmp_path / "new" / "x.npy").x
    plain = generate(text).x
    assert isinstance(mapped, DenseFeatures)
    assert isinstance(plain, DenseFeatures)
    assert mapped.is_mapped
    assert torch.equal(mapped.values, plain.values)


def test_a_disk_too_small_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DatasetError, match=r"x\.npy: needs .* GiB are free there"):
        generate("synth:arxiv?scale=0.005", features_file=tmp_path / "x.npy")
    assert not (tmp_path / "x.npy").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synth:arxive", "unknown synthetic graph 'arxive'. Did you mean 'arxiv'"),
        ("synth:", "unknown synthetic graph ''"),
        ("synth:arxiv?scal=1", "unknown option 'scal'. Did you mean 'scale'"),
        ("synth:arxiv?scale=x", "scale='x' is not a number"),
        ("synth:arxiv?scale=", "scale='' is not a number"),
        ("synth:arxiv?scale=nan", "scale=nan is outside"),
        ("synth:arxiv?scale=0", "scale=0 is outside"),
        ("synth:arxiv?seed=0.5", "seed=0.5 is not a whole number"),
        ("synth:arxiv?wrong=2", "wrong=2 is outside 0 .. 1"),
        ("rmat:big?scale=3", "rmat: takes only options"),
        ("rmat:?scale=40", "scale=40 is outside 1 .. 30"),
        ("rmat:?a=0.6&b=0.3&c=0.3", r"a \+ b \+ c = 1.2"),
        ("rmat:?nodes=5", "unknown option 'nodes'"),
        ("sbm:?p_in=0.9", "p_in=0.9 is outside 0 .. 0.5"),
        ("sbm:?nodes=5&classes=9", "classes=9 is outside 1 .. 5"),
        ("sbm:?scale=5", "unknown option 'scale'"),
    ],
)
def test_wrong_names_and_options(text: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        generate(text)


def test_is_synthetic() -> None:
    assert is_synthetic("synth:arxiv")
    assert is_synthetic("rmat:?scale=3")
    assert not is_synthetic("synth")
    assert not is_synthetic("cora")
    assert not is_synthetic("folder/synth:arxiv")


@pytest.mark.parametrize(
    "name", ["synth:arxiv?scale=0.01", "rmat:?scale=9&features=8&classes=3", "sbm:?nodes=300"]
)
def test_rows_that_nobody_asks_for_are_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, about = polyhop.load(name), sizes(name)
    monkeypatch.setattr("polyhop.datasets.synth.feature_rows", _refuse)
    bare, again = polyhop.load(name, features="none"), sizes(name)
    assert bare.x is None
    assert torch.equal(bare.indptr, whole.indptr)
    assert torch.equal(bare.indices, whole.indices)
    assert torch.equal(bare.y, whole.y)
    assert bare.split is not None
    assert torch.equal(bare.split.train, whole.split.train)
    assert about == again
    assert again.num_features == whole.num_features


def _refuse(*given: object, **named: object) -> None:
    raise AssertionError("rows were made")


def test_a_wrong_width_is_said_though_no_row_is_made() -> None:
    with pytest.raises(DatasetError, match="features='many'"):
        polyhop.load("sbm:?features=many", features="none")
