"""Inside a rank: cores, threads, one rank at a time. A launch of one rank runs here, in this process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import rank_functions
import torch
from remains import Remains

from polyhop.errors import LaunchError
from polyhop.launch import Launch, RankContext
from polyhop.launch.rank import Seat, is_rank, run_rank


def alone(fn: Any, *args: Any, **more: Any) -> Any:
    """As the only rank of a run, hosting the store."""
    seat = Seat(0, 1, local_rank=0, num_local=1, host="127.0.0.1", port=0, is_host=True)
    before = torch.get_num_threads()
    try:
        return run_rank(seat, Launch(start_timeout_s=20), fn, args, **more)
    finally:
        torch.set_num_threads(before)


def test_one_rank_is_no_special_case(remains: Remains) -> None:
    assert alone(rank_functions.add_up)["sum"] == 1.0
    assert not is_rank()


def test_error_passes_and_the_next_run_is_free(remains: Remains) -> None:
    with pytest.raises(KeyError):
        alone(rank_functions.raise_on, 0, "key")
    assert not is_rank()


def test_rank_cannot_launch(remains: Remains) -> None:
    def nested(context: RankContext) -> None:
        alone(rank_functions.add_up)

    with pytest.raises(LaunchError, match="rank 0 cannot start ranks itself"):
        alone(nested)
    assert not is_rank()


def test_last_words_may_be_given_where_nothing_watches(remains: Remains) -> None:
    alone(lambda context: context.on_loss(lambda: None))
    RankContext(comm=None).on_loss(lambda: None)  # type: ignore[arg-type]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyhop.launch import rank

    before = os.sched_getaffinity(0)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    try:
        for local in range(2):
            seat = Seat(local, 2, local_rank=local, num_local=2, host="", port=0)
            assert rank._settle(seat, Launch()) == before
            own = os.sched_getaffinity(0)
            each = len(before) // 2
            assert own == set(sorted(before)[local * each : (local + 1) * each])
            os.sched_setaffinity(0, before)
        crowded = Seat(0, 99, local_rank=0, num_local=10_000, host="", port=0)
        assert rank._settle(crowded, Launch()) is None
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
