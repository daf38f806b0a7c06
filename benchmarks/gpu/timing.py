"""Times of work on the device, by its own events: sides in turn, medians; and the bandwidth that a plain copy has there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Times", "alternate", "copy_bandwidth", "kernel_times", "peak_gib", "versions"]


@dataclass(frozen=True)
class Times:
    """Seconds of each repetition of one side, in the order they ran."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        return f"{self.median * 1e3:.4g} ms [{min(self.seconds) * 1e3:.4g} .. {max(self.seconds) * 1e3:.4g}]"


def alternate(
    sides: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 2
) -> dict[str, Times]:
    """Time the sides in turn, ``repeats`` rounds, each round starting with another side."""
    names, seconds = list(sides), {name: list[float]() for name in sides}
    for turn in range(-warm_up, repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            sides[name]()
            end.record()
            torch.cuda.synchronize()
            if turn >= 0:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return {name: Times(tuple(found)) for name, found in seconds.items()}


@cache
def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a copy of 4 GiB on the device."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    seconds = alternate({"copy": lambda: target.copy_(source)}, repeats=15)["copy"].median
    return 2 * source.numel() * source.element_size() / seconds


def peak_gib(work: Callable[[], object]) -> float:
    """GiB allocated on the device at most during the work, what was there before included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def kernel_times(work: Callable[[], object], *, most: int = 12) -> str:
    """A table of the kernels that take most of the device's time in the work, one line each: ms, times run, name."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    found = sorted(record.key_averages(), key=lambda each: each.self_device_time_total, reverse=True)
    total = sum(each.self_device_time_total for each in found)
    lines = [f"{total / 1e3:9.2f} ms in all"]
    for each in found[:most]:
        lines.append(f"{each.self_device_time_total / 1e3:9.2f} ms {each.count:5d}x  {each.key[:100]}")
    return "\n".join(f"    {line}" for line in lines)


def versions() -> str:
    """The device and what runs on it."""
    import torch_geometric
    import triton

    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"PyG {torch_geometric.__version__}"
    )
