"""Every way a graph's arrays can be wrong is found, with the place named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from polyhop.errors import GraphError
from polyhop.graph import DenseFeatures, Graph, SparseFeatures, SparseRows, Split


@pytest.fixture
def graph() -> Graph:
    """Four nodes, five edges, everything filled in and right."""
    return Graph(
        indptr=torch.tensor([0, 2, 4, 4, 5]),
        indices=torch.tensor([3, 2, 0, 2, 1], dtype=torch.int32),
        x=DenseFeatures(torch.ones(4, 3)),
        y=torch.tensor([0, 1, -1, 1]),
        split=Split(torch.tensor([0]), torch.tensor([1]), torch.tensor([3])),
        edge_weight=torch.ones(5),
        num_classes=2,
    )


def sparse(indptr: list[int], columns: list[int], values: list[float], width: int = 3) -> SparseFeatures:
    return SparseFeatures(
        SparseRows(torch.tensor(indptr), torch.tensor(columns), torch.tensor(values), width)
    )


def with_value(x: torch.Tensor, row: int, column: int, value: float) -> DenseFeatures:
    x = x.clone()
    x[row, column] = value
    return DenseFeatures(x)


def ids(*nodes: int) -> torch.Tensor:
    return torch.tensor(nodes, dtype=torch.int64)


def test_a_right_graph_passes_and_is_returned(graph: Graph) -> None:
    assert graph.check() is graph
    assert replace(graph, x=sparse([0, 1, 1, 2, 2], [0, 2], [1.0, 2.0])).check().num_features == 3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"indptr": torch.tensor([0, 2, 4, 4, 5]).int()}, r"indptr: expected int64 \[N \+ 1\], got int32"),
    ({"indptr": torch.zeros(0, dtype=torch.int64)}, "indptr: expected int64"),
    ({"indptr": torch.tensor([0, 2, 4, 4, 6])}, "from 0 to 5 .*got 0 to 6"),
    ({"indptr": torch.tensor([1, 2, 4, 4, 5])}, "got 1 to 5"),
    ({"indptr": torch.tensor([0, 4, 2, 4, 5])}, "falls from 4 to 2 at node 1"),
    ({"indices": torch.ones(5)}, "indices: expected int32 or int64"),
    ({"indices": torch.tensor([3, 2, 0, 4, 1])}, r"indices\[3\] = 4, but the graph has nodes 0 .. 3"),
    ({"indices": torch.tensor([3, -1, 0, 2, 1])}, r"indices\[1\] = -1"),
    (
        {"indices": torch.tensor([3, 3, 0, 2, 1])},
        "1 duplicate edges, the first 3 -> 0; pass duplicates='drop'",
    ),
    ({"edge_weight": torch.ones(4)}, r"edge_weight: expected float \[5\]"),
    ({"edge_weight": torch.ones(5).long()}, "edge_weight: expected float"),
    ({"edge_weight": torch.tensor([1, 1, torch.nan, 1, 1])}, "edge 2 has weight nan"),
    ({"edge_weight": torch.tensor([1, 1, 1, -0.5, 1])}, "edge 3 has weight -0.5"),
    ({"x": DenseFeatures(torch.ones(3, 3))}, "3 rows for 4 nodes"),
    ({"x": with_value(torch.ones(4, 3), 2, 1, torch.nan)}, "node 2, feature 1 is nan"),
    ({"x": with_value(torch.ones(4, 3), 3, 0, torch.inf)}, "node 3, feature 0 is inf"),
    ({"x": with_value(torch.ones(4, 3).bfloat16(), 3, 0, -torch.inf)}, "node 3, feature 0 is -inf"),
    ({"x": DenseFeatures(torch.ones(4, 3).to(torch.int8), torch.ones(2))}, r"x scale: expected \[3\]"),
    ({"x": sparse([0, 1, 1, 2, 3], [0, 2], [1.0, 2.0])}, "indptr ends at 3"),
    ({"x": sparse([0, 2, 1, 2, 2], [0, 2], [1.0, 2.0])}, "never fall"),
    ({"x": sparse([0, 1, 1, 2, 2], [0, 3], [1.0, 2.0])}, "columns run from 0 to 3, but there are 3 features"),
    ({"x": sparse([0, 1, 1, 2, 2], [0, 2], [1.0, torch.nan])}, "node 2, feature 2 is nan"),
    ({"y": torch.tensor([0, 1, 2, 1])}, "node 2 has label 2; expected 0 .. 1"),
    ({"y": torch.tensor([0, 1, -2, 1])}, "node 2 has label -2"),
    ({"y": torch.tensor([0, 1, 1])}, r"y: expected int64 \[4\]"),
    ({"y": torch.zeros(4)}, r"y: expected int64 \[4\]"),
    ({"y": torch.zeros(4, 3)}, r"expected float32 \[4, 2\]"),
    ({"y": torch.tensor([[0, 1], [1, 1], [0, 0.5], [0, 0]])}, "node 2, class 1 is 0.5"),
    ({"y": None}, "a split, but no labels"),
    ({"split": Split(ids(), ids(1), ids(3))}, "the train set is empty"),
    ({"split": Split(ids(0, 1), ids(1), ids(3))}, "node 1 is in both train and val"),
    ({"split": Split(ids(0), ids(1), ids(0, 3))}, "node 0 is in both train and test"),
    ({"split": Split(ids(0, 2), ids(1), ids(3))}, r"split train: node 2 has no label \(1 such"),
    ({"split": Split(ids(0), ids(1, 2), ids(3))}, "split val: node 2 has no label"),
    ({"split": Split(ids(4), ids(1), ids(3))}, r"split train\[0\] = 4"),
    ({"split": Split(ids(3, 0), ids(1), ids())}, "split train: ids must rise"),
    ({"split": Split(torch.tensor([0.0]), ids(1), ids())}, "split train: expected int64"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_is_said(graph: Graph, change: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        replace(graph, **change).check()


def test_duplicates_are_counted(graph: Graph) -> None:
    doubled = replace(
        graph,
        indptr=torch.tensor([0, 3, 3, 3, 6]),
        indices=torch.tensor([1, 1, 1, 0, 2, 0]),
        edge_weight=None,
    )
    with pytest.raises(GraphError, match="3 duplicate edges, the first 1 -> 0"):
        doubled.check()
    assert doubled.check(duplicates="keep") is doubled
    dropped = doubled.check(duplicates="drop")
    assert (dropped.indptr.tolist(), dropped.indices.tolist()) == ([0, 1, 1, 1, 3], [1, 0, 2])


def test_nan_is_found_behind_many_rows() -> None:
    x = torch.zeros(200_000, 1)
    x[150_000] = torch.nan
    empty = Graph.from_edges(torch.zeros(2, 0, dtype=torch.int64), num_nodes=200_000)
    with pytest.raises(GraphError, match="node 150000, feature 0"):
        replace(empty, x=DenseFeatures(x)).check()


def test_large_finite_features_pass() -> None:
    x = torch.full((10, 10), 3e38)  # their float32 sum overflows
    assert Graph.from_edges(torch.zeros(2, 0, dtype=torch.int64), x).num_nodes == 10


def test_mapped_features_are_not_scanned(graph: Graph) -> None:
    x = with_value(torch.ones(4, 3), 2, 1, torch.nan)
    replace(graph, x=replace(x, is_mapped=True)).check()
