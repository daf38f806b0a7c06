"""Commands in the hosts: starting them, copying their output, waiting for them, and noting signals meanwhile.

Signal handlers only note what came; the steps look between them. So nothing is interrupted half-way, and what was started is
always known to the part that ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.lab.network import NAME, NAMESPACES, LabError, Network

__all__ = [
    "InterruptError",
    "adopt_orphans",
    "check_signals",
    "collect_orphans",
    "enter",
    "exit_code",
    "note_signals",
    "noted",
    "start_beside",
    "start_ranks",
    "wait",
]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lab"
CLONE_NEWUTS = 0x04000000
PR_SET_CHILD_SUBREAPER = 36

noted: list[int] = []  # signals received, first to last


class InterruptError(Exception):
    """A signal asked the lab to end."""


def note_signals() -> None:
    """Note SIGINT, SIGTERM and SIGHUP instead of dying of them; nohup keeps its meaning."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda received, _: noted.append(received))


def check_signals() -> None:
    """Raise InterruptError when a signal has come."""
    if noted:
        raise InterruptError


def adopt_orphans() -> None:
    """Daemons that a command leaves become the lab's children, so that it can collect them when they have ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def collect_orphans() -> None:
    """Collect what has ended; the lab's own children must have been waited for before."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def enter(host: str, command: list[str]) -> None:
    """Become ``command`` inside a host, under the host's own name (host-<k>). Does not return."""
    match = NAME.fullmatch(host)
    if not match or not (NAMESPACES / host).exists():
        raise LabError(f"no host {host!r}: give the value of LAB_HOST_<k> of a lab that is running")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise LabError(f"cannot give the host its own name: {os.strerror(ctypes.get_errno())}")
    socket.sethostname(f"host-{match[4]}")
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that
        signal.signal(signum, signal.SIG_DFL)
    os.execvp("ip", ["ip", "netns", "exec", host, *command])


def _copy_lines(rank: int, process: subprocess.Popen[bytes], lock: threading.Lock) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            try:
                with lock:
                    sys.stdout.buffer.write(b"[%d] %s\n" % (rank, line.rstrip(b"\r\n")))
                    sys.stdout.buffer.flush()
            except BrokenPipeError:  # nobody reads us any more
                noted.append(signal.SIGPIPE)
                return


def start_ranks(
    network: Network,
    command: list[str],
    environment: dict[str, str],
    port: int,
    leaders: list[subprocess.Popen[bytes]],
    num_ranks: int,
) -> list[threading.Thread]:
    """``command`` in the first hosts, each the leader of a session, added to ``leaders``; returns the output's copiers."""
    shared = environment | {
        **_told(network),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": network.addresses[0],
        "MASTER_PORT": str(port),
        "POLYHOP_TRAFFIC_DIR": str(network.folder),
        "GLOO_SOCKET_IFNAME": "eth0",  # otherwise both would look up the host's name
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    shared.setdefault("PYTHONUNBUFFERED", "1")
    lock, copiers = threading.Lock(), []
    for k, host in enumerate(network.hosts[:num_ranks]):
        check_signals()
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "exec", host, "--", *command],
            env=shared | {"RANK": str(k)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        leaders.append(process)
        copiers.append(threading.Thread(target=_copy_lines, args=(k, process, lock), daemon=True))
        copiers[-1].start()
    return copiers


def start_beside(
    network: Network, command: list[str], environment: dict[str, str], leaders: list[subprocess.Popen[bytes]]
) -> None:
    """``command`` once, in the machine's own network, told where the hosts are."""
    leaders.append(subprocess.Popen(command, env=environment | _told(network), start_new_session=True))


def _told(network: Network) -> dict[str, str]:
    """Where the hosts are, as commands find it in their environment."""
    told = {"LAB": str(SCRIPT), "LAB_NUM_HOSTS": str(len(network.hosts))}
    for k, (host, address) in enumerate(zip(network.hosts, network.addresses)):
        told |= {f"LAB_HOST_{k}": host, f"LAB_ADDRESS_{k}": address}
    return told


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As a shell gives it: 128 + the signal where a signal ended the process; None while it runs."""
    code = process.poll()
    return code if code is None or code >= 0 else 128 - code


def wait(leaders: list[subprocess.Popen[bytes]], timeout_s: float | None, grace_s: float) -> tuple[int, str]:
    """Until all are done, or one has failed and ``grace_s`` has passed, or ``timeout_s`` has: exit code, and why.

    Raises InterruptError when a signal came.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    code, why, until = 0, "", float("inf")
    while True:
        check_signals()
        codes = [exit_code(process) for process in leaders]
        failed = next(((k, found) for k, found in enumerate(codes) if found), None)
        if failed and not code:
            code, why = failed[1], f"rank {failed[0]} failed with exit code {failed[1]}"
            until = time.monotonic() + grace_s
        if None not in codes or time.monotonic() >= until:
            return code, why
        if deadline is not None and time.monotonic() >= deadline:
            running = ", ".join(str(k) for k, found in enumerate(codes) if found is None)
            return (
                (code, why)
                if code
                else (124, f"--timeout {timeout_s:g} s passed; still running: rank {running}")
            )
        time.sleep(0.02)
