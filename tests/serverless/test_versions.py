"""Versions of the weights: who takes which, when they go, and guesses at the one that is not there yet."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyhop.graph import Sizes
from polyhop.nn import GCN
from polyhop.serverless.segments import Dense, segments
from polyhop.serverless.versions import Ticket, Versions


def versions() -> tuple[Versions, int, str]:
    """(of a model, a piece, a weight of it)."""
    chain = segments(GCN(3, 4, 2), Sizes.of_many(10), scale=1.0)
    pieces = {at: each for at, each in enumerate(chain) if isinstance(each, Dense) and each.weight_names}
    place = next(iter(pieces))
    return Versions(pieces), place, pieces[place].weight_names[0]


def publish(made: Versions, number: int, value: float) -> None:
    names = {name for piece in made._pieces.values() for name in piece.weight_names}
    made.publish(number, {name: torch.full((3,), value) for name in names})


def test_a_ticket_takes_the_newest_version_once() -> None:
    made, _, _ = versions()
    publish(made, 0, 0)
    late, early = Ticket(made), Ticket(made)
    assert int(early) == 0
    publish(made, 1, 0)
    assert (int(early), int(late)) == (0, 1)
    publish(made, 2, 0)
    assert (int(late), made.alive) == (1, [0, 1, 2])
    early.leave()
    late.leave()
    assert made.alive == [2]


def test_a_guess_is_one_more_step_like_the_last() -> None:
    made, place, weight = versions()
    publish(made, 4, 1.0)
    publish(made, 5, 1.5)
    guesses = Ticket(made, is_ahead=True), Ticket(made, is_ahead=True)
    assert [int(each) for each in guesses] == [~5, ~5]
    assert int(Ticket(made)) == 5
    publish(made, 6, 1.75)
    assert int(guesses[0]) == ~5  # whatever has come meanwhile
    program, found = made.of(place, ~5)
    assert program == made.of(place, 6)[0]
    assert np.array_equal(found[weight], np.full(3, 2.0))
    assert np.array_equal(made.of(place, 5)[1][weight], np.full(3, 1.5))
    assert made.of(place, ~5)[1][weight].dtype == made.of(place, 6)[1][weight].dtype
    guesses[0].leave()
    assert ~5 in made.alive
    guesses[1].leave()
    assert made.alive == [5, 6]
    with pytest.raises(KeyError):
        made.of(place, ~5)


def test_before_the_second_version_there_is_nothing_to_guess_by() -> None:
    made, _, _ = versions()
    publish(made, 7, 1.0)  # the first of a run that goes on
    assert int(Ticket(made, is_ahead=True)) == 7


def test_a_guess_does_not_become_what_the_next_is_guessed_by() -> None:
    made, place, weight = versions()
    for number, value in enumerate((0.0, 8.0, 10.0)):
        publish(made, number, value)
        held = made.take(is_ahead=True)
    assert held == ~2
    assert np.array_equal(made.of(place, held)[1][weight], np.full(3, 12.0))
