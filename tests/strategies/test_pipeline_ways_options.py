"""Options of strategy ``pipeline`` where several ways share a stage: what they promise with one way holds, and bytes are those
accounted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyhop.comm import run_in_threads
from polyhop.graph import Graph

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.strategies.test_pipeline import (  # type: ignore[import-not-found]
    Stepped,
    assert_same,
    joined,
    on_rank,
    over_stages,
)
from tests.strategies.test_pipeline_ways import over_ways  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]


def assert_accounted(found: Stepped) -> None:
    """What every rank sent is what was accounted and what was estimated, bytes and messages."""
    for rank, cost in enumerate(found.costs):
        counted = cost.only("hidden", "gradients")
        for expected in (found.accounts[rank], found.estimates[rank]):
            assert dict(counted.bytes) == dict(expected.bytes), rank
            assert dict(counted.messages) == dict(expected.messages), rank


# Few bits between stages


@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_few_bits_as_with_one_way(make_graph: MakeGraph, bits: int) -> None:
    """Which way a value is rounded depends on the node and not on its way; what ways exchange inside a stage is exact."""
    graph = make_graph(60)
    for name in ("gcn", "gcnii"):
        one = over_stages(graph, name, 2, 0.4, epochs=2, chunks=1, bits=bits)
        for options in ({"chunks": 2}, {"chunks": 5, "exact_layers": True}):
            found = over_ways(graph, name, (2, 2), 0.4, epochs=2, bits=bits, **options)
            assert_same(found, one, 1e-10)
        plain = over_stages(graph, name, 2, 0.4, epochs=2, chunks=1)
        assert plain.losses != pytest.approx(one.losses, rel=1e-6)


@pytest.mark.parametrize("bits", [1, 8, 16, 32])
def test_bytes_of_few_bits_are_accounted(make_graph: MakeGraph, bits: int) -> None:
    graph = make_graph(60)
    for name in ("gat", "gcnii"):
        for shape in ((2, 2), (2, 3)):
            assert_accounted(over_ways(graph, name, shape, 0.3, epochs=2, chunks=7, bits=bits))


def test_few_bits_repeat(make_graph: MakeGraph) -> None:
    """With history too; and over one stage nothing is rounded."""
    graph = make_graph(60)
    options = {"chunks": 5, "history_gamma": 2.0}
    one, again = (over_ways(graph, "gcnii", (2, 2), 0.4, epochs=3, bits=4, **options) for _ in range(2))
    assert_same(again, one, 0.0)
    plain = over_ways(graph, "gcnii", (2, 2), 0.4, epochs=3, **options)
    assert one.losses != plain.losses
    near = over_ways(graph, "gcnii", (2, 2), 0.4, epochs=3, bits=8, **options)
    assert near.losses == pytest.approx(plain.losses, rel=1e-2)
    assert_same(over_ways(graph, "gcnii", (1, 2), 0.4, epochs=3, bits=4, **options), plain, 0.0)


# Over processes


@pytest.mark.parametrize("options", [{"bits": 4}], ids=str)
def test_over_gloo(make_graph: MakeGraph, ranks: Callable[..., list[Any]], options: dict[str, Any]) -> None:
    """The bits of virtual ranks."""
    graph, given = make_graph(60), {"stages": 2, "chunks": 5, **options}
    virtual = joined(run_in_threads(4, on_rank, graph, "gcnii", 0.3, 3, given))
    real = joined(ranks(4, on_rank, graph, "gcnii", 0.3, 3, given))
    assert_same(real, virtual, 0.0)
    assert [cost.bytes for cost in real.costs] == [cost.bytes for cost in virtual.costs]
