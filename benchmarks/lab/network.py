"""Hosts and the switch between them: network namespaces, veth links limited by token buckets, and their removal.

The switch has a namespace of its own, so the machine's own network is never touched. Every name carries the pid of the lab
that made it, when that process started and a random tag: what a killed lab left behind can be told from a living one's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["ETC", "NAME", "NAMESPACES", "LabError", "Network", "clean", "end_processes", "ip", "start_of"]

NAMESPACES, ETC = (
    Path("/var/run/netns"),
    Path("/etc/netns"),
)  # `ip netns`: its handles, and its hosts' /etc files
NAME = re.compile(
    r"(polyhop-lab-(\d+)-(\d+)-[0-9a-f]{6})(?:-(\d+|switch))?"
)  # pid, its start, tag; then which host
BUCKET_S = 256e-6  # how long a link may be idle and then make up for it: 32 kB at 1 Gbit/s
LARGEST_BURST_BYTES, LEAST_BURST_BYTES = 32_000, 12_000  # a larger bucket flatters small messages
QUEUE_S, LEAST_QUEUE_BYTES = 0.020, 256_000  # what a port holds before it drops
END_S = 3.0  # between SIGTERM and SIGKILL


class LabError(Exception):
    """Something a person can put right; the message says what."""


def _tool(*command: str) -> str:
    """Run a tool out of reach of the terminal's Ctrl-C, and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def ip(*arguments: str) -> str:
    """What ``ip`` prints; LabError with its message when it fails."""
    return _tool("ip", *arguments)


def start_of(pid: int) -> str:
    """When a process started, in clock ticks: with its pid, a name used once. Empty when the process has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def _free_network() -> ipaddress.IPv4Network:
    """A 10.x.y.0/24 that none of the machine's routes and addresses overlap."""
    rows = json.loads(ip("-4", "-j", "route", "show", "table", "all"))
    used = [ipaddress.IPv4Network(row["dst"], strict=False) for row in rows if row["dst"] != "default"]
    for _ in range(1000):
        network = ipaddress.IPv4Network(f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}.0/24")
        if not any(network.overlaps(other) for other in used):
            return network
    raise LabError("no free 10.x.y.0/24 network: the machine's routes cover nearly all of 10.0.0.0/8")


def _processes_in(names: list[str]) -> set[int]:
    """Everything that runs in these namespaces, daemons too: only what the lab started can be there."""
    found: set[int] = set()
    for name in names:
        if (NAMESPACES / name).exists():
            with contextlib.suppress(LabError):  # half made, or just gone
                found.update(map(int, ip("netns", "pids", name).split()))
    return found


def end_processes(leaders: list[subprocess.Popen[bytes]], names: list[str]) -> None:
    """SIGTERM to the process groups of ``leaders`` and to all else in the namespaces; SIGKILL to what is left."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        told: set[int] = set()
        deadline = time.monotonic() + END_S
        while True:
            groups = {process.pid for process in leaders if process.poll() is None}
            inside = _processes_in(names)
            if not groups and not inside:
                return
            with contextlib.suppress(ProcessLookupError):
                for group in groups - told:
                    os.killpg(group, signum)
            for pid in inside - told:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(pid) not in groups:
                        os.kill(pid, signum)
            told |= groups | inside
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)


def _remove(run: str, names: list[str]) -> list[str]:
    """Remove a lab's namespaces (their interfaces go with them) and files; returns what could not be removed."""
    failures = []
    for name in names:
        shutil.rmtree(ETC / name, ignore_errors=True)
        if (NAMESPACES / name).exists():
            try:
                ip("netns", "del", name)
            except LabError as error:
                failures.append(str(error))
    with contextlib.suppress(OSError):
        ETC.rmdir()  # when empty
    shutil.rmtree(Path(tempfile.gettempdir(), run), ignore_errors=True)
    return failures


