"""How what ranks tell becomes one result or one error, and when they are started again."""

from __future__ import annotations

import pytest

from polyhop.errors import CheckpointError, ConfigError, Interrupted, LaunchError, PeerError
from polyhop.launch.outcome import Report, failure_of, judge, run_attempts


def good(rank: int) -> Report:
    return Report(rank, payload=b"x", is_over=True)


def bad(rank: int, error: BaseException) -> Report:
    return Report(rank, failure=failure_of(error), is_over=True)


def gone(rank: int) -> Report:
    return Report(rank, is_over=True, end=f"rank {rank} was killed")


def killed(rank: int) -> Report:
    return Report(rank, is_over=True, is_killed=True)


PEER = PeerError("rank 1 (pid 5 on host a) was lost: it ended without a word")


@pytest.mark.parametrize(
    ("reports", "kind", "text", "is_loss"),
    [
        ([bad(0, PEER), bad(1, ConfigError("lr"))], ConfigError, "rank 1: lr", False),
        ([bad(0, ConfigError("lr")), bad(1, ConfigError("lr"))], ConfigError, "lr", False),
        ([bad(0, PEER), gone(1), bad(2, PEER)], PeerError, "rank 1 was killed", True),
        ([bad(0, PEER), killed(1), bad(2, PEER)], PeerError, str(PEER), True),
        ([bad(0, LaunchError("rank 1 never came")), gone(1)], PeerError, "rank 1 was killed", True),
        (
            [bad(0, LaunchError("rank 1 never came")), killed(1)],
            LaunchError,
            "rank 0: rank 1 never came",
            True,
        ),
        ([bad(0, LaunchError("differs")), bad(1, LaunchError("differs"))], LaunchError, "differs", False),
        ([bad(0, Interrupted("stopped")), bad(1, Interrupted("stopped"))], Interrupted, "stopped", False),
        (
            [bad(0, Interrupted("stopped")), bad(1, CheckpointError("full"))],
            CheckpointError,
            "rank 1: full",
            False,
        ),
        ([gone(0), good(1)], PeerError, "rank 0 was killed", True),
        ([killed(0), good(1)], PeerError, "rank 0 did not end, and was killed", True),
        ([bad(0, SystemExit(3)), bad(1, PEER)], LaunchError, r"rank 0: left by sys.exit\(3\)", False),
        (
            [bad(0, UnicodeDecodeError("utf8", b"", 0, 1, "x"))],
            PeerError,
            "rank 0: UnicodeDecodeError: ",
            False,
        ),
        ([bad(0, MemoryError("big"))], MemoryError, "rank 0: big", False),
    ],
)
def test_one_error_of_many(
    reports: list[Report], kind: type[BaseException], text: str, is_loss: bool
) -> None:
    error, was_loss = judge(reports, None)
    assert type(error) is kind
    assert str(error).startswith(text.replace("\\", ""))
    assert was_loss is is_loss


def test_result_counts_whatever_becomes_of_the_others_afterwards() -> None:
    assert judge([good(0), good(1)], None) == (None, False)
    assert judge([good(0), gone(1)], None) == (None, False)
    assert judge([good(0), killed(1)], None) == (None, False)


def test_stop_that_was_not_obeyed_is_still_a_stop() -> None:
    error, is_loss = judge([killed(0), gone(1)], "SIGTERM")
    assert isinstance(error, Interrupted)
    assert "SIGTERM" in str(error)
    assert not is_loss


class Attempt:
    def __init__(self, reports: list[Report], stopped_by: str | None = None) -> None:
        self.reports, self.stopped_by = reports, stopped_by

    def run(self) -> None:
        pass


def test_restart_after_a_loss_only(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[int] = []

    def make(number: int) -> Attempt:
        made.append(number)
        return Attempt([gone(0), good(1)] if number < 2 else [good(0), good(1)])

    assert run_attempts(make, 2) == b"x"
    assert made == [0, 1, 2]
    said = capsys.readouterr().err
    assert "rank 0 was killed. Starting all 2 ranks again (restart 1 of 2)" in said
    with pytest.raises(PeerError):
        run_attempts(make=lambda number: Attempt([gone(0)]), max_restarts=1)
    with pytest.raises(ConfigError):
        run_attempts(lambda number: Attempt([bad(0, ConfigError("lr"))]), 5)
    with pytest.raises(Interrupted):
        run_attempts(lambda number: Attempt([gone(0)], "SIGINT"), 5)
