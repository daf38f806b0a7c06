"""Building graphs: stable grouping, node counts, labels, splits, degrees, loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.errors import GraphError, InputError
from polyhop.graph import DenseFeatures, Graph, SparseFeatures, SparseRows, Split, dense_features

EDGES = np.array([[3, 0, 2, 1, 2], [0, 1, 0, 3, 1]])  # 0: 3, 2; 1: 0, 2; 3: 1


def test_in_edges_keep_the_given_order() -> None:
    graph = Graph.from_edges(EDGES)
    assert graph.indptr.tolist() == [0, 2, 4, 4, 5]
    assert graph.indices.tolist() == [3, 2, 0, 2, 1]
    assert graph.indices.dtype == torch.int32
    assert graph.edge_index.tolist() == [[3, 2, 0, 2, 1], [0, 0, 1, 1, 3]]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_grouping_is_stable(pairs: list[tuple[int, int]]) -> None:
    edges = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = Graph.from_edges(
        edges, num_nodes=7, edge_weight=np.arange(len(pairs), dtype=np.float32), duplicates="keep"
    )
    expected = sorted(range(len(pairs)), key=lambda e: pairs[e][1])
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == expected
    assert graph.indices.tolist() == [pairs[e][0] for e in expected]


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint32, np.int64, np.uint64, np.dtype(">i4")])
def test_any_whole_dtype(kind: Any) -> None:
    assert Graph.from_edges(EDGES.astype(kind)).indices.tolist() == [3, 2, 0, 2, 1]


def test_torch_edges_lists_and_views() -> None:
    expected = [3, 2, 0, 2, 1]
    for edges in (torch.from_numpy(EDGES), EDGES.tolist(), EDGES[:, ::-1][:, ::-1], np.asfortranarray(EDGES)):
        assert Graph.from_edges(edges).indices.tolist() == expected


def test_sorted_edges_are_not_copied() -> None:
    edges = torch.tensor([[1, 2, 0], [0, 1, 2]], dtype=torch.int32)
    assert Graph.from_edges(edges).indices.data_ptr() == edges[0].data_ptr()


def test_number_of_nodes() -> None:
    assert Graph.from_edges(EDGES).num_nodes == 4
    assert Graph.from_edges(EDGES, num_nodes=9).num_nodes == 9
    assert Graph.from_edges(EDGES, np.zeros((6, 2))).num_nodes == 6
    assert Graph.from_edges(EDGES, y=[0] * 5).num_nodes == 5
    assert Graph.from_edges(np.zeros((2, 0), int)).num_nodes == 0


def test_degrees_weights_and_loops() -> None:
    edges, weight = [[0, 1, 1, 2], [0, 0, 1, 1]], [0.5, 2.0, 4.0, 8.0]
    graph = Graph.from_edges(edges, num_nodes=4, edge_weight=weight)
    assert graph.in_degree.tolist() == [2, 2, 0, 0]
    assert graph.out_degree.tolist() == [1, 2, 1, 0]
    assert graph.in_weight is not None
    assert graph.in_weight.tolist() == [2.5, 12.0, 0.0, 0.0]
    assert graph.loop_weight is not None
    assert graph.loop_weight.tolist() == [0.5, 4.0, 0.0, 0.0]
    plain = Graph.from_edges(edges)
    assert plain.in_weight is None
    assert plain.loop_weight is not None
    assert plain.loop_weight.tolist() == [1.0, 1.0, 0.0]
    assert Graph.from_edges(EDGES).loop_weight is None


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "uint8"])
def test_features_keep_dtypes_that_can_be_gathered(dtype: str) -> None:
    x = np.ones((4, 3), dtype)
    assert str(dense_features(x).values.dtype) == f"torch.{dtype}"


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "float16", "uint16"])
def test_other_features_become_float32(dtype: str) -> None:
    assert dense_features(np.ones((4, 3), dtype)).values.dtype == torch.float32


def test_labels() -> None:
    graph = Graph.from_edges(EDGES, y=np.array([0, 2, -1, 1], np.int8))
    assert graph.y is not None
    assert graph.y.dtype == torch.int64
    assert graph.num_classes == 3
    column = Graph.from_edges(EDGES, y=np.array([[0.0], [np.nan], [1.0], [1.0]]))  # as OGB stores them
    assert column.y is not None
    assert column.y.tolist() == [0, -1, 1, 1]
    multi = Graph.from_edges(EDGES, y=np.eye(4, 3, dtype=int))
    assert multi.is_multilabel
    assert multi.num_classes == 3
    assert multi.y is not None
    assert multi.y.dtype == torch.float32


def test_splits_from_masks_and_ids() -> None:
    mask = np.array([True, False, False, True])
    graph = Graph.from_edges(EDGES, y=[0, 1, 0, 1], train=mask, val=torch.tensor([2]), test=[])
    assert graph.split is not None
    assert [part.tolist() for part in vars(graph.split).values()] == [[0, 3], [2], []]
    assert all(part.dtype == torch.int64 for part in vars(graph.split).values())
    unsorted = Graph.from_edges(EDGES, y=[0, 1, 0, 1], train=[3, 0])
    assert unsorted.split is not None
    assert unsorted.split.train.tolist() == [0, 3]


def test_duplicates_keep_and_drop() -> None:
    edges, weight = [[1, 2, 1, 1], [0, 0, 0, 2]], [1.0, 2.0, 3.0, 4.0]
    kept = Graph.from_edges(edges, edge_weight=weight, duplicates="keep")
    assert kept.num_edges == 4
    dropped = Graph.from_edges(edges, edge_weight=weight, duplicates="drop")
    assert dropped.edge_weight is not None
    assert (dropped.indptr.tolist(), dropped.indices.tolist()) == ([0, 2, 2, 3], [1, 2, 1])
    assert dropped.edge_weight.tolist() == [1.0, 2.0, 4.0]


def test_repr_and_fields() -> None:
    graph = Graph.from_edges(
        EDGES, np.zeros((4, 2)), [0, 1, 0, 1], name="small", metric="roc_auc", meta={"a": 1}
    )
    assert repr(graph) == "Graph('small', nodes=4, edges=5, features=2, classes=2)"
    assert (graph.metric, graph.meta) == ("roc_auc", {"a": 1})
    with pytest.raises(AttributeError):
        graph.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edge_index": [[0, 1, 2]]}, r"edge_index: expected \[2, E\]"),
        ({"edge_index": EDGES.T}, r"edge_index: expected \[2, E\].*got \[5, 2\]"),
        ({"edge_index": EDGES.astype(float)}, "whole numbers"),
        ({"edge_index": [["a"], ["b"]]}, "expected numbers"),
        ({"edge_index": EDGES, "num_nodes": 3}, r"edge_index\[0\]\[0\] = 3, but the graph has nodes 0 .. 2"),
        ({"edge_index": -EDGES}, r"edge_index\[0\]\[0\] = -3"),
        ({"edge_index": EDGES, "x": np.zeros((3, 2))}, "nodes 0 .. 2"),
        ({"edge_index": EDGES, "x": np.zeros((5, 2)), "num_nodes": 4}, "5 rows for 4 nodes"),
        ({"edge_index": EDGES, "x": np.zeros(4)}, r"x: expected a matrix \[N, F\]"),
        ({"edge_index": EDGES, "x": np.array([["a"]] * 4)}, "x: expected numbers"),
        ({"edge_index": EDGES, "y": [0, 1, 0]}, "nodes 0 .. 2"),
        ({"edge_index": EDGES, "y": [0, 1, 0], "num_nodes": 4}, r"y: expected int64 \[4\]"),
        ({"edge_index": EDGES, "y": [0.5, 1, 0, 0]}, "whole class numbers, got 0.5"),
        ({"edge_index": EDGES, "edge_weight": [1.0]}, r"edge_weight: expected \[5\]"),
        ({"edge_index": EDGES, "y": [0, 1, 0, 1], "train": [True]}, r"train mask: expected bool \[4\]"),
        ({"edge_index": EDGES, "y": [0, 1, 0, 1], "train": [0.5]}, "bool mask or whole ids"),
        ({"edge_index": EDGES, "y": [0, 1, 0, 1], "train": [1, 1]}, "node 1 is listed twice"),
        ({"edge_index": EDGES, "y": [0, 1, 0, 1], "train": [1, 0, 0, 1]}, "0/1 mask must be bool"),
        ({"edge_index": EDGES, "y": [0, 1, 0, 1], "train": [4]}, r"split train\[0\] = 4"),
        ({"edge_index": EDGES, "train": [0]}, "a split, but no labels"),
        ({"edge_index": EDGES, "duplicates": "dorp"}, "unknown duplicates 'dorp'. Did you mean 'drop'"),
    ],
)
def test_wrong_arguments_say_what_and_where(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Graph.from_edges(**arguments)


def test_errors_are_value_errors() -> None:
    assert issubclass(GraphError, InputError)
    assert issubclass(GraphError, ValueError)


def test_from_lists_shares_memory() -> None:
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    graph = Graph.from_lists(indptr, indices)
    assert graph.indices.data_ptr() == indices.data_ptr()
    assert graph.indices.dtype == torch.int64


def test_a_ready_store_is_taken_as_it_is() -> None:
    rows = SparseRows(torch.tensor([0, 1, 1, 1, 1]), torch.tensor([2]), torch.tensor([1.0]), 3)
    for store in (SparseFeatures(rows), DenseFeatures(torch.zeros(4, 3))):
        assert Graph.from_edges(EDGES, store).x is store


def test_split_of_none_is_empty() -> None:
    split = Split.of(3, [1])
    assert (split.train.tolist(), split.val.tolist(), split.test.tolist()) == ([1], [], [])
