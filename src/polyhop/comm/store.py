"""The torch TCPStore that ranks meet at: opened on one address of one host, reached from the others, with errors to act on.

Ground of this folder. No call to the store is trusted to return: torch's own waits for a peer that is not a store, or that
was stopped, have no end. ``Patience`` says on standard error what a slow start waits for.
"""

from __future__ import annotations

import errno
import ipaddress
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed

from polyhop.errors import LaunchError

__all__ = ["Patience", "bounded", "host_store", "is_loopback", "reach_store"]

T = TypeVar("T")
dist: Any = torch.distributed  # its stubs leave out half of what it exports

_SAY_AFTER_S = (5.0, 15.0, 30.0, 60.0)  # then every minute
_ALWAYS_HERE = ("localhost", "127.0.0.1", "::1")
_RUN = "polyhop/run"  # key: the run that a store was opened for
_CONNECT_S = 5.0  # for torch to connect to what listened a moment ago, and may be gone
_MOST_BROKEN = 5  # times that it could not: more is not a store that has just ended


class Patience:
    """How long a start may take, and what it waits for at the moment; says so on standard error when it takes a while."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self.rank, self.limit_s = rank, limit_s
        self._until = time.monotonic() + limit_s
        self._phase, self._text, self._since = "", "", time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="polyhop-patience", daemon=True)
        self._thread.start()

    def wait_for(self, phase: str, detail: str = "") -> None:
        """Name what is waited for ("rank 1 waits to ..."); another detail of the same phase does not restart its clock."""
        text = f"{phase} {detail}".strip()
        if phase != self._phase:
            self._since = time.monotonic()
        self._phase, self._text = phase, text

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _speak(self) -> None:
        phase, said = "", 0
        while not self._done.wait(0.2):
            if self._phase != phase:
                phase, said = self._phase, 0
            due = _SAY_AFTER_S[said] if said < len(_SAY_AFTER_S) else 60.0 * (said - len(_SAY_AFTER_S) + 2)
            if phase and time.monotonic() - self._since >= due:
                said += 1
                line = f"polyhop: rank {self.rank} waits to {self._text}; gives up in {self.left_s:.0f} s"
                print(line, file=sys.stderr, flush=True)


def host_store(host: str, port: int, run: str | None = None) -> Any:
    """Open the store at an address of this host; port 0 takes a free one (``.port`` of what is returned tells it).

    ``run``: name of the one run it is for, which ``reach_store`` can ask for.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError(
            f"cannot open the meeting at {host}:{port}: the name does not resolve ({error}): check MASTER_ADDR"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A name that means the loopback here (127.0.1.1 in /etc/hosts) means a network address to the other hosts.
        is_only_here = host in _ALWAYS_HERE or not is_loopback(str(where[0]))
        listener.bind((where[0] if is_only_here else "", *where[1:]))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(_cannot_listen(host, port, error)) from error
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        str(where[0]), port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    if run is not None:
        store.set(_RUN, run)
    return store


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    at = f"cannot open the meeting at {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{at}: port {port} is busy, another program listens there: choose another port (MASTER_PORT, or "
            "torchrun --master-port; 0 takes a free one), and see that only one process was started as rank 0"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{at}: {host} is no address of this host ({socket.gethostname()}): MASTER_ADDR must name the host that "
            "rank 0 runs on, the same on every host"
        )
    return f"{at}: {error}"


def reach_store(host: str, port: int, patience: Patience, run: str | None = None) -> tuple[Any, str]:
    """The store that another process has opened, and the address this process reached it from.

    ``run``: only the store of that run will do. Where every run opens its own at the same address, the one before may still
    be there when this process comes, and end a moment later: it is waited out.
    """
    phase, why = f"reach the store at {host}:{port}", "no answer"
    pause, num_broken = 0.01, 0
    while True:
        patience.wait_for(phase, f"({why})")
        try:
            there, here = _knock(host, port, patience.left_s)
            store = _connect(there, port, f"{host}:{port}", patience.left_s)
            found = run if run is None else _run_of(store)
            if found == run:
                return store, here
            of = "no run yet" if found is None else f"run {found}"
            why = f"the store there is of {of}, not of run {run}"
        except OSError as error:
            why = _why(host, error)
        except _BrokenError as error:
            num_broken += 1
            why = str(error)
            if num_broken > _MOST_BROKEN:
                raise LaunchError(why) from error
        if patience.left_s == 0:
            raise LaunchError(
                f"rank {patience.rank} did not reach the store at {host}:{port} within {patience.limit_s:g} s: {why}. "
                "Check that rank 0 was started, that MASTER_ADDR and MASTER_PORT are the same on every host, and that "
                "no firewall closes the port"
            )
        time.sleep(min(pause, patience.left_s))
        pause = min(2 * pause, 1.0)


class _BrokenError(LaunchError):
    """A connection to something that ended, or hung up, half-way."""


def _knock(host: str, port: int, left_s: float) -> tuple[str, str]:
    """Addresses of both ends of a connection to whatever listens there."""
    with socket.create_connection((host, port), timeout=min(5.0, left_s + 0.01)) as probe:
        there, here = probe.getpeername(), probe.getsockname()
    if there == here:  # where nobody listens, TCP may connect a port to itself
        raise ConnectionRefusedError
    return str(there[0]), str(here[0])


def _connect(there: str, port: int, where: str, left_s: float) -> Any:
    """A client of the store there."""

    def connect() -> Any:
        store = dist.TCPStore(there, port, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
        store.set_timeout(timedelta(seconds=30))
        return store

    strange = f"something answers at {where}, but it is no store of this version of torch: check MASTER_PORT"
    try:
        return bounded(connect, min(30.0, left_s), strange)
    except LaunchError as error:
        if error.__cause__ is None:  # it never answered
            raise
        raise _BrokenError(str(error)) from error


def _run_of(store: Any) -> str | None:
    """The run that the store was opened for; None where it does not say, or ended while it was asked."""
    try:
        if not bounded(lambda: store.check([_RUN]), 5.0, "no answer"):
            return None
        return bytes(bounded(lambda: store.get(_RUN), 5.0, "no answer")).decode(errors="replace")
    except LaunchError:
        return None


def _why(host: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} does not resolve ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there yet"
    return "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)


def bounded(call: Callable[[], T], limit_s: float, otherwise: str) -> T:
    """The result of a native call that may never return; after the limit it is left behind in its thread."""
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=ask, name="polyhop-store", daemon=True).start()
    try:
        result, error = answer.get(timeout=max(limit_s, 0.1))
    except queue.Empty:
        raise LaunchError(otherwise) from None
    if isinstance(error, RuntimeError):
        raise LaunchError(f"{otherwise} ({str(error).splitlines()[0]})") from error
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:
        return False
