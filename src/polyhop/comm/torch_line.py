"""Ranks as processes, over torch.distributed: gloo on CPUs, nccl on GPUs.

Everything is point to point underneath, so that what is counted is what is sent. Injected latency holds every message back
on its sender's side, in order, without holding up the sender: what a longer wire would do.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from polyhop.comm.collective import Collective
from polyhop.comm.traffic import Traffic
from polyhop.errors import LaunchError

__all__ = ["TorchCollective", "interface_towards", "join"]

_dist: Any = torch.distributed  # its stubs leave out half of what it exports
_FOREVER = timedelta(days=30)  # a lost rank is noticed by the heartbeat, never by a timer of the backend


def join(
    store: Any,
    rank: int,
    num_ranks: int,
    *,
    backend: str = "gloo",
    latency_s: float = 0.0,
    start_timeout_s: float = 300.0,
    address: str | None = None,
    name: str = "ranks",
) -> TorchCollective:
    """The first line of this rank, once all ranks of the store are connected.

    ``address``: this rank's own, on the network between the ranks; it decides which interface they meet on.
    ``name`` keeps several groups on one store apart.
    """
    if address is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(address)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    meeting = _Meeting(store, rank, num_ranks, backend, start_timeout_s, name, latency_s)
    if address is not None:
        meeting.address = address
    return TorchCollective(meeting, Traffic())


class _Meeting:
    """What every further line of a rank needs to be opened."""

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        backend: str,
        start_timeout_s: float,
        name: str,
        latency_s: float,
    ) -> None:
        self.store, self.rank, self.num_ranks, self.backend = store, rank, num_ranks, backend
        self.start_timeout_s, self.name, self.latency_s = start_timeout_s, name, latency_s
        self.lines, self.address = 0, Collective.address

    def open(self) -> Any:
        """A new group of processes, without torch's global one: a program may have that for itself."""
        store = _dist.PrefixStore(f"{self.name}/line-{self.lines}", self.store)
        self.lines += 1
        timeout = timedelta(seconds=self.start_timeout_s)
        try:
            if self.backend == "nccl":
                options = _dist.ProcessGroupNCCL.Options()
                return _dist.ProcessGroupNCCL(store, self.rank, self.num_ranks, options)
            return _dist.ProcessGroupGloo(store, self.rank, self.num_ranks, timeout)
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self.rank} of {self.num_ranks} cannot connect to the others over {self.backend}: "
                f"{str(error).splitlines()[0]}"
            ) from error


class TorchCollective(Collective):
    """One line of one process; every line has a group of its own."""

    def __init__(self, meeting: _Meeting, traffic: Traffic) -> None:
        self._meeting, self.rank, self.num_ranks = meeting, meeting.rank, meeting.num_ranks
        self._is_nccl = meeting.backend == "nccl"
        self.has_tags = not self._is_nccl
        current = torch.cuda.current_device() if self._is_nccl else 0
        self.device = torch.device("cuda", current) if self._is_nccl else torch.device("cpu")
        self.traffic, self.address = traffic, meeting.address
        self._group: Any = meeting.open() if meeting.num_ranks > 1 else None
        self._delay = _DelayLine(meeting.latency_s) if meeting.latency_s > 0 else None

    def fork(self) -> TorchCollective:
        return TorchCollective(self._meeting, self.traffic)

    def close(self) -> None:
        if self._delay is not None:
            self._delay.close()
        self._group = None

    def _post(
        self, send: Sequence[Tensor | None], receive: Sequence[Tensor | None], tag: int = 0
    ) -> Callable[[], None]:
        arriving = [(False, piece, q) for q, piece in enumerate(receive) if piece is not None]
        leaving = [(True, piece, q) for q, piece in enumerate(send) if piece is not None]
        late: Callable[[], list[_Work]] = list
        if self._delay is None:
            begun = self._begin([*arriving, *leaving], tag)
        else:
            begun = self._begin(arriving, tag)
            if leaving:
                late = self._delay.put(lambda: self._begin(leaving, tag))

        def finish() -> None:
            for work in [*begun, *late()]:
                work.wait()

        return finish

    def _begin(self, operations: Sequence[tuple[bool, Tensor, int]], tag: int) -> list[_Work]:
        """Begin each (is it a send, tensor, peer)."""
        if not operations:
            return []
        group = self._group
        if self._is_nccl:
            _dist.ProcessGroupNCCL._group_start()
        begun = [(group.send if sends else group.recv)([piece], q, tag) for sends, piece, q in operations]
        if self._is_nccl:
            _dist.ProcessGroupNCCL._group_end()
        return [_Work(work, piece) for work, (_, piece, _) in zip(begun, operations, strict=True)]


class _Work:
    """A send or receive under way. Holds its tensor: the backend reads or writes it where it lies."""

    def __init__(self, work: Any, piece: Tensor) -> None:
        self._work, self._piece = work, piece

    def wait(self) -> None:
        self._work.wait(_FOREVER)


_Delayed = tuple[float, Callable[[], list[_Work]], "queue.SimpleQueue[list[_Work] | BaseException]"]


class _DelayLine:
    """Runs what is put into it in order, each no earlier than ``latency_s`` after it was put."""

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self._queue: queue.SimpleQueue[_Delayed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="polyhop-latency", daemon=True)
        self._thread.start()

    def put(self, begin: Callable[[], list[_Work]]) -> Callable[[], list[_Work]]:
        """Begin it later; the call that is returned waits until it has begun."""
        begun: queue.SimpleQueue[list[_Work] | BaseException] = queue.SimpleQueue()
        self._queue.put((time.monotonic() + self.latency_s, begin, begun))

        def wait() -> list[_Work]:
            result = begun.get()
            if isinstance(result, BaseException):
                raise result
            return result

        return wait

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            due, begin, begun = item
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                begun.put(begin())
            except BaseException as error:  # belongs to whoever waits
                begun.put(error)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def interface_towards(address: str) -> str | None:
    """Name of the network interface that packets to the address leave by; None where it cannot be told."""
    try:
        family = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))  # sends nothing: only asks for a route
            local = probe.getsockname()[0]
    except OSError:
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == local), None)


def _address_of(interface: str) -> str | None:
    """IPv4 address of an interface."""
    try:
        import fcntl

        ask_address = 0x8915  # SIOCGIFADDR
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), ask_address, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(answer[20:24])
