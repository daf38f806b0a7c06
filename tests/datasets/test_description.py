"""``describe``: against counts made by hand, and JSON-ready for every kind of graph."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch

from polyhop.datasets import describe
from polyhop.graph import DenseFeatures, Graph

# 0 -> 1 -> 2 -> 0, a loop at 3, 4 -> 5 both ways, 6 alone.
EDGES = np.array([[0, 1, 2, 3, 4, 5], [1, 2, 0, 3, 5, 4]])


@pytest.fixture
def facts() -> dict[str, object]:
    y = [0, 0, 1, 1, 0, -1, 1]
    graph = Graph.from_edges(EDGES, np.ones((7, 3), np.float32), y, train=[0, 2], val=[3], name="small")
    return describe(graph)


def test_by_hand(facts: dict[str, object]) -> None:
    assert facts["components"] == {"count": 4, "largest": 3}
    assert facts["isolated"] == 1
    assert facts["num_loops"] == 1
    assert facts["is_symmetric"] is False
    assert facts["homophily"] == pytest.approx(
        2 / 4
    )  # 0-1 and the loop; 1-2 and 2-0 differ; 4-5 lacks a label
    assert facts["in_degree"] == {
        "min": 0,
        "median": 1,
        "mean": pytest.approx(6 / 7),
        "max": 1,
        "histogram": [1, 6],
    }
    assert facts["classes"] == {"counts": [3, 3], "unlabelled": 1}
    assert facts["split"] == {"train": 2, "val": 1, "test": 0}
    assert facts["bytes"] == {"edges": 8 * 8 + 6 * 4, "features": 7 * 3 * 4, "mapped": 0, "labels": 7 * 8}
    assert facts["features"] == "float32"


def test_histogram_bins_are_powers_of_two() -> None:
    star = np.array([[*range(1, 10), 0, 0], [*[0] * 9, 1, 2]])
    facts = describe(Graph.from_edges(star))
    assert facts["in_degree"]["histogram"] == [
        7,
        2,
        0,
        0,
        1,
    ]  # seven of 0, two of 1, none of 2-3 or 4-7, one of 8-15
    assert facts["out_degree"]["histogram"] == [0, 9, 1]


def test_symmetry_ignores_order() -> None:
    assert describe(Graph.from_edges([[1, 2, 0, 0], [0, 0, 1, 2]]))["is_symmetric"] is True
    assert describe(Graph.from_edges([[2, 1, 0, 0], [0, 0, 2, 1]]))["is_symmetric"] is True
    assert (
        describe(Graph.from_edges([[1, 2, 0], [0, 1, 2]]))["is_symmetric"] is False
    )  # equal degrees, no reverses


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("sparse", [True, False])
def test_every_kind_is_json(make_graph: Callable[..., Graph], kind: str, sparse: bool) -> None:
    facts = describe(make_graph(kind=kind, sparse=sparse, weighted=True))
    assert json.loads(json.dumps(facts)) == facts
    assert facts["has_weights"] is True
    assert (facts["homophily"] is None) == (kind == "multi")
    assert facts["features"].startswith("sparse" if sparse else "float32")
    assert facts["is_symmetric"] is True


def test_bare_empty_and_mapped() -> None:
    bare = describe(Graph.from_edges([[0], [1]]))
    assert (bare["features"], bare["classes"], bare["split"], bare["homophily"]) == ("none", None, None, None)
    empty = describe(Graph.from_edges(np.zeros((2, 0), int)))
    assert empty["components"] == {"count": 0, "largest": 0}
    assert empty["in_degree"]["histogram"] == []
    mapped = DenseFeatures(torch.ones(2, 3), is_mapped=True)
    facts = describe(Graph.from_edges([[0], [1]], mapped))
    assert facts["features"] == "float32, mapped"
    assert (facts["bytes"]["features"], facts["bytes"]["mapped"]) == (0, 24)
