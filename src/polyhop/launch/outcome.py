"""How a launch ends: what ranks told of themselves becomes a result or one error, and a loss may start them again.

Ground of this folder.
"""

from __future__ import annotations

import builtins
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polyhop import errors
from polyhop.errors import Interrupted, LaunchError, PeerError

__all__ = ["Attempt", "Failure", "Report", "failure_of", "judge", "run_attempts"]


@dataclass(frozen=True)
class Failure:
    """An error as plain text."""

    kind: str  # name of its class
    text: str
    trace: str
    is_peer: bool = False  # it only says that another rank was lost or failed
    is_stop: bool = False  # a request to stop that was obeyed


@dataclass
class Report:
    """What is known of a rank."""

    rank: int
    payload: bytes | None = None  # its result
    failure: Failure | None = None  # its error
    is_over: bool = False  # its process has ended
    is_killed: bool = False  # by the launcher, in the end
    end: str = ""  # how it ended, if without a word

    @property
    def has_spoken(self) -> bool:
        return self.payload is not None or self.failure is not None


class Attempt(Protocol):
    """Ranks that were started together."""

    stopped_by: str | None  # the signal that asked for the end

    @property
    def reports(self) -> Sequence[Report]:
        """By rank."""

    def run(self) -> None:
        """Start them, and return when all have ended."""


def failure_of(error: BaseException) -> Failure:
    """What to tell of an error."""
    kind = type(error)
    is_known = kind.__module__ in (errors.__name__, "builtins")
    return Failure(
        kind=kind.__name__ if is_known else f"{kind.__module__}.{kind.__qualname__}",
        text=str(error),
        trace="".join(traceback.format_exception(error)),
        is_peer=isinstance(error, PeerError),
        is_stop=isinstance(error, Interrupted),
    )


def run_attempts(make: Callable[[int], Attempt], max_restarts: int) -> Any:
    """The payload of rank 0; after a loss, and only then, all ranks are started again, up to ``max_restarts`` times."""
    number = 0
    while True:
        attempt = make(number)
        attempt.run()
        error, is_loss = judge(attempt.reports, attempt.stopped_by)
        if error is None:
            return attempt.reports[0].payload
        number += 1
        if not is_loss or attempt.stopped_by is not None or number > max_restarts:
            raise error
        again = f"Starting all {len(attempt.reports)} ranks again (restart {number} of {max_restarts})"
        print(f"polyhop: {error}. {again}", file=sys.stderr, flush=True)


def judge(reports: Sequence[Report], stopped_by: str | None) -> tuple[BaseException | None, bool]:
    """The error that ended the run, if any, and whether it is the loss of a rank.

    A rank's own error comes first, then a rank that ended without a word, then what the others say of a lost one. A result
    of rank 0 means that all ranks had done their work: what becomes of a rank after that is no loss.
    """
    failed = [report for report in reports if report.failure is not None]
    own = [report for report in failed if report.failure is not None and not report.failure.is_peer]
    silent = [report for report in reports if not report.has_spoken]
    lost = [report for report in silent if not report.is_killed]
    if not failed and reports[0].payload is not None:
        return None, False
    is_start = all(report.failure is not None and report.failure.kind == "LaunchError" for report in own)
    if own and not (lost and is_start):  # ranks that were waited for in vain are told as lost if they were
        return _rebuild(own, len(reports)), is_start and bool(silent)
    if stopped_by is not None and silent:
        return Interrupted(f"stopped by {stopped_by}; the ranks did not all save in time"), False
    if lost:
        return PeerError("; ".join(report.end for report in lost)), True
    if failed:
        return _rebuild(failed[:1], len(reports)), True
    if silent:
        names = ", ".join(str(report.rank) for report in silent)
        return PeerError(f"rank {names} did not end, and was killed"), True
    return None, False


def _rebuild(failed: Sequence[Report], num_ranks: int) -> BaseException:
    """The error of the first rank that was not merely asked to stop, in the class that it had there.

    One that only the rank knows becomes a PeerError. The rank is named, unless all ranks say the same.
    """
    told = [(report.rank, report.failure) for report in failed if report.failure is not None]
    rank, failure = next(((rank, failure) for rank, failure in told if not failure.is_stop), told[0])
    is_shared = num_ranks > 1 and [each.text for _, each in told] == [failure.text] * num_ranks
    prefix = "" if is_shared or failure.is_peer or failure.is_stop else f"rank {rank}: "
    error = _of_class(failure.kind, prefix, failure.text)
    error.add_note(f"In rank {rank}:\n{failure.trace}")
    return error


def _of_class(kind: str, prefix: str, text: str) -> BaseException:
    known = getattr(errors, kind, None) if kind in errors.__all__ else getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        if issubclass(known, SystemExit):
            return LaunchError(f"{prefix}left by sys.exit({text})")
        try:
            return known(f"{prefix}{text}")
        except TypeError:  # wants more than a message
            pass
    return PeerError(f"{prefix}{kind}: {text}")
