"""What a launch may leave behind: processes, listening ports, shared memory. Looked up in /proc, without another library."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LISTENS = "0A"
_MARK = "POLYHOP_TEST_MARK"


class Remains:
    """Remembers what there was when it was made; ``check`` says what has come since and stays.

    Processes are known by a mark that they inherit in their environment, whoever started them.
    """

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        os.environ[_MARK] = self.mark
        self._memory, self._ports = shared_memory(), listening_here()

    def processes(self) -> dict[int, str]:
        """Marked processes but this one: pid -> command line. The resource tracker of multiprocessing is not a rank's."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_marked = f"{_MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if is_marked and int(folder.name) != os.getpid() and "resource_tracker" not in command:
                found[int(folder.name)] = command
        return found

    def check(self, within_s: float = 5.0) -> None:
        until = time.monotonic() + within_s
        while left := self._left():
            assert time.monotonic() < until, left
            time.sleep(0.05)

    def _left(self) -> dict[str, object]:
        left = {
            "processes": self.processes(),
            "shared memory": shared_memory() - self._memory,
            "ports": listening_here() - self._ports,
        }
        return {name: what for name, what in left.items() if what}


def shared_memory() -> set[str]:
    """Names in /dev/shm that this kind of run could have made (others use the machine too)."""
    folder = Path("/dev/shm")
    return {p.name for p in folder.iterdir() if p.name.startswith(("torch_", "psm_", "sem.", "polyhop"))}


def listening_here() -> set[int]:
    """Ports that this process listens on."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                ports.add(int(fields[1].split(":")[1], 16))
    return ports
