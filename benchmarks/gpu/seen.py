"""What a device did, read from a trace that torch's profiler wrote: its file is the same from version to version."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Seen"]

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_WAITS = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister")


@dataclass(frozen=True)
class Seen:
    """Of everything between the beginning of the first and the end of the last work on the device; milliseconds."""

    window_ms: float
    busy_ms: float  # something ran
    parts_ms: dict[str, float]  # work by what it was for; parts run beside each other
    num_kernels: int
    waits: dict[str, int]  # calls of the host that wait, or may
    waited_ms: float
    top: list[tuple[str, float, int]]  # name, milliseconds, times

    @property
    def idle(self) -> float:
        """Share of the window in which nothing ran."""
        return 1 - self.busy_ms / self.window_ms

    @classmethod
    def of_profile(cls, profile: Any) -> Seen:
        """Of a stopped ``torch.profiler.profile``."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(file))
            return cls.of(json.loads(file.read_text(encoding="utf-8"))["traceEvents"])

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Seen:
        """Of the events of a trace; ValueError where a device did nothing in it."""
        whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
        work = sorted((e for e in whole if e.get("cat") in _WORK), key=lambda event: float(event["ts"]))
        calls = [e for e in whole if e.get("cat") in _CALLS and any(wait in e["name"] for wait in _WAITS)]
        if not work:
            raise ValueError("the profiler saw no work of a device")
        busy, reached = 0.0, float(work[0]["ts"])
        for event in work:
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        parts, names, times = Counter[str](), Counter[str](), Counter[str]()
        trains = _training_stream(work)
        for event in work:
            parts[_part(event, trains)] += float(event["dur"]) / 1e3
            names[event["name"]] += float(event["dur"]) / 1e3
            times[event["name"]] += 1
        return cls(
            window_ms=max((reached - float(work[0]["ts"])) / 1e3, 1e-6),
            busy_ms=busy / 1e3,
            parts_ms=dict(parts),
            num_kernels=sum(event["cat"] == "kernel" for event in work),
            waits=dict(Counter(event["name"] for event in calls)),
            waited_ms=sum(float(event["dur"]) for event in calls) / 1e3,
            top=[(name, ms, times[name]) for name, ms in names.most_common(12)],
        )

    def lines(self, num_steps: int) -> list[str]:
        """For people, by the step."""
        steps = max(num_steps, 1)
        parts = ", ".join(f"{name} {ms / steps:.3f}" for name, ms in sorted(self.parts_ms.items()))
        waits = ", ".join(f"{name} {num / steps:.2f}" for name, num in sorted(self.waits.items()))
        return [
            f"a step: {self.window_ms / steps:.3f} ms, of which idle {self.idle * self.window_ms / steps:.3f}; {parts}",
            f"a step: {self.num_kernels / steps:.1f} kernels; waits: {waits or 'none'}, {self.waited_ms / steps:.3f} ms",
            *(
                f"{ms / steps:.3f} ms a step, {num / steps:.1f} times: {name[:90]}"
                for name, ms, num in self.top
            ),
        ]


def _training_stream(work: list[Mapping[str, Any]]) -> Any:
    """The stream that updates weights; else the one with most work."""
    load: Counter[Any] = Counter()
    for event in work:
        stream = event.get("args", {}).get("stream")
        if "adam" in event["name"].lower():
            return stream
        load[stream] += float(event["dur"])
    return load.most_common(1)[0][0]


def _part(event: Mapping[str, Any], trains: Any) -> str:
    if event["cat"] != "kernel":
        return "copies"
    if event["name"].startswith("_gather"):
        return "gather"
    return "train" if event.get("args", {}).get("stream") == trains else "draw"
