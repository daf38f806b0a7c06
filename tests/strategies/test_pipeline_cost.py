"""Bytes of a pipeline: the authors' logged volumes as fixtures, account against estimate, formulas against counting."""

from __future__ import annotations

import pytest

from polyhop.errors import InputError
from polyhop.strategies.pipeline_cost import (
    TAIL,
    Between,
    Boundary,
    Facts,
    account,
    account_between,
    account_boundaries,
    break_even_depth,
    estimate,
    estimate_bubble,
    graph_parallel_volume,
    memory_bytes,
    pipeline_volume,
    volume_ratio,
)
from polyhop.strategies.pipeline_schedule import Layout, chunk_order, fill_drain, layer_by_layer, split_ways

GIB = 1 << 30
LOGGED = {  # nodes, columns that cross, stages -> GiB an epoch, as the authors' logs have it
    "reddit gcn": (232_965, 100, 8, 1.215),
    "reddit gcnii": (232_965, 200, 8, 2.430),
    "reddit hybrid": (232_965, 100, 4, 0.521),
    "squirrel": (5_201, 1000, 8, 0.271),
    "flickr": (89_250, 100, 8, 0.465),
    "physics": (34_493, 100, 8, 0.180),
}


@pytest.mark.parametrize("name", LOGGED)
def test_logged_volumes_to_the_printed_digit(name: str) -> None:
    nodes, columns, stages, logged = LOGGED[name]
    assert round(pipeline_volume(nodes, [columns] * (stages - 1)).boundaries / GIB, 3) == logged


def test_logged_weight_traffic_to_the_printed_digit() -> None:
    """Squirrel, 32-layer GCN of 1000 columns, 8 GPUs: 1.674 GiB (features 2089, classes 5; dense layers without bias)."""
    weights = 2089 * 1000 + 30 * 1000 * 1000 + 1000 * 5
    volume = graph_parallel_volume(5_201, [1000] * 32, 2.220, 8, weights)
    assert round(volume.weights / GIB, 3) == 1.674


def test_graph_parallel_volume_is_linear_in_depth() -> None:
    """Flickr: 1.146 GiB at 8 layers, 18.333 at 128 (R(8) = 2.154 was backed out of them)."""
    for depth, logged in ((8, 1.146), (16, 2.292), (32, 4.583), (64, 9.166), (128, 18.333)):
        volume = graph_parallel_volume(89_250, [100] * depth, 2.1545, 8, 0)
        assert volume.halo / GIB == pytest.approx(logged, rel=1e-3)


def test_volume_ratios_at_reddit_s_replication() -> None:
    layers = [100] * 32
    assert volume_ratio(layers, 2.607, [100] * 7) >= 11
    assert volume_ratio(layers, 2.607, [200] * 7) >= 5.9  # GCNII with h0 carried
    assert volume_ratio(layers, 2.607, [100] * 7) == 2 * volume_ratio(layers, 2.607, [200] * 7)
    assert break_even_depth(100, 0.992, [100] * 7) == pytest.approx(7.06, abs=0.01)  # Physics
    assert break_even_depth(100, 0.675, [200] * 7) == pytest.approx(20.7, abs=0.05)  # arXiv, GCNII


def test_hybrid_is_the_sum() -> None:
    plain = pipeline_volume(1000, [16, 16])
    hybrid = pipeline_volume(
        1000, [16, 16], num_ways=2, halo_share=0.5, layer_columns=[16] * 6, num_weights=640
    )
    parts = graph_parallel_volume(1000, [16] * 6, 0.5, 2, 640)
    assert (hybrid.boundaries, hybrid.halo, hybrid.weights) == (plain.total, parts.halo, parts.weights)
    assert hybrid.total == plain.total + parts.total


ROWS = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("maker", [fill_drain, layer_by_layer])
def test_estimate_is_account(stages: int, maker: object) -> None:
    assert callable(maker)
    schedule = maker(Layout(stages), list(range(stages + 1)), [chunk_order(range(5), 0, 3)])
    boundaries = [Boundary(8 + at, 8) for at in range(stages - 1)]
    facts = Facts(Layout(stages), sum(ROWS), 5, boundaries, 8)
    for rank in range(stages):
        assert account(schedule, ROWS, boundaries, rank, 8) == estimate(facts, rank)
    total = sum(account(schedule, ROWS, boundaries, rank, 8).bytes.get("hidden", 0) for rank in range(stages))
    assert total == pipeline_volume(sum(ROWS), [each.columns for each in boundaries], value_bytes=8).total


