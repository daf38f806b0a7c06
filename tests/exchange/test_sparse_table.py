"""A table of sparse rows gives back what was put into it, whatever was added and thrown away meanwhile."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from polyhop.exchange.sparse_table import SparseTable
from polyhop.graph import SparseRows

COLUMNS = 40


def piece(lengths: list[int], seed: int) -> SparseRows:
    made = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    size = int(indptr[-1])
    columns = torch.randint(COLUMNS, (size,), generator=made).int()
    return SparseRows(indptr, columns, torch.rand(size, generator=made), COLUMNS)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_rows_come_back(pieces: list[list[int]], chance: object) -> None:
    table, known = None, []  # of every place the row that it should hold
    for number, lengths in enumerate(pieces):
        rows = piece(lengths, number)
        if table is None:
            table, places = SparseTable(rows), torch.arange(len(lengths))
        else:
            places = table.add(rows)
        assert places.tolist() == list(range(len(known), len(known) + len(lengths)))
        known += list(rows.dense())
        if known and chance.random() < 0.3:  # type: ignore[attr-defined]
            kept = torch.tensor(sorted(chance.sample(range(len(known)), len(known) // 2)), dtype=torch.int64)  # type: ignore[attr-defined]
            table.keep(kept)
            known = [known[at] for at in kept.tolist()]
            assert table.num_rows == len(known)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(1))
    found = table.gather(order)
    assert found.shape == (len(known), COLUMNS)
    if known:
        assert torch.equal(found.dense(), torch.stack([known[at] for at in order.tolist()]))


def test_waste_is_what_nobody_needs() -> None:
    table = SparseTable(piece([4] * 10, 0))
    assert not table.has_waste(torch.arange(10))
    assert not table.has_waste(torch.arange(5))
    assert table.has_waste(torch.arange(4))
    table.keep(torch.arange(4))
    assert table.num_values == 16
    assert not table.has_waste(torch.arange(4))


def test_a_gathered_row_stays_as_it_is() -> None:
    table = SparseTable(piece([3, 2], 0))
    before = table.gather(torch.tensor([1]))
    values = before.values.clone()
    for number in range(20):
        table.add(piece([5] * 100, number))
    table.keep(torch.tensor([7]))
    assert torch.equal(before.values, values)
