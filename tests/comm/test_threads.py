"""Ranks as threads are as strict as ranks as processes: what they let through would not pass a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from polyhop.comm import Collective, Turns, run_in_threads
from polyhop.comm.threads import ThreadCollective
from polyhop.errors import InputError, PeerError


def other_dtype(line: Collective) -> None:
    line.all_gather(
        torch.zeros(4, dtype=[torch.float32, torch.float64][line.rank]), kind="scores", counts=[4, 4]
    )


def other_size(line: Collective) -> None:
    line.all_gather(torch.zeros(3 + line.rank), kind="scores", counts=[3, 3])


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (other_dtype, r"rank \d sent torch.float\d\d \[4\], rank \d expected torch.float\d\d \[4\]"),
        (other_size, r"rank 1 sent torch.float32 \[4\], rank 0 expected torch.float32 \[3\]"),
    ],
)
def test_a_message_that_is_not_what_was_expected(job: object, message: str) -> None:
    with pytest.raises((InputError, PeerError), match=message):
        run_in_threads(2, job)


def test_a_message_is_copied_when_sent() -> None:
    def late_change(line: Collective) -> list[float]:
        rows = torch.full((2,), float(line.rank))
        pending = line.start_all_to_all([rows, rows], kind="hidden", counts=[2, 2])
        rows += 10
        line.barrier()
        return [float(piece[0]) for q, piece in enumerate(pending.wait()) if q != line.rank]

    assert run_in_threads(2, late_change) == [[1.0], [0.0]]


def test_the_first_error_is_the_one_raised() -> None:
    def fails(line: Collective) -> None:
        if line.rank == 2:
            raise ZeroDivisionError("planted")
        line.barrier()

    with pytest.raises(ZeroDivisionError, match="planted"):
        run_in_threads(3, fails)


def test_who_waits_for_a_failed_rank_is_told_which() -> None:
    first, second = ThreadCollective.group(2)
    pending = first.start_receive([1], torch.float32, 1)
    second.fail(ValueError("planted"))
    with pytest.raises(PeerError, match="rank 1 failed: planted"):
        pending.wait()


def test_turns_hear_of_every_message() -> None:
    class Noted(Turns):
        def __init__(self) -> None:
            self.heard: list[tuple[str, int]] = []

        @contextmanager
        def waiting(self, rank: int) -> Iterator[None]:
            self.heard.append(("waits", rank))
            yield

        @contextmanager
        def moving(self, rank: int) -> Iterator[None]:
            self.heard.append(("moves", rank))
            yield

    turns = Noted()
    run_in_threads(2, lambda line: line.fork().barrier(), turns=turns)
    sent_and_taken = [("moves", rank) for rank in (0, 1)] * 2
    assert sorted(turns.heard) == sorted([*sent_and_taken, ("waits", 0), ("waits", 1)])
