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


def host_store(host: str, port: int) -> Any:
    """Open the store at an address of this host; port 0 takes a free one (``.port`` of what is returned tells it)."""
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
    return dist.TCPStore(
        str(where[0]), port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


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


def reach_store(host: str, port: int, patience: Patience) -> tuple[Any, str]:
    """The store that another process has opened, and the address this process reached it from."""
    phase, why = f"reach the store at {host}:{port}", "no answer"
    pause = 0.01
    while True:
        patience.wait_for(phase, f"({why})")
        try:
            with socket.create_connection((host, port), timeout=min(5.0, patience.left_s + 0.01)) as probe:
                there, here = probe.getpeername()[0], probe.getsockname()[0]
            break
        except OSError as error:
            why = _why(host, error)
        if patience.left_s == 0:
            raise LaunchError(
                f"rank {patience.rank} did not reach the store at {host}:{port} within {patience.limit_s:g} s: {why}. "
                "Check that rank 0 was started, that MASTER_ADDR and MASTER_PORT are the same on every host, and that "
                "no firewall closes the port"
            )
        time.sleep(min(pause, patience.left_s))
        pause = min(2 * pause, 1.0)

    def connect() -> Any:
        return dist.TCPStore(there, port, wait_for_workers=False, timeout=timedelta(seconds=30))

    strange = (
        f"something answers at {host}:{port}, but it is no store of this version of torch: check MASTER_PORT"
    )
    return bounded(connect, min(30.0, patience.left_s), strange), str(here)


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
