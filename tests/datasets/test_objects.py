"""Other libraries' graphs, by duck typing: same edges, features, labels and splits as theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from polyhop.datasets.objects import from_object
from polyhop.errors import DatasetError, GraphError, InputError
from polyhop.graph import DenseFeatures, SparseFeatures

EDGES = torch.tensor([[3, 0, 2, 1], [0, 1, 0, 3]])
X, Y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
TRAIN = torch.tensor([True, False, False, True])
VAL = torch.tensor([False, True, False, False])


def pyg(**fields: Any) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Data(**{"x": X, "edge_index": EDGES, "y": Y, **fields})


class FakeDGL:
    """What is used of a DGL graph."""

    def __init__(self, **ndata: torch.Tensor) -> None:
        self.ndata, self.edata, self.canonical_etypes = (
            ndata,
            {"w": torch.tensor([1.0, 2, 3, 4])},
            [("n", "e", "n")],
        )

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        return EDGES[0], EDGES[1]

    def num_nodes(self) -> int:
        return 4


def test_pyg_data() -> None:
    graph = from_object(
        pyg(train_mask=TRAIN, val_mask=VAL, test_mask=~TRAIN & ~VAL, edge_weight=torch.arange(4.0))
    )
    assert graph.indices.tolist() == [3, 2, 0, 1]
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [0, 2, 1, 3]
    assert isinstance(graph.x, DenseFeatures)
    assert torch.equal(graph.x.all(), X)
    assert graph.split is not None
    assert [part.tolist() for part in vars(graph.split).values()] == [[0, 3], [1], [2]]


def test_pyg_masks_with_several_splits() -> None:
    masks = torch.stack([TRAIN, VAL], 1)
    graph = from_object(pyg(train_mask=masks), split=1)
    assert graph.split is not None
    assert graph.split.train.tolist() == [1]
    with pytest.raises(DatasetError, match="train_mask: split 2 of 2"):
        from_object(pyg(train_mask=masks), split=2)


def test_pyg_without_features_or_labels() -> None:
    data = pytest.importorskip("torch_geometric.data")
    graph = from_object(data.Data(edge_index=EDGES, num_nodes=6))
    assert (graph.num_nodes, graph.x, graph.y) == (6, None, None)


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's own, on its older releases
def test_pyg_sparse_adjacency() -> None:
    adj_t = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(4), (4, 4), check_invariants=True)
    graph = from_object(SimpleNamespace(adj_t=adj_t, x=X, y=Y))
    assert sorted(zip(*graph.edge_index.tolist(), strict=True)) == sorted(zip(*EDGES.tolist(), strict=True))
    assert graph.edge_weight is None


def test_pyg_hetero_is_refused() -> None:
    data = pytest.importorskip("torch_geometric.data")
    hetero = data.HeteroData()
    hetero["a"].x = X
    hetero["a", "to", "a"].edge_index = EDGES
    with pytest.raises(DatasetError, match=r"typed edges \(1 kinds\)"):
        from_object(hetero)


def test_pyg_without_edges() -> None:
    with pytest.raises(DatasetError, match="neither edge_index nor adj_t"):
        from_object(SimpleNamespace(edge_index=None))


def test_dgl() -> None:
    graph = from_object(FakeDGL(feat=X, label=Y, train_mask=TRAIN.to(torch.uint8)))
    assert graph.indices.tolist() == [3, 2, 0, 1]
    assert isinstance(graph.x, DenseFeatures)
    assert torch.equal(graph.x.all(), X)
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [1, 3, 2, 4]
    assert graph.split is not None
    assert graph.split.train.tolist() == [0, 3]


def test_dgl_with_kinds_is_refused() -> None:
    fake = FakeDGL()
    fake.canonical_etypes = [("n", "e", "n"), ("n", "f", "n")]
    with pytest.raises(DatasetError, match="2 kinds of edges"):
        from_object(fake)


@pytest.mark.parametrize("kind", [sp.csr_matrix, sp.csc_matrix, sp.coo_matrix, sp.csr_array, sp.lil_matrix])
def test_scipy_row_is_source(kind: Any) -> None:
    dense = np.zeros((4, 4), np.float32)
    dense[EDGES[0], EDGES[1]] = 1
    graph = from_object(kind(dense))
    assert sorted(zip(*graph.edge_index.tolist(), strict=True)) == sorted(zip(*EDGES.tolist(), strict=True))
    assert graph.edge_weight is None
    weighted = from_object(kind(2 * dense))
    assert weighted.edge_weight is not None
    assert weighted.edge_weight.tolist() == [2.0] * 4


def test_scipy_must_be_square() -> None:
    with pytest.raises(DatasetError, match="square matrix, got 2 x 3"):
        from_object(sp.csr_matrix((2, 3)))


@pytest.mark.parametrize("wrap", [tuple, list])
def test_arrays(wrap: Any) -> None:
    graph = from_object(wrap([EDGES.numpy(), X.numpy(), Y.numpy()]))
    assert (graph.num_nodes, graph.num_features, graph.num_classes) == (4, 2, 2)
    assert from_object((EDGES,)).x is None
    assert from_object((sp.csr_matrix(np.eye(4)), X, Y)).num_edges == 4


def test_sparse_features_stay_sparse() -> None:
    dense = np.array([[0, 1], [2, 0], [0, 0], [3, 4]], np.float32)
    for x in (sp.csr_matrix(dense), torch.from_numpy(dense).to_sparse(), sp.coo_array(dense)):
        graph = from_object((EDGES, x, Y))
        assert isinstance(graph.x, SparseFeatures)
        assert graph.x.all().dense().tolist() == dense.tolist()


def test_mapping() -> None:
    graph = from_object(
        {"edge_index": EDGES, "x": X, "y": Y, "train_mask": TRAIN, "val": [1], "name": "mine"}
    )
    assert graph.name == "mine"
    assert graph.split is not None
    assert (graph.split.train.tolist(), graph.split.val.tolist()) == ([0, 3], [1])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (42, "cannot make a graph of int"),
        ((), "a sequence of 0"),
        ((EDGES, X, Y, X), "a sequence of 4"),
        ({"x": X}, "no 'edge_index'"),
        ({"edge_index": EDGES, "lables": Y}, r"unknown keys \['lables'\]"),
        ((EDGES, X[:2], Y), "nodes 0 .. 1"),
        ((EDGES, X, Y[:2]), r"y: expected int64 \[4\]"),
        ((EDGES, torch.full((4, 2), torch.nan), Y), "node 0, feature 0 is nan"),
        (({}, X, Y), "expected numbers"),
        ({"edge_index": EDGES, "y": Y, "train": []}, "train set is empty"),
    ],
)
def test_wrong_objects(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_object(source)


def test_duplicates_option_is_passed_on() -> None:
    doubled = torch.cat([EDGES, EDGES], 1)
    with pytest.raises(GraphError, match="4 duplicate edges"):
        from_object((doubled, X, Y))
    assert from_object((doubled, X, Y), duplicates="drop").num_edges == 4
    assert from_object((EDGES, X, Y), features="none").x is None
