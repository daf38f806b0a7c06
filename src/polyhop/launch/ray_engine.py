"""Ranks as actors of a Ray placement group: the same ranks, on whichever hosts the cluster has room.

An existing cluster is used where RAY_ADDRESS names one, or the program has called ray.init; else a local one is started, and
shut down afterwards. Rank 0's actor opens the store at the address of its host. What a rank says before its heartbeat ends
it goes to a small actor, as the process itself can no longer answer.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from polyhop.errors import Interrupted, LaunchError, PeerError, UnsupportedError
from polyhop.launch.options import Launch, RankFunction
from polyhop.launch.outcome import Failure, Report, failure_of, run_attempts
from polyhop.launch.rank import Seat, run_rank

__all__ = ["run_ray"]

_AFTER_LOSS_S = 15.0
_STOPS = (signal.SIGTERM, signal.SIGINT)


def run_ray(fn: RankFunction, args: Sequence[Any], options: Launch) -> Any:
    """Run ``fn`` on ``num_ranks`` actors; the result of rank 0. Starts all again after a loss, if asked to."""
    try:
        import ray
        from ray import cloudpickle

        pack: Callable[[Any], bytes] = cloudpickle.dumps
    except ImportError as error:
        raise UnsupportedError(
            "engine 'ray' needs Ray: pip install 'polyhop[ray]', on every host of the cluster"
        ) from error
    with _cluster(ray, options) as is_own:
        work = pack((fn, tuple(args)))
        payload = run_attempts(
            lambda number: _Actors(ray, work, options, number, is_own), options.max_restarts
        )
        return pickle.loads(payload)


@contextmanager
def _cluster(ray: Any, options: Launch) -> Iterator[bool]:
    """A connection to a cluster; True if it is a local one of our own."""
    if ray.is_initialized():
        yield False
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        try:
            ray.init(address=address, log_to_driver=True)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise LaunchError(f"no Ray cluster at RAY_ADDRESS={address}: {error}") from error
    else:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cores = max(os.cpu_count() or 1, (options.num_ranks or 1) * options.threads)
        ray.init(address="local", num_cpus=cores, include_dashboard=False, logging_level="ERROR")
    try:
        yield not address
    finally:
        ray.shutdown()


class _Board:
    """An actor that keeps what ranks said before they were ended."""

    def __init__(self) -> None:
        self._said: dict[int, Failure] = {}

    def tell(self, rank: int, failure: Failure) -> None:
        self._said[rank] = failure

    def said(self) -> dict[int, Failure]:
        return self._said


class _RankActor:
    """The process of one rank."""

    def __init__(self, path: Sequence[str]) -> None:
        sys.path[:] = [*sys.path, *(entry for entry in path if entry not in sys.path)]
        self._store: Any = None

    def where(self) -> tuple[str, int]:
        """The host (Ray's id) and the process."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def open(self) -> tuple[str, int]:
        """Open the store on a free port of this host."""
        import ray

        from polyhop.comm.store import host_store

        address_of_host: Callable[[], str] = ray.util.get_node_ip_address
        host = address_of_host()
        self._store = host_store(host, 0)
        return host, self._store.port

    def work(
        self, seat: Seat, options: Launch, work: bytes, board: Any
    ) -> tuple[bytes | None, Failure | None]:
        """Be the rank; its result or its error."""
        import ray

        def last_word(text: str) -> None:
            ray.get(board.tell.remote(seat.rank, failure_of(PeerError(text))), timeout=3)

        before = {number: signal.signal(number, _interrupt) for number in _STOPS}
        try:
            fn, args = pickle.loads(work)
            result = run_rank(seat, options, fn, args, last_word=last_word, opened=self._store)
            return pickle.dumps(result) if seat.rank == 0 else b"", None
        except BaseException as error:
            return None, failure_of(error)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def _send_signal(pid: int, number: int) -> None:
    """Runs on the host of that process."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


class _Actors:
    """All actors of one attempt."""

    def __init__(self, ray: Any, work: bytes, options: Launch, attempt: int, is_own: bool) -> None:
        self.ray, self.work, self.options, self.attempt = ray, work, options, attempt
        self.is_own = is_own
        self.num_ranks = options.num_ranks or 1
        self.reports = [Report(rank) for rank in range(self.num_ranks)]
        self.stopped_by: str | None = None
        self._asked_to_stop = threading.Event()
        self._actors: list[Any] = []
        self._places: list[tuple[str, int]] = []
        self._deadline = float("inf")

    def run(self) -> None:
        group = self._reserve()
        before = self._catch_signals()
        try:
            board = self.ray.remote(_Board).options(num_cpus=0).remote()
            running = self._start(group, board)
            while running:
                running = self._watch(running)
            self._hear_last_words(board)
            self.ray.kill(board)
        finally:
            self._kill()
            self.ray.util.remove_placement_group(group)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _reserve(self) -> Any:
        """Room for all ranks at once, or an error that says how much there is."""
        gpus = {"GPU": 1} if self.options.backend == "nccl" else {}
        bundle = {"CPU": self.options.threads, **gpus}
        group = self.ray.util.placement_group(
            [bundle] * self.num_ranks, strategy=self.options.placement.upper()
        )
        until = time.monotonic() + self.options.start_timeout_s
        has_spoken = False
        while not group.wait(5):
            free = {name: n for name, n in self.ray.available_resources().items() if name in ("CPU", "GPU")}
            wanted = f"{self.num_ranks} ranks of {bundle}; the cluster has {free} free"
            if time.monotonic() >= until:
                self.ray.util.remove_placement_group(group)
                raise LaunchError(
                    f"Ray found no room for {wanted} within {self.options.start_timeout_s:g} s: ask for fewer ranks or "
                    "threads, or add hosts"
                )
            if not has_spoken:
                print(f"polyhop: waits for Ray to make room for {wanted}", file=sys.stderr, flush=True)
                has_spoken = True
        return group

    def _start(self, group: Any, board: Any) -> dict[Any, int]:
        """Ranks at work: reference -> rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        path = sys.path if self.is_own else []
        for rank in range(self.num_ranks):
            made = self.ray.remote(_RankActor).options(
                num_cpus=self.options.threads,
                num_gpus=1 if self.options.backend == "nccl" else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
            )
            self._actors.append(made.remote(path))
        try:
            self._places = self.ray.get(
                [actor.where.remote() for actor in self._actors], timeout=self.options.start_timeout_s
            )
            host, port = self.ray.get(self._actors[0].open.remote(), timeout=self.options.start_timeout_s)
        except self.ray.exceptions.RayError as error:
            raise LaunchError(f"Ray did not start all {self.num_ranks} ranks: {error}") from error
        seats = [self._seat(rank, host, port) for rank in range(self.num_ranks)]
        options = self.options if self.is_own else _unpinned(self.options)
        return {
            actor.work.remote(seat, options, self.work, board): seat.rank
            for actor, seat in zip(self._actors, seats)
        }

    def _seat(self, rank: int, host: str, port: int) -> Seat:
        nodes = [node for node, _ in self._places]
        return Seat(
            rank,
            self.num_ranks,
            local_rank=nodes[:rank].count(nodes[rank]),
            num_local=nodes.count(nodes[rank]),
            host=host,
            port=port,
            is_host=rank == 0,
            attempt=self.attempt,
            engine="ray",
        )

    def _watch(self, running: dict[Any, int]) -> dict[Any, int]:
        """Wait for a report or an end; after a failure, or a signal, not for ever."""
        done, _ = self.ray.wait(list(running), num_returns=1, timeout=0.5)
        for reference in done:
            report = self.reports[running[reference]]
            report.is_over = True
            try:
                report.payload, report.failure = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                pid = self._places[report.rank][1]
                report.end = (
                    f"rank {report.rank} (pid {pid}) ended without a word (Ray: {_first_line(error)})"
                )
        if self._asked_to_stop.is_set():
            self._asked_to_stop.clear()
            self._signal(signal.SIGTERM)
            self._deadline = min(self._deadline, time.monotonic() + self.options.stop_timeout_s)
        is_failed = any(r.is_over and r.payload is None and not _is_stop(r) for r in self.reports)
        if is_failed:
            self._deadline = min(self._deadline, time.monotonic() + _AFTER_LOSS_S)
        elif any(report.payload is not None for report in self.reports):  # so all have done their work
            allowed_s = max(_AFTER_LOSS_S, self.options.peer_timeout_s)
            self._deadline = min(self._deadline, time.monotonic() + allowed_s)
        if time.monotonic() >= self._deadline:
            self._kill()
            return {}
        return {reference: rank for reference, rank in running.items() if reference not in done}

    def _catch_signals(self) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._note) for number in _STOPS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            self._deadline = 0.0
        self.stopped_by = signal.Signals(number).name
        self._asked_to_stop.set()

    def _signal(self, number: int) -> None:
        """To every rank that is at work, from a task on its own host."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        sent = []
        for report, (node, pid) in zip(self.reports, self._places):
            if not report.is_over:
                where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
                task = self.ray.remote(_send_signal).options(
                    num_cpus=0, scheduling_strategy=where, max_retries=0
                )
                sent.append(task.remote(pid, int(number)))
        with suppress(self.ray.exceptions.RayError):
            self.ray.get(sent, timeout=10)

    def _hear_last_words(self, board: Any) -> None:
        with suppress(self.ray.exceptions.RayError):
            for rank, failure in self.ray.get(board.said.remote(), timeout=5).items():
                if not self.reports[rank].has_spoken:
                    self.reports[rank].failure = failure

    def _kill(self) -> None:
        """End what is left; a process that was stopped hears nothing but SIGKILL."""
        self._signal(signal.SIGKILL)
        for report, actor in zip(self.reports, self._actors):
            if not report.is_over:
                report.is_over = report.is_killed = True
            with suppress(self.ray.exceptions.RayError):
                self.ray.kill(actor)


def _is_stop(report: Report) -> bool:
    return report.failure is not None and report.failure.is_stop


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _unpinned(options: Launch) -> Launch:
    """On a shared cluster, cores are not ours to choose."""
    from dataclasses import replace

    return replace(options, pin=False)
