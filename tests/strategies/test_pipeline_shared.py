"""What a model gives to all layers (GCNII's h0), made anew by every stage: the same weights to rounding, half the bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.strategies.pipeline_cost import volume_ratio
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_shared import MACS_PER_BYTE, Sharing, makes_anew

sys.path.insert(0, str(Path(__file__).parent))

import test_pipeline as running  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
ANEW: dict[str, Any] = {"shared_rows": "recompute"}


def test_what_is_shared_is_found(make_graph: MakeGraph) -> None:
    """GCNII passes h0 on as it is; jumping knowledge grows from layer to layer, and others carry nothing."""
    graph = make_graph(60)
    for name in running.MODELS:
        pieces = Pieces.of(running.model_of(name, graph, 0.3), graph.num_features)
        expected = {"h0": frozenset({"lins.0.weight", "lins.0.bias"})} if name == "gcnii" else {}
        assert pieces.begun == expected, name


@pytest.mark.parametrize("stages", [2, 3])
def test_one_chunk_is_the_full_graph(make_graph: MakeGraph, stages: int) -> None:
    graph = make_graph(60)
    found = running.over_stages(graph, "gcnii", stages, 0.4, epochs=2, chunks=1, **ANEW)
    running.assert_same(found, running.alone(graph, "gcnii", 0.4, epochs=2), 1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_layer_by_layer_is_the_full_graph(make_graph: MakeGraph, sparse: bool) -> None:
    graph = make_graph(60, sparse=sparse)
    found = running.over_stages(graph, "gcnii", 3, 0.4, chunks=4, exact_layers=True, **ANEW)
    running.assert_same(found, running.alone(graph, "gcnii", 0.4), 1e-7 if sparse else 1e-10)


def test_with_history_it_is_what_sending_gives(make_graph: MakeGraph) -> None:
    """To rounding: gradients of begin's weights are summed over stages instead of over layers. Recomputation to the bit."""
    graph, options = make_graph(60), {"chunks": 5, "history_gamma": 2.0}
    sent = running.over_stages(graph, "gcnii", 3, 0.4, epochs=3, shared_rows="send", **options)
    anew = running.over_stages(graph, "gcnii", 3, 0.4, epochs=3, **ANEW, **options)
    running.assert_same(anew, sent, 1e-12)
    again = running.over_stages(graph, "gcnii", 3, 0.4, epochs=3, recompute=True, **ANEW, **options)
    running.assert_same(again, anew, 0.0)


@pytest.mark.parametrize("bits", [32, 4])
def test_bytes_are_those_accounted_and_half(make_graph: MakeGraph, bits: int) -> None:
    graph, found = make_graph(60), {}
    for wish in ("send", "recompute"):
        found[wish] = running.over_stages(
            graph, "gcnii", 3, 0.3, epochs=2, chunks=5, bits=bits, shared_rows=wish
        )
        for rank in range(3):
            counted = found[wish].costs[rank].only("hidden", "gradients")
            for expected in (found[wish].accounts[rank], found[wish].estimates[rank]):
                assert dict(counted.bytes) == dict(expected.bytes), (wish, rank)
                assert dict(counted.messages) == dict(expected.messages), (wish, rank)
    for rank in range(3):
        sent, anew = (found[wish].costs[rank].bytes for wish in ("send", "recompute"))
        assert sent["hidden"] == 2 * anew["hidden"]
        assert anew["gradients"] > sent["gradients"]


def test_a_model_that_shares_nothing_is_as_before(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    plain = running.over_stages(graph, "gcn", 2, 0.4, epochs=2, chunks=4)
    running.assert_same(running.over_stages(graph, "gcn", 2, 0.4, epochs=2, chunks=4, **ANEW), plain, 0.0)


def test_the_choice_follows_bytes_and_products() -> None:
    reddit = Sharing(232_965, 602, 100, 400, 602 * 100 + 100)
    physics = Sharing(34_493, 8415, 100, 400, 8415 * 100 + 100)
    small = Sharing(60, 8, 12, 96, 108, 8)
    assert makes_anew("auto", reddit)
    assert not makes_anew("auto", physics)
    assert not makes_anew("auto", small)
    assert reddit.products == 2 * 232_965 * 602 * 100
    assert reddit.saved_bytes == 2 * 232_965 * 400 - 8 * 60_300
    assert reddit.products <= MACS_PER_BYTE * reddit.saved_bytes
    for sharing in (reddit, physics, small):
        assert makes_anew("recompute", sharing)
        assert not makes_anew("send", sharing)
    eighth = Sharing(232_965, 602, 100, 104, 602 * 100 + 100)  # in 8 bits there is less to save
    assert not makes_anew("auto", eighth)
    with pytest.raises(ConfigError, match="shared rows"):
        makes_anew("maybe", reddit)
    assert volume_ratio([100] * 32, 2.607, [100] * 7) > 11.8  # GCNII's then, as GCN's
