"""Ranks as processes of this host, started and watched by this process.

The parent hosts the store on the loopback and waits. What a rank returns or raises comes back through a pipe of its own; a
rank that ends without either was lost. Signals to stop go to the parent, which passes them on and gives the ranks time to
save. However this ends, no process stays: the parent kills what is left (also what was stopped), and a rank dies with its
parent even if that is killed (PR_SET_PDEATHSIG, and a thread that watches it).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from types import FrameType
from typing import TYPE_CHECKING, Any

from polyhop.errors import Interrupted, LaunchError, PeerError
from polyhop.launch.options import Launch, RankFunction
from polyhop.launch.outcome import Report, failure_of, run_attempts
from polyhop.launch.rank import Seat, run_rank

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

__all__ = ["run_local"]

_HOST = "127.0.0.1"
_STOPS = (signal.SIGTERM, signal.SIGINT)
_AFTER_LOSS_S = 10.0  # for the others to be told, say their last words and end
_LAST_LEFT_S = 2.0  # for the only one left, which the others have given up: most likely it was stopped
_AFTER_RESULT_S = 15.0  # for an interpreter to shut down
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def run_local(fn: RankFunction, args: Sequence[Any], options: Launch) -> Any:
    """Run ``fn`` on ``num_ranks`` processes; the result of rank 0. Starts all again after a loss, if asked to."""
    work = _pack(fn, args)
    payload = run_attempts(lambda number: _Ranks(work, options, number), options.max_restarts)
    return pickle.loads(payload)


def _pack(fn: RankFunction, args: Sequence[Any]) -> bytes:
    """Plain pickle, so that tensors travel by value and no shared memory is left behind."""
    main = sys.modules.get("__main__")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            "ranks cannot be started while a module is imported: put the code that starts them under "
            "if __name__ == '__main__':"
        )
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
        raise LaunchError(
            f"other processes cannot find {getattr(fn, '__name__', fn)!r}: define it in a file, not in a session"
        )
    try:
        return pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"what ranks run must be a function of a module's top level, with arguments that can be pickled: {error}"
        ) from error


class _Rank(Report):
    """One process, as the parent sees it."""

    def __init__(self, rank: int, process: SpawnProcess, pipe: connection.Connection) -> None:
        super().__init__(rank)
        self.process, self.pipe = process, pipe

    @property
    def is_running(self) -> bool:
        return self.process.pid is not None and self.process.exitcode is None

    def hear(self) -> None:
        """Take its report, if there is one."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                kind, value = pickle.loads(self.pipe.recv_bytes())
                if kind == "result":
                    self.payload = value
                elif self.failure is None:
                    self.failure = value

    def bury(self) -> None:
        """Its process has ended."""
        self.hear()
        self.pipe.close()
        self.is_over = True
        code = self.process.exitcode or 0
        how = (
            f"was killed by {_signal_name(-code)}" if code < 0 else f"ended without a word (exit code {code})"
        )
        if code == -signal.SIGKILL:
            how += ": by someone, or by the system for want of memory"
        self.end = f"rank {self.rank} (pid {self.process.pid}) {how}"


