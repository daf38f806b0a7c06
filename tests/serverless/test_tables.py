"""Rows and gradients of tables, and what is made of old ones: what changes evenly is foretold, what is new is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhop.graph import Block
from polyhop.serverless.intervals import Interval, Reader
from polyhop.serverless.tables import NEVER, Table, steps_ahead

OWN, OTHER = 0, 1  # intervals, of two rows each


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def interval() -> Interval:
    """Reads its own two rows and, first, one of the other's. Both read its rows."""
    nothing = Block(ids(0, 0, 0), ids().int(), 3)
    readers = Reader(OWN, ids(1, 2), ids(0, 1)), Reader(OTHER, ids(0), ids(1))
    return Interval(
        OWN, 0, 2, nothing, ids(3, 0, 1), ids(OTHER, OWN, OWN), (OWN, OTHER), readers, {}, {}
    )  # fmt: skip


def table(extrapolates: bool = True) -> Table:
    return Table(4, 2, {"m": 2}, torch.float64, extrapolates=extrapolates)


def rows(count: int, time: float) -> dict[str, Tensor]:
    """That change by the same in every epoch."""
    gen = torch.Generator().manual_seed(count)
    start, change = torch.randn(2, count, 2, generator=gen, dtype=torch.float64)
    return {"m": start + time * change}


def put(made: Table, number: int, *epochs: int) -> None:
    for epoch in epochs:
        made.put(number, slice(2 * number, 2 * number + 2), epoch, rows(2, epoch))


@pytest.mark.parametrize(
    ("epoch", "tag", "before", "steps"),
    [
        (5, 4, 3, 1.0),
        (5, 3, 2, 2.0),
        (5, 4, 2, 0.5),  # an epoch was skipped before: half of what changed in two
        (5, 3, 1, 1.0),
        (9, 4, 3, 2.0),  # no further
        (5, 5, 4, 0.0),  # of the reader's epoch
        (5, 6, 5, 0.0),  # newer
        (5, 4, NEVER, 0.0),  # nothing was there before
        (5, 4, 4, 0.0),  # given twice, as when a run goes on
        (5, 4, 5, 0.0),
    ],
)
def test_how_far_rows_are_taken(epoch: int, tag: int, before: int, steps: float) -> None:
    assert steps_ahead(epoch, tag, before) == steps


@pytest.mark.parametrize("epochs", [(2, 3), (1, 3), (0, 1, 3), (2, 3, 4)])
def test_rows_that_change_evenly_are_foretold(epochs: tuple[int, ...]) -> None:
    made = table()
    put(made, OTHER, *epochs)
    put(made, OWN, 4, 5)
    found = made.reading(interval(), 5)
    assert found.sources is None
    read = found.copied("m")
    assert torch.allclose(read[0], rows(2, 5)["m"][1], rtol=0, atol=1e-14)
    assert not torch.equal(made.rows["m"][3], read[0])  # the table has what was put there
    assert torch.equal(read[1:], rows(2, 5)["m"])  # new ones: not a bit is changed


def test_what_is_not_old_is_read_where_it_lies() -> None:
    for made in (table(), table(extrapolates=False)):
        put(made, OTHER, 4, 5, 6)
        put(made, OWN, 4, 5)
        where = interval()
        found = made.reading(where, 5)
        assert found.sources is where.sources
        assert found.rows is made.rows
        assert torch.equal(found.copied("m"), made.rows["m"][where.sources])


def test_old_rows_are_read_as_they_are_where_that_is_wanted_or_nothing_else_is_known() -> None:
    plain, first = table(extrapolates=False), table()
    put(plain, OTHER, 3, 4)
    put(first, OTHER, 4)  # no step yet
    for made in (plain, first):
        put(made, OWN, 5)
        assert torch.equal(made.reading(interval(), 5).copied("m")[0], rows(2, 4)["m"][1])


def test_gradients_that_change_evenly_are_foretold() -> None:
    made = table()
    for epoch in (4, 5):
        made.give(OWN, epoch, rows(3, epoch))
    for epoch in (1, 3):
        made.give(OTHER, epoch, rows(1, epoch))
    expected = rows(3, 5)["m"][1:]
    expected[1] += rows(1, 5)["m"][0]
    assert made.given_epoch(OTHER) == 3
    for _ in range(2):  # nothing that was given is written to
        found = made.collect(interval(), 5)["m"]
        assert torch.equal(found[0], expected[0])
        assert torch.allclose(found[1], expected[1], rtol=0, atol=1e-14)
    as_given = rows(3, 5)["m"][2] + rows(1, 3)["m"][0]
    plain = table(extrapolates=False)
    plain.give(OWN, 5, rows(3, 5))
    for epoch in (1, 3):
        plain.give(OTHER, epoch, rows(1, epoch))
    assert torch.equal(plain.collect(interval(), 5)["m"][1], as_given)


def test_no_more_than_the_last_change_is_kept() -> None:
    made = table()
    for epoch in range(50):
        made.give(OWN, epoch, rows(3, epoch))
    assert made._given[OWN].before is not None
    assert made._given[OWN].before.before is None
    assert made.num_bytes == 2 * table(extrapolates=False).num_bytes == 2 * 4 * 2 * 8
