"""The schedule as a value: printed, read back, run dry; what dependent chunks need; what a chunk may read (I8)."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations

import pytest

from polyhop.errors import ConfigError, InputError
from polyhop.strategies.pipeline_check import check, dry_run
from polyhop.strategies.pipeline_schedule import (
    Layout,
    Schedule,
    chunk_order,
    fill_drain,
    layer_by_layer,
    split_ways,
)

MAKERS = {"fill_drain": fill_drain, "layer_by_layer": layer_by_layer}


def made(maker: str, stages: int, ways: int, chunks: int, layers_each: int = 2, epoch: int = 0) -> Schedule:
    orders = [chunk_order(part, 5, epoch) for part in split_ways(chunks, ways)]
    bounds = [layers_each * stage for stage in range(stages + 1)]
    return MAKERS[maker](Layout(stages, ways), bounds, orders)


SHAPES = [
    (1, 1, 1),
    (1, 1, 5),
    (2, 1, 1),
    (2, 1, 4),
    (3, 1, 2),
    (4, 1, 9),
    (2, 2, 4),
    (3, 2, 5),
    (2, 3, 7),
    (1, 4, 4),
]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_text_is_read_back(maker: str, shape: tuple[int, int, int]) -> None:
    schedule = made(maker, *shape)
    assert Schedule.parse(schedule.text()) == schedule


def test_text_is_for_people() -> None:
    lines = fill_drain(Layout(2), [0, 1, 3], [[1, 0]]).text().splitlines()
    assert lines[0] == "stages 2 ways 1 layers 0 1 3"
    assert lines[1].split()[:4] == ["F1[0:1]@0", "F1[0:1]@0>1", "F0[0:1]@1", "F0[0:1]@1>1"]
    assert lines[2].split()[-2:] == ["B1[1:3]@0", "B1[1:3]@0>0"]


def test_backward_is_the_reverse_of_forward_on_every_rank() -> None:
    schedule = made("fill_drain", 3, 2, 8)
    for rank in range(6):
        forward = [task.chunk for task in schedule.tasks(rank, "forward")]
        backward = [task.chunk for task in schedule.tasks(rank, "backward")]
        assert backward == forward[::-1]
        kinds = [task.direction for task in schedule.tasks(rank)]
        assert kinds == ["forward"] * len(forward) + ["backward"] * len(backward)


def test_each_boundary_carries_every_chunk_once_each_way() -> None:
    schedule = made("fill_drain", 3, 1, 5)
    sent = Counter(
        (rank, action.peer)
        for rank, lane in enumerate(schedule.lanes)
        for action in lane
        if action.kind == "send"
    )
    assert sent == {(0, 1): 5, (1, 2): 5, (2, 1): 5, (1, 0): 5}
    deeper = made("fill_drain", 3, 1, 5, layers_each=40)
    assert [len(lane) for lane in deeper.lanes] == [len(lane) for lane in schedule.lanes]


def current(schedule: Schedule) -> dict[tuple[int | None, int], set[int | None]]:
    """(chunk, layer) -> chunks whose rows are of this epoch when it reads them, found by running dry."""
    made_at: dict[int, set[int | None]] = {}
    found = {}
    running = dry_run(schedule)
    for rank, action in running:
        stage, task = schedule.layout.stage(rank), action.task
        if task.direction == "backward":
            continue
        if action.kind == "receive":
            made_at.setdefault(schedule.bounds[stage], set()).add(task.chunk)
        if action.kind == "compute":
            for layer in range(task.first, task.stop):
                found[task.chunk, layer] = set(made_at.get(layer, set()))
                if layer + 1 < schedule.bounds[stage + 1]:
                    made_at.setdefault(layer + 1, set()).add(task.chunk)
    return found


def test_chunk_reads_current_rows_of_chunks_before_it_only() -> None:
    schedule = made("fill_drain", 2, 1, 6, layers_each=3)
    order = [task.chunk for task in schedule.tasks(0, "forward")]
    for (chunk, layer), chunks in current(schedule).items():
        if layer:
            assert chunks - {chunk} == set(order[: order.index(chunk)]), (chunk, layer)


def test_layer_by_layer_reads_current_rows_alone() -> None:
    schedule = made("layer_by_layer", 3, 1, 4)
    for (_, layer), chunks in current(schedule).items():
        assert layer == 0 or chunks == {0, 1, 2, 3}


def test_ways_work_tick_by_tick_and_short_ones_still_meet() -> None:
    schedule = fill_drain(Layout(2, 2), [0, 1, 2], [[0, 1, 2], [3, 4]])
    check(schedule)
    assert [task.tick for task in schedule.tasks(0)] == [task.tick for task in schedule.tasks(1)]
    assert [task.chunk for task in schedule.tasks(1)] == [3, 4, None, None, 4, 3]


def test_ranks_of_a_stage_are_neighbours() -> None:
    layout = Layout.of(6, 2)
    assert (layout.num_stages, layout.num_ways) == (3, 2)
    assert [layout.rank(stage, way) for stage in range(3) for way in range(2)] == list(range(6))
    assert [(layout.stage(rank), layout.way(rank)) for rank in (0, 1, 2, 5)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 1),
    ]
    assert list(layout.team(1)) == [2, 3]
    schedule = fill_drain(layout, [0, 1, 2, 3], [[0], [1]])
    peers = {
        (rank, action.peer)
        for rank, lane in enumerate(schedule.lanes)
        for action in lane
        if action.peer is not None
    }
    assert all(abs(peer - rank) == 2 for rank, peer in peers)  # boundaries cross between stages, way by way


def test_order_is_the_seeds_alone() -> None:
    chunks = range(7)
    orders = [chunk_order(chunks, 3, epoch) for epoch in range(60)]
    assert orders == [chunk_order(chunks, 3, epoch) for epoch in range(60)]
    assert all(sorted(order) == list(chunks) for order in orders)
    assert len(set(orders)) > 50
    assert orders[0] != chunk_order(chunks, 4, 0)


def test_every_order_of_three_comes_up_about_as_often() -> None:
    count = Counter(chunk_order(range(3), 11, epoch) for epoch in range(1200))
    assert set(count) == set(permutations(range(3)))
    assert all(140 < each < 260 for each in count.values())  # 200 expected, standard deviation 13


def test_paired_orders_have_every_pair_both_ways_in_two_epochs() -> None:
    for epoch in (0, 2, 8):
        assert (
            chunk_order(range(5), 1, epoch, "paired") == chunk_order(range(5), 1, epoch + 1, "paired")[::-1]
        )
    assert chunk_order(range(5), 1, 3, "fixed") == (0, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match="paired"):
        chunk_order(range(5), 1, 0, "random")


def test_ways_get_runs_of_chunks() -> None:
    assert [list(part) for part in split_ways(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    with pytest.raises(ConfigError, match="at least one"):
        split_ways(2, 3)


@pytest.mark.parametrize(
    "text", ["nonsense", "stages 1 ways 1 layers 0 1\nF0[0:1]", "stages 1 ways 1 layers 0 1\n1>F0[0:1]@0>2"]
)
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="schedule"):
        Schedule.parse(text)


@pytest.mark.parametrize("bounds", [[0, 1], [0, 1, 1], [1, 2, 3], [0, 2, 1]])
def test_bad_cuts_are_refused(bounds: list[int]) -> None:
    with pytest.raises(InputError, match="at least one layer"):
        fill_drain(Layout(2), bounds, [[0]])


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="divisor"):
        Layout.of(6, 4)
    with pytest.raises(ConfigError, match="at least one"):
        Layout(0)
    with pytest.raises(InputError, match="orders"):
        fill_drain(Layout(1, 2), [0, 1], [[0]])


def test_stages_hold_consecutive_layers() -> None:
    schedule = made("fill_drain", 4, 1, 2, layers_each=3)
    spans = [(task.first, task.stop) for rank in range(4) for task in schedule.tasks(rank)[:1]]
    assert all(stop == first for (_, stop), (first, _) in pairwise(spans))