class Network:
    """``num_hosts`` hosts on one switch, each link limited to ``rate`` bits per second each way (None: not limited)."""

    def __init__(self, num_hosts: int, rate: int | None) -> None:
        self.run = f"polyhop-lab-{os.getpid()}-{start_of(os.getpid())}-{secrets.token_hex(3)}"
        self.rate = rate
        self.hosts = [f"{self.run}-{k}" for k in range(num_hosts)]
        self.switch = f"{self.run}-switch"
        self.folder = Path(tempfile.gettempdir(), self.run)
        self.addresses: list[str] = []

    def build_switch(self) -> None:
        """The lab's folder, its addresses and its bridge; hosts come one at a time with ``add_host``."""
        self.folder.mkdir(mode=0o700)
        network = _free_network()
        self.addresses = [str(network[k + 1]) for k in range(len(self.hosts))]
        ip("netns", "add", self.switch)
        bridge = ["type", "bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"]
        ip("-n", self.switch, "link", "add", "bridge", *bridge)
        ip("-n", self.switch, "link", "set", "bridge", "up")

    def add_host(self, k: int) -> None:
        """Host k: a namespace with ``lo``, a limited ``eth0`` to the switch, and names for all hosts in its /etc/hosts."""
        host, port = self.hosts[k], f"port{k}"
        self._write_names(k)
        ip("netns", "add", host)
        ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.switch)
        for name, device in ((host, "eth0"), (self.switch, port)):
            self._limit(name, device)
            with contextlib.suppress(LabError):  # a kernel without IPv6 needs no telling
                ip("-n", name, "link", "set", device, "addrgenmode", "none")
        ip("-n", host, "address", "add", f"{self.addresses[k]}/24", "dev", "eth0")
        ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", "eth0", "up")

    def _write_names(self, k: int) -> None:
        lines = ["127.0.0.1 localhost"]
        for j, address in enumerate(self.addresses):
            own = f" {socket.gethostname()}" if j == k else ""
            # torch looks up who connects by the mapped form; it has a name of its own, so that host-<j> stays IPv4 only.
            lines += [f"{address} host-{j}{own}", f"::ffff:{address} host-{j}.mapped"]
        for _ in range(10):
            with contextlib.suppress(FileNotFoundError):  # another lab, ending, removes an empty parent
                (ETC / self.hosts[k]).mkdir(parents=True)
                break
        (ETC / self.hosts[k] / "hosts").write_text("\n".join([*lines, ""]), encoding="utf-8")

    def _limit(self, namespace: str, device: str) -> None:
        """A bucket on what leaves ``device``; one at each end of a link limits it both ways."""
        if self.rate is None:
            return
        per_s = self.rate / 8
        burst = round(min(LARGEST_BURST_BYTES, max(LEAST_BURST_BYTES, per_s * BUCKET_S)))
        queue = max(LEAST_QUEUE_BYTES, round(per_s * QUEUE_S))
        bucket = ["rate", f"{self.rate}bit", "burst", str(burst), "limit", str(queue)]
        _tool("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *bucket)
        # Segments above the bucket's size would be cut into frames by tbf, which costs more than the network it plays.
        # The bucket charges every frame's headers all the same; the interface counts them once per segment.
        ip("-n", namespace, "link", "set", device, "gso_max_size", str(burst // 2))

    def counters(self) -> list[tuple[int, int]]:
        """Per host, the bytes its interface has sent and received so far."""
        rows = [json.loads(ip("-n", host, "-j", "-s", "link", "show", "eth0"))[0] for host in self.hosts]
        return [(row["stats64"]["tx"]["bytes"], row["stats64"]["rx"]["bytes"]) for row in rows]

    def remove(self, leaders: list[subprocess.Popen[bytes]]) -> list[str]:
        """End what runs and remove what was made, however much that is; returns what could not be removed."""
        end_processes(leaders, self.hosts)
        return _remove(self.run, [*self.hosts, self.switch])


def clean() -> tuple[list[str], list[str]]:
    """Remove the labs whose owner is gone, and nothing else: (labs removed, what could not be removed)."""
    found: dict[str, set[str]] = {}
    for folder in (NAMESPACES, ETC, Path(tempfile.gettempdir())):
        for path in folder.iterdir() if folder.is_dir() else []:
            match = NAME.fullmatch(path.name)
            if match and start_of(int(match[2])) != match[3]:
                found.setdefault(match[1], set()).update([path.name] if match[4] else [])
    failures = []
    for run, names in sorted(found.items()):
        end_processes([], sorted(names))
        failures += _remove(run, sorted(names))
    return sorted(found), failures
