"""What happens inside a rank, however it was started. Ground of this folder.

threads and cores; the meeting; the heartbeat; the line to the others; the function; farewell.

The heartbeat is there before the line, and ends after it: whatever hangs in between is noticed. An error that only says
that a connection broke is held back until the heartbeat has told whose end it was.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.errors import Interrupted, LaunchError, PeerError, PolyhopError
from polyhop.launch.options import Launch, RankContext, RankFunction

if TYPE_CHECKING:
    from polyhop.comm import Collective
    from polyhop.comm.heartbeat import Heartbeat
    from polyhop.comm.meeting import Meeting
    from polyhop.comm.store import Patience

__all__ = ["Seat", "is_rank", "run_rank"]

_VERDICT_S = 5.0  # for the heartbeat to tell who it was, after a connection broke
_LINE_BROKE = re.compile(r"gloo|nccl|connection|broken pipe|socket", re.IGNORECASE)

_is_rank = False


@dataclass(frozen=True)
class Seat:
    """Which rank a process is, and where it meets the others."""

    rank: int
    num_ranks: int
    local_rank: int  # among the ranks of this host
    num_local: int
    host: str  # of the store
    port: int
    is_host: bool = False  # whether this rank opens the store
    has_own_store: bool = False  # whether rank 0 opens one for every run, always at this address
    attempt: int = 0
    name: str = "0"  # keeps runs on one store apart
    engine: str = "local"


def is_rank() -> bool:
    """Whether this process is running a rank's function now."""
    return _is_rank


def run_rank(
    seat: Seat,
    options: Launch,
    fn: RankFunction,
    args: Sequence[Any],
    *,
    last_word: Callable[[str], object] | None = None,
    opened: Any = None,
) -> Any:
    """Be that rank: meet the others, call ``fn``, leave. Returns what ``fn`` returned.

    ``last_word`` is told why, before this process is ended because of another rank. ``opened``: the store, where this
    process has opened it already.
    """
    global _is_rank
    if _is_rank:
        raise LaunchError(f"rank {seat.rank} cannot start ranks itself: launch.run inside a rank's function")
    _is_rank = True
    cores = _settle(seat, options)
    try:
        with _Start(seat, options, opened) as start:
            heart, comm = start.connect()
        if last_word is not None:
            tell = last_word
            heart.on_loss(lambda loss: tell(loss.text))
        return _work(seat, heart, comm, fn, args)
    finally:
        _is_rank = False
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _settle(seat: Seat, options: Launch) -> set[int] | None:
    """Threads, and cores of its own where every rank of the host can have one; the cores it had, if that changed."""
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # torch tells of every broken connection, with a backtrace
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    import torch

    torch.set_num_threads(options.threads)
    if options.backend == "nccl":
        torch.cuda.set_device(seat.local_rank)
    if not options.pin or not hasattr(os, "sched_setaffinity"):
        return None
    before = os.sched_getaffinity(0)
    each = len(before) // seat.num_local
    if seat.num_local == 1 or each < options.threads:
        return None
    own = sorted(before)[seat.local_rank * each : (seat.local_rank + 1) * each]
    with suppress(OSError):  # a container may forbid it
        os.sched_setaffinity(0, own)
    return before


class _Start:
    """The way from a process to a connected rank; what was opened is closed again if it fails half-way."""

    def __init__(self, seat: Seat, options: Launch, opened: Any) -> None:
        from polyhop.comm.store import Patience

        self.seat, self.options, self.opened = seat, options, opened
        self.patience: Patience = Patience(seat.rank, options.start_timeout_s)

    def __enter__(self) -> _Start:
        return self

    def __exit__(self, *_: object) -> None:
        self.patience.close()

    def connect(self) -> tuple[Heartbeat, Collective]:
        from polyhop.comm.heartbeat import Heartbeat
        from polyhop.comm.torch_line import join

        seat, options = self.seat, self.options
        meeting = self._meet()
        heart = Heartbeat.start(
            meeting.store,
            seat.rank,
            [str(peer) for peer in meeting.peers],
            address=meeting.address,
            timeout_s=options.peer_timeout_s,
            patience=self.patience,
        )
        self.patience.wait_for(f"connect the ranks: {options.backend}, from {meeting.address} to every peer")
        try:
            comm = join(
                meeting.store,
                seat.rank,
                seat.num_ranks,
                backend=options.backend,
                latency_s=options.latency_s,
                start_timeout_s=max(self.patience.left_s, 1.0),
                address=meeting.address,
            )
        except BaseException as error:
            raise _farewell(heart, error) from error
        return heart, comm

    def _meet(self) -> Meeting:
        from polyhop.comm.meeting import meet
        from polyhop.comm.store import host_store, reach_store

        seat = self.seat
        run = seat.name if seat.has_own_store else None
        if seat.is_host and self.opened is None:
            self.opened = host_store(seat.host, seat.port, run)
        port = seat.port if self.opened is None else self.opened.port
        store, address = reach_store(seat.host, port, self.patience, run)
        return meet(
            store if self.opened is None else self.opened,
            seat.rank,
            seat.num_ranks,
            where=f"{seat.host}:{port}",
            address=address,
            patience=self.patience,
            is_host=self.opened is not None,
            name=seat.name,
            agreed=self.options.agreed,
        )


def _work(seat: Seat, heart: Heartbeat, comm: Collective, fn: RankFunction, args: Sequence[Any]) -> Any:
    context = RankContext(
        comm, seat.attempt, seat.engine, lambda last_word: heart.on_loss(lambda _: last_word())
    )
    try:
        result = fn(context, *args)
        _write_traffic(comm)
        comm.barrier()  # nobody leaves before all are done: a rank that is lost until then is noticed by all
        comm.close()
    except BaseException as error:
        told = _farewell(heart, error)
        try:
            if told is error:
                raise
            raise told from error
        finally:
            del told  # it holds this frame, this frame would hold it, and with it every socket of the run
    heart.goodbye()
    return result


def _farewell(heart: Heartbeat, error: BaseException) -> BaseException:
    """Tell the others, and return the error to raise: if another rank was lost or failed first, that is the cause."""
    if isinstance(error, Interrupted):
        heart.goodbye()  # not a fault: others may still be saving
        return error
    is_own = isinstance(error, PolyhopError) and not isinstance(error, PeerError | LaunchError)
    if not is_own and isinstance(error, Exception):
        loss = heart.loss(_VERDICT_S if _LINE_BROKE.search(str(error)) else 0.2)
        if loss is not None:
            error = PeerError(loss.text)
    heart.fail(f"{type(error).__name__}: {error}")
    return error


def _write_traffic(comm: Collective) -> None:
    """For the lab: what this rank sent, where POLYHOP_TRAFFIC_DIR asks for it."""
    folder = os.environ.get("POLYHOP_TRAFFIC_DIR")
    if folder:
        path = Path(folder) / f"rank-{comm.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rank": comm.rank, **comm.traffic.to_json()}), encoding="utf-8")
