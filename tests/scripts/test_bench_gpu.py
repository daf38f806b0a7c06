"""Bench ``gpu``: what it reads from a profiler's trace, and when its epochs end."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu.seen import Seen  # noqa: E402


def event(cat: str, name: str, begin: float, took: float, stream: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": took, "args": {"stream": stream}}


TRACE = [
    {"ph": "M", "name": "process_name"},
    event("cpu_op", "aten::mm", 0, 500),
    event("kernel", "multi_tensor_apply_adam", 1000, 100),
    event("kernel", "_draw_hop", 1050, 150, stream=13),
    event("kernel", "_gather", 1300, 100, stream=13),
    event("gpu_memcpy", "Memcpy DtoH", 1390, 20, stream=13),
    event("kernel", "gemm", 1600, 400),
    event("cuda_runtime", "cudaStreamSynchronize", 1400, 30),
    event("cuda_runtime", "cudaLaunchKernel", 1000, 5),
    event("cuda_driver", "cuLaunchKernelEx", 1000, 5),
]


def test_what_a_device_did() -> None:
    seen = Seen.of(TRACE)
    assert seen.window_ms == pytest.approx(1.0)
    assert seen.busy_ms == pytest.approx(0.2 + 0.11 + 0.4), "work beside other work is counted once"
    assert seen.idle == pytest.approx(0.29)
    assert seen.parts_ms == pytest.approx({"train": 0.5, "draw": 0.15, "gather": 0.1, "copies": 0.02})
    assert seen.num_kernels == 4
    assert seen.waits == {"cudaStreamSynchronize": 1}
    assert seen.top[0] == ("gemm", pytest.approx(0.4), 1)
    assert any("2.0 kernels; waits: cudaStreamSynchronize 0.50" in line for line in seen.lines(2))


def test_a_profile_without_a_device() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    with pytest.raises(ValueError, match="no work of a device"):
        Seen.of_profile(profile)


@pytest.mark.skipif(importlib.util.find_spec("torch_geometric") is None, reason="needs PyG")
@pytest.mark.parametrize(("until_s", "num_timed"), [(1e9, 4), (-1.0, 1)])
def test_epochs_end_in_time(monkeypatch: pytest.MonkeyPatch, until_s: float, num_timed: int) -> None:
    """The first is not counted; one is the profiler's, even if time is over."""
    from benchmarks.gpu import minibatch

    ran: list[int] = []
    work: list[str] = []

    class Trainer:
        def __init__(self, *given: object, max_epochs: int, callbacks: Any, **more: object) -> None:
            self.max_epochs, self.callbacks = max_epochs, callbacks

        def fit(self, model: object, graph: object) -> None:
            for epoch in range(1, self.max_epochs + 1):
                ran.append(epoch)
                record = {"epoch": epoch, "train_seconds": float(epoch), "loss": 1.0}
                wishes = [callback(record) for callback in self.callbacks]
                if True in wishes:
                    return

    class Profile:
        def __init__(self, **given: object) -> None:
            pass

        def start(self) -> None:
            work.append("start")

        def stop(self) -> None:
            work.append("stop")

        def export_chrome_trace(self, path: str) -> None:
            raise RuntimeError("no trace today")

    monkeypatch.setattr(minibatch, "Trainer", Trainer)
    monkeypatch.setattr(minibatch, "_model", lambda graph: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    ours = minibatch._Ours()
    ours.run(None, None, 4, minibatch._Clock(), until_s)  # type: ignore[arg-type]
    assert ours.seconds == [float(epoch) for epoch in range(2, 2 + num_timed)]
    assert ran == list(range(1, 3 + num_timed))
    assert work == ["start", "stop"]
    assert ours.seen is None, "a profile that cannot be read fails alone"