class _Ranks:
    """All processes of one attempt."""

    def __init__(self, work: bytes, options: Launch, attempt: int) -> None:
        self.work, self.options, self.attempt = work, options, attempt
        self.ranks: list[_Rank] = []
        self.stopped_by: str | None = None
        self._deadline = float("inf")

    @property
    def reports(self) -> Sequence[Report]:
        return self.ranks

    def run(self) -> None:
        from polyhop.comm.store import host_store

        store = host_store(_HOST, 0)
        before = self._catch_signals()
        try:
            self._start(store.port)
            while any(not rank.is_over for rank in self.ranks):
                self._watch()
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)
            del store

    def _start(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        num_ranks = self.options.num_ranks or 1
        resource_tracker.ensure_running()  # it would unblock the signals below
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # a rank takes them when it is ready to
        try:
            for number in range(num_ranks):
                seat = Seat(
                    number,
                    num_ranks,
                    local_rank=number,
                    num_local=num_ranks,
                    host=_HOST,
                    port=port,
                    attempt=self.attempt,
                )
                ours, theirs = context.Pipe(duplex=False)
                target = (seat, self.options, self.work, theirs)
                process = context.Process(target=_be_rank, args=target, name=f"polyhop-rank-{number}")
                self.ranks.append(_Rank(number, process, ours))
                process.start()
                theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _catch_signals(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._pass_on) for number in _STOPS}

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """The first one gives time to save, the second little, the third none."""
        allowed_s = self.options.stop_timeout_s if self.stopped_by is None else _LAST_LEFT_S
        if self.stopped_by is not None and self._deadline - time.monotonic() < _LAST_LEFT_S:
            allowed_s = 0.0
        self._deadline = min(self._deadline, time.monotonic() + allowed_s)
        self.stopped_by = _signal_name(number)
        for rank in self.ranks:
            if rank.is_running and rank.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def _watch(self) -> None:
        """Wait for a report or an end; after a failure, or a signal, not for ever."""
        waiting = [rank for rank in self.ranks if not rank.is_over]
        ready: list[Any] = [rank.process.sentinel for rank in waiting]
        ready += [rank.pipe for rank in waiting if not rank.has_spoken]
        connection.wait(ready, timeout=0.5)
        for rank in waiting:
            if rank.is_running:
                rank.hear()
            else:
                rank.bury()
        self._limit()
        if time.monotonic() >= self._deadline:
            self._kill()

    def _limit(self) -> None:
        """Once the end is certain, the rest must follow in time."""
        left = [rank for rank in self.ranks if not rank.is_over]
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        is_lost = any(rank.is_over and not rank.has_spoken for rank in self.ranks)
        allowed_s = float("inf")
        if is_lost or any(not failure.is_stop for failure in failures):
            allowed_s = _LAST_LEFT_S if len(left) == 1 and not left[0].has_spoken else _AFTER_LOSS_S
        elif any(rank.payload is not None for rank in self.ranks):  # so all have done their work
            allowed_s = max(_AFTER_RESULT_S, self.options.peer_timeout_s)
            if all(rank.has_spoken for rank in self.ranks):
                allowed_s = _AFTER_RESULT_S
        elif failures:
            allowed_s = self.options.stop_timeout_s
        self._deadline = min(self._deadline, time.monotonic() + allowed_s)

    def _kill(self) -> None:
        """End what is left, also what was stopped, and take its report if it made one."""
        for rank in self.ranks:
            if rank.is_running:
                rank.is_killed = True
                rank.process.kill()
        for rank in self.ranks:
            if rank.process.pid is not None:
                rank.process.join()
            if not rank.is_over:
                rank.bury()


# Inside a rank


def _be_rank(seat: Seat, options: Launch, work: bytes, pipe: connection.Connection) -> None:
    """Target of the child process."""
    _die_with_parent()
    os.setpgid(0, 0)  # Ctrl-C in the terminal goes to the parent alone, which passes it on once
    for number in _STOPS:
        signal.signal(number, _interrupt)
    report = _Reporter(pipe)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        fn, args = pickle.loads(work)
        del work
        result = run_rank(seat, options, fn, args, last_word=report.peer_lost)
        report.send("result", pickle.dumps(result) if seat.rank == 0 else b"")
    except BaseException as error:
        report.send("failure", failure_of(error))
        sys.stdout.flush()
        raise SystemExit(1) from None


class _Reporter:
    """The rank's end of its pipe: its main thread, or the last words of its heartbeat, report once."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, kind: str, value: Any) -> None:
        with self._lock, suppress(OSError):  # a parent that is gone needs no report
            self._pipe.send_bytes(pickle.dumps((kind, value)))

    def peer_lost(self, text: str) -> None:
        self.send("failure", failure_of(PeerError(text)))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {_signal_name(number)}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _die_with_parent() -> None:
    """Two ways, as neither is certain: the kernel's (Linux), and a thread that waits for the parent's end."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent.pid:  # it ended before this line
        os._exit(1)
    threading.Thread(target=_follow, args=(parent.sentinel,), name="polyhop-parent", daemon=True).start()


def _follow(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
