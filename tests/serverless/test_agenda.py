"""Which graph operation a server runs next: old rows are read only where functions would otherwise have nothing to do."""

from __future__ import annotations

import pytest

from polyhop.serverless.agenda import Agenda

GATHERS, BACKWARD = 1, 4  # steps of an operation of a chain of three
NUMBERS = [10, 11, 12, 13]


def agenda(reads: dict[int, list[int]], *, has_waves: bool = True) -> Agenda:
    """Those in ``reads`` can gather in epoch 5, and would read rows of these epochs; to give back reads nothing."""
    made = Agenda(NUMBERS, has_waves, lambda number, step: reads[number] if step == GATHERS else [], 0.0)
    for number in reads:
        made.add(number, 5, GATHERS)
    return made


def test_while_functions_have_work_what_would_read_old_rows_waits() -> None:
    assert agenda({10: [5, 4], 11: [4, 4]}).chosen(lacks_work=False) is None
    assert agenda({10: [5, 4], 11: [5, 5]}).chosen(lacks_work=False) == (5, 0, GATHERS, 11)


def test_where_functions_lack_work_it_does_not() -> None:
    assert agenda({11: [5, 5], 10: [5, 4]}).chosen(lacks_work=True) == (5, 0, GATHERS, 10)


def test_newer_rows_than_its_own_epochs_are_no_reason_to_wait() -> None:
    assert agenda({10: [5, 6]}).chosen(lacks_work=False) == (5, 0, GATHERS, 10)


def test_a_server_without_time_to_spare_does_not_wait() -> None:
    """What counts is the time since it last looked, not since it began."""
    made = agenda({10: [5, 4], 11: [5, 5]})
    for now, graph_s, chosen in ((10.0, 8.0, 10), (20.0, 10.0, 11), (30.0, 15.1, 10), (40.0, 20.0, 11)):
        made.look_back(now, graph_s)
        found = made.chosen(lacks_work=False)
        assert found is not None
        assert found.number == chosen


@pytest.mark.parametrize(("has_waves", "first"), [(True, (5, 0, BACKWARD, 11)), (False, (5, 0, GATHERS, 12))])
def test_of_one_wave_before_the_other(has_waves: bool, first: tuple[int, ...]) -> None:
    """Gradients of the first half go before the second half gathers; pipe has no waves."""
    made = agenda({12: [5, 5]}, has_waves=has_waves)
    made.add(11, 5, BACKWARD)
    assert made.chosen(lacks_work=True) == first
    assert [made.wave(number) for number in NUMBERS] == ([0, 0, 1, 1] if has_waves else [0] * 4)


def test_an_earlier_epoch_goes_before_everything() -> None:
    made = agenda({10: [5, 5]})
    made.add(13, 4, BACKWARD)
    assert made.chosen(lacks_work=False) == (4, 1, BACKWARD, 13)


def test_giving_gradients_back_reads_nothing_of_others() -> None:
    made = agenda({10: [4, 4]})
    made.add(11, 5, BACKWARD)
    chosen = made.chosen(lacks_work=False)
    assert chosen == (5, 0, BACKWARD, 11)
    made.remove(chosen)
    assert len(made) == 1
    assert made.chosen(lacks_work=False) is None