@pytest.mark.parametrize("maker", [fill_drain, layer_by_layer])
def test_estimate_is_account_of_ways_too(maker: object) -> None:
    assert callable(maker)
    layout, parts = Layout(2, 3), split_ways(5, 3)
    schedule = maker(layout, [0, 2, 5], [chunk_order(part, 0, 3) for part in parts])
    num_read = [
        [0 if chunk in part else (7 * chunk + way) % 4 for way, part in enumerate(parts)]
        for chunk in range(5)
    ]
    between = Between(
        num_read, [0, 16, 24, 16, 8], [30_000, 70], parts, [sum(ROWS[c] for c in part) for part in parts]
    )
    facts = Facts(layout, sum(ROWS), 5, [Boundary(8, 8)], 8, 0, between, [0, 2, 5])
    halo = weights = 0.0
    for rank in range(6):
        found = account(schedule, ROWS, [Boundary(8, 8)], rank, 8, 0, between)
        assert found == estimate(facts, rank)
        halo += sum(size for _, _, size in account_between(schedule, between, rank))
        weights += found.bytes["gradients"] - 5 * TAIL * 8
    assert halo == 2 * sum(map(sum, num_read)) * (16 + 24 + 16 + 8)
    # The weights of the first stage are summed in slices; the second's are so few that they go whole.
    assert weights == 2 * (3 - 1) * 8 * 30_000 + 3 * (3 - 1) * 8 * 70


def test_boundaries_and_directions_apart() -> None:
    schedule = fill_drain(Layout(3, 2), [0, 1, 2, 3], [list(part) for part in split_ways(5, 2)])
    quantised = Boundary(8, 4, {"forward": 12})
    found = account_boundaries(schedule, ROWS, [Boundary(6), quantised])
    assert found == {
        (0, "forward"): 14 * 24,
        (0, "backward"): 14 * 24,
        (1, "forward"): 14 * 12,
        (1, "backward"): 14 * 32,
    }


def test_traffic_does_not_depend_on_depth_or_chunks() -> None:
    found = set()
    for chunks, depth in ((1, 2), (7, 2), (2, 60), (14, 9)):
        bounds = [0, depth // 2, depth]
        schedule = fill_drain(Layout(2), bounds, [range(chunks)])
        rows = [14 // chunks] * chunks
        found.add(account(schedule, rows, [Boundary(8)], 0).bytes["hidden"])
    assert found == {14 * 8 * 4}


def test_one_rank_sends_nothing() -> None:
    assert estimate(Facts(Layout(1), 10, 2, []), 0).total_bytes == 0
    assert estimate(Facts(Layout(2), 10, 2, [Boundary(1)]), 0).bytes == {"hidden": 40, "gradients": 4 * TAIL}


def test_empty_chunks_send_nothing() -> None:
    schedule = fill_drain(Layout(2), [0, 1, 2], [range(3)])
    cost = account(schedule, [2, 0, 0], [Boundary(4)], 0)
    assert (cost.bytes["hidden"], cost.messages["hidden"]) == (32, 1)


def test_bubble_is_of_the_chunks_of_a_way() -> None:
    assert estimate_bubble(Facts(Layout(8), 100, 32, [Boundary(1)] * 7)) == pytest.approx(7 / 39)
    assert estimate_bubble(Facts(Layout(4, 2), 100, 32, [Boundary(1)] * 3)) == pytest.approx(3 / 19)


def test_memory_counts_tables_history_gradients_and_what_is_saved() -> None:
    base = memory_bytes(1000, [16] * 4, saved=0)
    assert base == 1000 * 4 * 16 * 4 * 2
    assert memory_bytes(1000, [16] * 4, saved=0, period=5) == base * 3 // 2
    assert memory_bytes(1000, [16] * 4, saved=2) == base * 2
    assert memory_bytes(1000, [16] * 4, saved=0, input_columns=50) == base + 1000 * 50 * 4
    assert memory_bytes(1000, [], saved=0, num_edges=10) == 10 * 12 + 16 * 1001


def test_boundaries_must_be_one_fewer_than_stages() -> None:
    with pytest.raises(InputError, match="one fewer"):
        Facts(Layout(3), 10, 2, [Boundary(1)])
