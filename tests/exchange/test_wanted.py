"""Rows or sums of them: whichever is fewer bytes, and an owner understands which from one list of numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import PeerError
from polyhop.exchange.wanted import Price, Wanted, told
from polyhop.sample.wire import Wire

WIRE = Wire(1000)


def wanted(
    pairs: list[tuple[int, int]], price: Price | None, size: int = 50
) -> tuple[Wanted, Tensor, Tensor]:
    """Of edges (row of the owner, destination)."""
    src, to = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    rows, place = torch.unique(src, return_inverse=True)
    return Wanted.of(rows, place, to, size, price, WIRE), place, to


edges = st.lists(st.tuples(st.integers(0, 49), st.integers(0, 11)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    pairs=edges, columns=st.sampled_from([1, 4, 64]), returns=st.booleans(), bits=st.sampled_from([1, 8, 32])
)
def test_every_edge_is_served_once_and_never_by_more_bytes(
    pairs: list[tuple[int, int]], columns: int, returns: bool, bits: int
) -> None:
    price = Price(columns, bits=bits, returns=returns)
    found, place, to = wanted(pairs, price)
    plain = wanted(pairs, None)[0]
    assert found.num_bytes(50, price, WIRE) <= plain.num_bytes(50, price, WIRE)
    assert plain.num_crossing == plain.rows.numel()
    there = told(WIRE.rows(WIRE.request(found.numbers(50))), 50, 1, takes_sums=True)
    assert there.rows.tolist() == found.rows.tolist()
    assert there.entry.tolist() == found.entry.tolist()
    assert there.num_crossing == found.num_crossing <= plain.num_crossing
    # What the owner sums for each destination, and what the reader sums of rows that came, are all edges.
    target = to[found.to]
    served = [
        (int(row), int(target[j]))
        for j, part in enumerate(there.rows[there.place].split(there.counts.tolist()))
        for row in part
    ]
    is_row = there.is_row
    for at, (p, d) in enumerate(zip(place.tolist(), to.tolist(), strict=True)):
        assert bool(is_row[p]) == (at not in set(found.edges.tolist()))
        if is_row[p]:
            served.append((int(found.rows[p]), d))
    assert sorted(served) == sorted(pairs)


def test_many_rows_of_one_destination_are_one_sum() -> None:
    found = wanted([(row, 3) for row in range(20)] + [(30, 4), (30, 5), (30, 6)], Price(16))[0]
    assert (found.num_sums, found.num_crossing, int(found.is_row.sum())) == (1, 2, 1)
    assert found.counts.tolist() == [20]


def test_rows_that_cost_less_than_entries_are_sent() -> None:
    pairs = [(row, row // 2) for row in range(50)]
    assert wanted(pairs, Price(16))[0].num_sums == 25
    assert wanted(pairs, Price(1, bits=1, returns=False, entry_bytes=4))[0].num_sums == 0


@pytest.mark.parametrize(
    "numbers",
    [[3, 60], [3, 5, 51, 54], [50, 51], [1000000]],
    ids=["a sum left out", "the second left out", "sums of nothing", "no such row"],
)
def test_numbers_that_mean_nothing_are_refused(numbers: list[int]) -> None:
    with pytest.raises(PeerError, match="rank 2 asked for rows"):
        told(torch.tensor(numbers), 50, 2, takes_sums=True)


def test_sums_where_there_are_none_are_refused() -> None:
    with pytest.raises(PeerError, match=r"rank 2 asked for rows 3 \.\. 51: this rank owns 50"):
        told(torch.tensor([3, 5, 50, 51]), 50, 2, takes_sums=False)
