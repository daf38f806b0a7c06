"""What a model gives to all layers (GCNII's h0), made anew by every stage: the same weights to rounding, half the bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyhop.comm import Collective, run_in_threads
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


def over_ways(graph: Graph, shape: tuple[int, int], p: float, epochs: int, **options: Any) -> Any:
    given = {"stages": shape[0], **options}
    return running.joined(
        run_in_threads(shape[0] * shape[1], running.on_rank, graph, "gcnii", p, epochs, given)
    )


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3), (1, 2)])
def test_ways_with_one_chunk_each_are_the_full_graph(
    make_graph: MakeGraph, shape: tuple[int, int], sparse: bool
) -> None:
    """I7; and layer by layer, where ways have different numbers of chunks."""
    graph = make_graph(60, sparse=sparse)
    expected = running.alone(graph, "gcnii", 0.4, epochs=2)
    for options in ({"chunks": shape[1]}, {"chunks": 7, "exact_layers": True}):
        found = over_ways(graph, shape, 0.4, 2, **ANEW, **options)
        running.assert_same(found, expected, 1e-7 if sparse else 1e-10)


def test_ways_with_history_give_what_sending_gives(make_graph: MakeGraph) -> None:
    graph, options = make_graph(60), {"chunks": 7, "history_gamma": 2.0}
    sent = over_ways(graph, (2, 2), 0.4, 3, shared_rows="send", **options)
    anew = over_ways(graph, (2, 2), 0.4, 3, **ANEW, **options)
    running.assert_same(anew, sent, 1e-12)
    again = over_ways(graph, (2, 2), 0.4, 3, recompute=True, **ANEW, **options)
    running.assert_same(again, anew, 0.0)


@pytest.mark.parametrize("bits", [32, 4])
def test_bytes_of_ways_are_those_accounted(make_graph: MakeGraph, bits: int) -> None:
    """Half as much crosses between stages; what ways exchange is the same."""
    graph = make_graph(60)
    for shape in ((2, 2), (3, 2), (2, 3)):
        hidden = []
        for wish in ("send", "recompute"):
            found = over_ways(graph, shape, 0.3, 2, chunks=7, bits=bits, shared_rows=wish)
            for rank, cost in enumerate(found.costs):
                counted = cost.only("hidden", "gradients")
                for expected in (found.accounts[rank], found.estimates[rank]):
                    assert dict(counted.bytes) == dict(expected.bytes), (wish, rank)
                    assert dict(counted.messages) == dict(expected.messages), (wish, rank)
            hidden.append(sum(cost.bytes["hidden"] for cost in found.costs))
        row = 12 * 8 if bits == 32 else 12 * bits // 8 + 4
        assert hidden[0] - hidden[1] == 2 * (shape[0] - 1) * graph.num_nodes * row


def test_a_way_of_a_later_stage_has_its_own_input_rows(make_graph: MakeGraph) -> None:
    graph = make_graph(60)

    def run(line: Collective) -> tuple[int, int, int]:
        model = running.model_of("gcnii", graph, 0.0)
        step = running.build(line, graph, model, chunks=5, stages=2, **ANEW)
        return step._rows.shape[0], step.chunks.num_own, step.chunks.num_rows

    found = run_in_threads(4, run)
    for has, own, _ in found[2:]:
        assert has == own
    for has, own, every in found[:2]:
        assert has == every > own
    assert sum(own for _, own, _ in found[2:]) == graph.num_nodes


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
    ways = Sharing(232_965, 602, 100, 400, 602 * 100 + 100, num_ways=4)
    assert reddit.saved_bytes - ways.saved_bytes == 3 * 2 * 4 * 60_300  # of the weights, summed by every rank
    eighth = Sharing(232_965, 602, 100, 104, 602 * 100 + 100)  # in 8 bits there is less to save
    assert not makes_anew("auto", eighth)
    with pytest.raises(ConfigError, match="shared rows"):
        makes_anew("maybe", reddit)
    assert volume_ratio([100] * 32, 2.607, [100] * 7) > 11.8  # GCNII's then, as GCN's
