"""What every rank notes in its trace at the end of an epoch: that it ended, the bytes sent so far, the memory in use.

    {"kind": "counter", "name": "traffic", "epoch": 3, "hidden": 4096, ...}          payload bytes per kind, all so far
    {"kind": "counter", "name": "evaluation", "epoch": 3, "hidden": 1024, ...}       of these, what evaluation sent
    {"kind": "counter", "name": "memory", "epoch": 3, "resident": ..., "peak": ...}  of the process, now and then
    {"kind": "instant", "name": "epoch", "epoch": 3}                                 epochs done; also once before the first

Counts are since the process began. Nothing is measured where no file is written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from polyhop.comm import Collective
from polyhop.strategies import Step
from polyhop.trace import Trace

__all__ = ["EpochMarks", "memory", "sent_by"]

_FLUSH_S = 1.0  # so that whoever watches the file sees every epoch, or every second
_MEMORY_S = 0.25  # reading it takes a tenth of a millisecond, which short epochs would feel
_STATUS = Path("/proc/self/status")
_FIELDS = {"VmRSS": "resident", "VmHWM": "peak"}


class EpochMarks:
    """Of one rank; ``sent``: payload bytes per kind, so far."""

    def __init__(self, trace: Trace, sent: Callable[[], Mapping[str, float]], device: torch.device) -> None:
        self._trace, self._sent, self._device = trace, sent, device
        self._evaluation: Counter[str] = Counter()
        self._flushed_at = self._measured_at = 0.0

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """What is sent inside is counted as evaluation's."""
        if not self._trace.is_written:
            yield
            return
        before = self._sent()
        yield
        for kind, value in self._sent().items():
            if kind != "widths":  # they are chosen beside whatever else goes on
                self._evaluation[kind] += int(value - before.get(kind, 0))

    def epoch(self, number: int) -> None:
        """So many epochs are done."""
        if not self._trace.is_written:
            return
        for name, sent in (("traffic", self._sent()), ("evaluation", self._evaluation)):
            told = {kind: value for kind, value in sent.items() if value}
            if told:
                self._trace.counter(name, epoch=number, **told)
        now = time.monotonic()
        if now - self._measured_at >= _MEMORY_S:
            self._measured_at = now
            self._trace.counter("memory", epoch=number, **memory(self._device))
        self._trace.instant("epoch", epoch=number)
        if now - self._flushed_at >= _FLUSH_S:
            self._flushed_at = now
            self._trace.flush()


def sent_by(step: Step, line: Collective | None) -> dict[str, float]:
    """Payload bytes per kind that this rank has sent: to other ranks, and to whom else the strategy talks."""
    sent = {} if line is None else dict(line.traffic.now().bytes)
    beside = step.counted().bytes if hasattr(step, "counted") else {}
    return {kind: sent.get(kind, 0) + beside.get(kind, 0) for kind in (*sent, *beside)}


def memory(device: torch.device) -> dict[str, float]:
    """Bytes of this process, now and at most (the system's own count: not inherited); of the device, what torch has held."""
    found: dict[str, float] = {}
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name in _FIELDS:
                found[_FIELDS[name]] = int(value.split()[0]) * 1024
    if device.type == "cuda":
        found["device"] = torch.cuda.memory_allocated(device)
        found["device_peak"] = torch.cuda.max_memory_allocated(device)
    return found
