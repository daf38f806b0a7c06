"""Launcher ``local``: functions are processes of this host, or what a command makes of them (``command``).

A launcher has one job: that about n functions are alive. It starts what is missing, notices what has ended, and says when
and for how long each ran; results and faults are the ledger's. Orders go through a pipe, so keys are neither in the list
of processes nor in the environment. The pipe stays open: when this process ends, however it does, its functions end too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

from polyhop.errors import LaunchError
from polyhop.serverless.function import Order

__all__ = ["Ended", "LocalLauncher"]

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PATIENCE_S = 1.0  # for functions that were told to end, then for those whose pipe was closed


@dataclass(frozen=True)
class Ended:
    """A function that is gone: what it was called, how it ended, from when to when it ran (Unix seconds)."""

    function: str
    exit_code: int
    start_s: float
    end_s: float
    said: str = ""  # what it wrote to standard error

    @property
    def is_failure(self) -> bool:
        return self.exit_code != 0


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    start_s: float
    errors: IO[bytes]

    def untie(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        self.errors.close()
        self.untie()


class LocalLauncher:
    """``order`` is a model of what functions are told; each gets a name of its own. ``command`` runs one."""

    def __init__(
        self,
        order: Order,
        *,
        command: Sequence[str] = (sys.executable, "-m", "polyhop.serverless.function"),
        cores: Callable[[int], int | None] = lambda number: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._order, self._command = replace(order, tied=True), list(command)
        self._cores, self._environment = cores, dict(environment or {})
        self._running: dict[str, _Running] = {}
        self.num_started = 0

    @property
    def alive(self) -> list[str]:
        """Names of the functions that run. Other threads may ask."""
        return list(self.pids)

    @property
    def pids(self) -> dict[str, int]:
        running = list(self._running.items())
        return {name: each.process.pid for name, each in running if each.process.poll() is None}

    def ensure(self, wanted: int) -> list[str]:
        """Start functions until so many are alive; names of the new ones. More than wanted are left to end by themselves."""
        missing = wanted - len(self.alive)
        return [self._start() for _ in range(max(missing, 0))]

    def _start(self) -> str:
        number, self.num_started = self.num_started, self.num_started + 1
        name = f"{self._order.function}-{number}"
        core = self._cores(number)
        pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (read when it has ended)
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), **self._environment},
                preexec_fn=pin,
            )
        except OSError as error:
            errors.close()
            raise LaunchError(f"{self._command[0]!r} cannot be run: {error.strerror or error}") from None
        self._running[name] = _Running(process, time.time(), errors)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(json.dumps(replace(self._order, function=name).to_json()).encode() + b"\n")
            process.stdin.flush()
        return name

    def ended(self) -> list[Ended]:
        """Functions that have ended since the last call."""
        found = []
        for name, each in list(self._running.items()):
            code = each.process.poll()
            if code is not None:
                each.errors.seek(0)
                said = each.errors.read()[-2000:].decode(errors="replace")
                each.close()
                found.append(Ended(name, code, each.start_s, time.time(), said))
                del self._running[name]
        return found

    def close(self) -> list[Ended]:
        """Wait a while for functions to end, then close their pipes, then end them."""
        left = self._wait(list(self._running.values()))  # they were told to
        for each in left:
            each.untie()
        for each in self._wait(left):
            each.process.kill()
            each.process.wait()
        return self.ended()

    @staticmethod
    def _wait(running: Sequence[_Running]) -> list[_Running]:
        """Those that have not ended in time."""
        deadline = time.monotonic() + _PATIENCE_S
        while left := [each for each in running if each.process.poll() is None]:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        return left
