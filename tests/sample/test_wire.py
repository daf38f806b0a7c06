"""Requests and replies come back as they were given, are as long as predicted, and a reply that cannot be is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import PeerError
from polyhop.sample.wire import Lists, Wire

WIDE = 1 << 31
FORMATS = {
    f"{'plain' if plain else 'compact'} {'weighted' if weighted else ''}{' wide' if nodes >= WIDE else ''}": Wire(
        nodes, weighted, plain
    )
    for plain in (False, True)
    for weighted in (False, True)
    for nodes in (1000, WIDE)
}


def lists_of(counts: list[int], num_nodes: int, *, weighted: bool) -> Lists:
    rng = torch.Generator().manual_seed(sum(counts))
    total = sum(counts)
    ids = torch.randint(num_nodes, (total,), generator=rng)
    return Lists(torch.tensor(counts).long(), ids, torch.rand(total, generator=rng) if weighted else None)


@pytest.mark.parametrize("wire", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("fanout", [1, 255, 256, -1])
@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0], [1, 0, 1], [1] * 7])
def test_reply_round_trip(wire: Wire, fanout: int, counts: list[int]) -> None:
    given_lists = lists_of(counts, wire.num_nodes, weighted=wire.is_weighted)
    data = wire.reply(given_lists, fanout)
    assert data.dtype == torch.uint8
    assert data.numel() == wire.reply_bytes(len(counts), sum(counts), fanout)
    got = wire.lists(data, len(counts), fanout, sender=2)
    assert torch.equal(got.counts, given_lists.counts)
    assert torch.equal(got.neighbours, given_lists.neighbours)
    assert got.counts.dtype == got.neighbours.dtype == torch.int64
    assert (got.weights is None) == (given_lists.weights is None)
    if got.weights is not None and given_lists.weights is not None:
        assert torch.equal(got.weights, given_lists.weights)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=12),
    st.booleans(),
    st.booleans(),
    st.sampled_from([300, -1, 1000]),
)
def test_any_reply(counts: list[int], weighted: bool, plain: bool, fanout: int) -> None:
    wire = Wire(1000, weighted, plain)
    given_lists = lists_of(counts, 1000, weighted=weighted)
    data = wire.reply(given_lists, fanout)
    assert data.numel() == wire.reply_bytes(len(counts), sum(counts), fanout)
    got = wire.lists(data, len(counts), fanout, sender=0)
    assert torch.equal(got.counts, given_lists.counts)
    assert torch.equal(got.neighbours, given_lists.neighbours)


def test_a_narrow_count_holds_the_whole_fanout() -> None:
    wire = Wire(1000)
    got = wire.lists(wire.reply(lists_of([255, 3], 1000, weighted=False), 255), 2, 255, sender=0)
    assert got.counts.tolist() == [255, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**40), unique=True, max_size=30), st.booleans())
def test_request_round_trip(rows: list[int], plain: bool) -> None:
    wire = Wire(2**41, is_plain=plain)
    given_rows = torch.tensor(rows if plain else sorted(rows), dtype=torch.int64)
    data = wire.request(given_rows)
    assert data.dtype == torch.uint8
    assert data.numel() == wire.request_bytes(given_rows)
    assert torch.equal(wire.rows(data), given_rows)


def test_close_rows_cost_a_byte_each() -> None:
    rows = torch.arange(50, 400, 3)
    assert Wire(1000).request_bytes(rows) == rows.numel()
    assert Wire(1000, is_plain=True).request_bytes(rows) == 8 * rows.numel()


def test_bytes_of_an_edge_and_a_count() -> None:
    assert [Wire(n).edge_bytes for n in (10, WIDE - 1, WIDE)] == [4, 4, 8]
    assert Wire(10, is_weighted=True).edge_bytes == 8
    assert Wire(10, is_plain=True).edge_bytes == 8
    assert [Wire(10).count_dtype(f).itemsize for f in (1, 255, 256, -1)] == [1, 1, 4, 4]
    assert Wire(10, is_plain=True).count_dtype(5).itemsize == 8


def refusal(wire: Wire, data: Tensor, num_rows: int, fanout: int = 5) -> str:
    with pytest.raises(PeerError) as caught:
        wire.lists(data, num_rows, fanout, sender=3)
    return str(caught.value)


@pytest.mark.parametrize("wire", FORMATS.values(), ids=FORMATS)
def test_a_reply_of_the_wrong_length_names_its_sender(wire: Wire) -> None:
    data = wire.reply(lists_of([2, 0, 3], wire.num_nodes, weighted=wire.is_weighted), 5)
    for wrong in (data[:-1], torch.cat([data, data[:1]]), data[:1], data[:0]):
        assert "rank 3 sent" in refusal(wire, wrong, 3)
    longer = torch.cat(
        [data, data.new_zeros(wire.edge_bytes)]
    )  # a length that could be one, had it one more edge
    assert "rank 3 sent" in refusal(wire, longer, 3)
    assert "rank 3 sent" in refusal(wire, data, 4)


@pytest.mark.parametrize("wire", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("counts", [[2, 0, 4], [0, 0, 0], [5, 5, 5]])
def test_counts_that_do_not_add_up_name_their_sender(wire: Wire, counts: list[int]) -> None:
    five = lists_of([2, 0, 3], wire.num_nodes, weighted=wire.is_weighted)
    data = wire.reply(Lists(torch.tensor(counts), five.neighbours, five.weights), 5)
    assert f"rank 3 sent 5 neighbours, counted as {sum(counts)}" in refusal(wire, data, 3)


@pytest.mark.parametrize("wire", [Wire(1000), Wire(1000, is_plain=True), Wire(1000, is_weighted=True)])
def test_negative_counts_name_their_sender(wire: Wire) -> None:
    """They may add up all the same."""
    five = lists_of([2, 0, 3], 1000, weighted=wire.is_weighted)
    data = wire.reply(Lists(torch.tensor([-1, 0, 6]), five.neighbours, five.weights), -1)
    assert "rank 3 sent 5 neighbours" in refusal(wire, data, 3, fanout=-1)


@pytest.mark.parametrize("wire", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("node", [-1, 1000])
def test_neighbours_that_are_no_nodes_name_their_sender(wire: Wire, node: int) -> None:
    if wire.num_nodes == WIDE:
        node = node if node < 0 else WIDE
    weights = torch.ones(2) if wire.is_weighted else None
    data = wire.reply(Lists(torch.tensor([2]), torch.tensor([4, node]), weights), 5)
    assert "rank 3 sent neighbours that are no nodes" in refusal(wire, data, 1)
