"""Which epoch an interval may begin, how old the rows may be that it reads there, and sums in the order of intervals."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from polyhop.serverless.epochs import Epochs, Totals, groups_of


def begun(epochs: Epochs, first: int = 0) -> Epochs:
    epochs.go(first)
    return epochs


def test_the_first_epoch_of_a_run_is_of_pipe() -> None:
    epochs = begun(Epochs([0], 1), 4)
    assert [epochs.bound(epoch) for epoch in (4, 5, 6)] == [None, 1, 1]
    assert [epochs.furthest(epoch) for epoch in (4, 5, 6)] == [4, 6, 7]


@pytest.mark.parametrize(
    ("staleness", "furthest"),
    [(None, [0, 1, 2, 3, 4, 5, 6, 7]), (0, [0, 1, 2, 3, 4, 5, 6, 7]), (1, [0, 1, 3, 4, 5, 6, 6, 7]),
     (2, [0, 1, 4, 5, 6, 6, 6, 7]), (9, [0, 1, 6, 6, 6, 6, 6, 7])],
)  # fmt: skip
def test_nobody_goes_past_an_epoch_of_pipe(staleness: int | None, furthest: list[int]) -> None:
    """Of eight epochs the first and the last two are of pipe: the first of the last may be begun, not gone past."""
    epochs = begun(Epochs([0], staleness, pipe_epochs=2, last=7))
    assert [epochs.furthest(epoch) for epoch in range(8)] == furthest
    assert [epochs.bound(epoch) for epoch in range(8)] == [None] * 2 + [staleness] * 4 + [None] * 2


def test_a_run_that_goes_on_has_its_own_first_epoch_and_the_same_early_ones() -> None:
    epochs = begun(Epochs([0], 1, pipe_epochs=3), 1)
    assert [epochs.bound(epoch) for epoch in range(1, 5)] == [None, None, 1, 1]


@pytest.mark.parametrize(
    ("staleness", "readable"), [(None, [5]), (0, [4, 5, 6, 7]), (1, [3, 4, 5, 6, 7]), (9, list(range(8)))]
)
def test_what_may_be_read(staleness: int | None, readable: list[int]) -> None:
    epochs = begun(Epochs([0], staleness))
    assert [tag for tag in range(-1, 8) if epochs.is_readable(tag, 5)] == readable


def test_intervals_follow_each_other() -> None:
    """One after another ends; who is not due may go ahead by the bound, and no interval begins an epoch twice."""
    epochs = begun(Epochs([7, 8], 1, last=3))
    assert [epochs.follow(number) for number in (7, 8)] == [True, True]
    assert [epochs.begin(number) for number in (7, 8)] == [0, 0]
    assert not epochs.follow(7)  # it has begun
    assert epochs.end(7) == 0
    assert (epochs.ended_by_all, epochs.follow(7), epochs.ahead) == (
        -1,
        False,
        [],
    )  # none goes past the first
    assert epochs.end(8) == 0
    assert epochs.ended_by_all == 0

    epochs.go(1)
    assert epochs.follow(7)
    assert epochs.begin(7) == 1
    assert epochs.end(7) == 1
    assert (epochs.follow(7), epochs.ahead) == (False, [7])  # by one, while the other has not begun
    assert epochs.begin(epochs.ahead.pop(0)) == 2
    assert epochs.end(7) == 2
    assert (epochs.follow(7), epochs.ahead, epochs.ended_by_all) == (False, [], 0)

    assert epochs.begin(8) == 1
    assert epochs.end(8) == 1
    assert (epochs.follow(8), epochs.ahead) == (False, [8])
    epochs.go(2)  # those ahead are asked again
    assert epochs.ahead == []
    assert epochs.follow(8)
    assert not epochs.follow(7)
    assert epochs.ahead == [7]
    assert epochs.begin(7) == 3
    assert epochs.end(7) == 3
    epochs.go(3)
    assert (epochs.follow(7), epochs.ahead) == (False, [])  # it was the last


def pieces(number: int) -> dict[str, list[Tensor]]:
    """Values whose sum depends on the order in which they are added."""
    return {"w": [torch.tensor([[1e8, 1.0, -1e8, 0.5][number]]), torch.tensor([0.25])]}


def test_sums_are_in_the_order_of_intervals_whichever_ends_first() -> None:
    expected, loss = torch.zeros(1), 0.0
    for number in range(4):
        for piece in pieces(number)["w"]:
            expected = expected + piece
        loss += 0.1 * number
    backwards = sum((piece for number in (3, 2, 1, 0) for piece in pieces(number)["w"]), torch.zeros(1))
    assert not torch.equal(expected, backwards)
    for order in itertools.permutations(range(4)):
        totals = Totals(range(4))
        ended = [totals.add(6, number, 0.1 * number, pieces(number)) for number in order]
        assert ended == [False, False, False, True]
        found = totals.summed(6, 0)
        assert (found.loss, found.gradients["w"]) == (loss, expected)


def test_groups_and_epochs_are_summed_for_themselves() -> None:
    totals = Totals([10, 11, 12], num_groups=2)
    assert (totals.groups, totals.sizes[0], totals.sizes[1], totals.sizes[2]) == (
        {10: 0, 11: 0, 12: 1},
        2,
        1,
        0,
    )
    assert not totals.add(0, 10, 1.0, {})
    assert not totals.add(1, 10, 2.0, {"w": [torch.ones(1)]})
    assert totals.add(0, 12, 4.0, {})
    assert totals.add(1, 11, 8.0, {"v": [torch.ones(1)]})
    assert totals.summed(0, 1).loss == 4.0
    found = totals.summed(1, 0)
    assert (found.loss, sorted(found.gradients)) == (10.0, ["v", "w"])
    assert totals.add(0, 11, 16.0, {})
    assert totals.summed(0, 0).loss == 17.0


def test_groups_are_of_consecutive_intervals() -> None:
    assert groups_of(5, 2) == [0, 0, 0, 1, 1]
    assert groups_of(2, 3) == [0, 1]
    assert groups_of(0, 3) == []
