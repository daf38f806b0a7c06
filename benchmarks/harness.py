"""What every bench shares: alternating timing, the figures it reports, and the rows and files they are written to."""

from __future__ import annotations

import csv
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

__all__ = [
    "ROOT",
    "Figure",
    "Timing",
    "alternate",
    "append_rows",
    "busy_cores",
    "copy_bandwidth",
    "print_table",
    "write_json",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = ("date", "version", "commit", "hardware", "name", "value", "unit", "details")


@dataclass(frozen=True)
class Figure:
    """One reported number. ``at_least`` or ``at_most`` is the aim it is held against, if any."""

    name: str
    value: float
    unit: str  # x (a ratio: larger = polyhop is better, unless at_most is set), s, cpu_s, GB/s, ...
    details: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the aim, if there is one, is reached."""
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def verdict(self) -> str:
        if self.at_least is None and self.at_most is None:
            return ""
        aim = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{'ok' if self.is_met else 'MISS'} ({aim})"


@dataclass(frozen=True)
class Timing:
    """Wall and CPU seconds (all threads of the process) of each repetition of one side, in the order they ran."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    counts_cpu: bool = False  # which of the two the bench compares

    @property
    def seconds(self) -> tuple[float, ...]:
        return self.cpu if self.counts_cpu else self.wall

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        other = (
            f"wall {statistics.median(self.wall):.4g}"
            if self.counts_cpu
            else f"cpu {statistics.median(self.cpu):.4g}"
        )
        return f"{self.median:.4g} s [{min(self.seconds):.4g} .. {max(self.seconds):.4g}, {other}]"


def alternate(
    sides: Mapping[str, Callable[[], object]], *, repeats: int, counts_cpu: bool = False, warm_up: bool = True
) -> dict[str, Timing]:
    """Time the sides in turn, ``repeats`` rounds, each round starting with another side.

    ``counts_cpu`` compares CPU seconds of all threads of this process instead of wall time; both are kept.
    """
    names = list(sides)
    if warm_up:
        for name in names:
            sides[name]()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            sides[name]()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: Timing(*zip(*pairs, strict=True), counts_cpu) for name, pairs in seconds.items()}


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that the whole machine used while this waited; unlike the load average it forgets what ran before."""

    def spent() -> tuple[int, int]:
        times = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(times), times[3] + times[4]

    total, idle = spent()
    time.sleep(seconds)
    total, idle = (after - before for after, before in zip(spent(), (total, idle), strict=True))
    return (os.cpu_count() or 1) * (1 - idle / max(total, 1))


def copy_bandwidth(num_threads: int, *, size_bytes: int = 1 << 29) -> float:
    """Bytes read plus bytes written per second by a plain copy far larger than any cache; best of seven."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    source = torch.ones(size_bytes // 4)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * size_bytes / best


def print_table(figures: Iterable[Figure]) -> None:
    """The figures as aligned plain text."""
    rows = [(f.name, f"{f.value:.4g}", f.unit, f.verdict, f.details) for f in figures]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)),
            row[4],
            sep="  ",
        )


def write_json(figures: Iterable[Figure], path: Path) -> None:
    """One flat object: name -> value."""
    path.write_text(json.dumps({f.name: f.value for f in figures}, indent=2) + "\n")


def append_rows(bench: str, figures: Iterable[Figure], version: str) -> Path:
    """Append one row per figure to results/<bench>.csv."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{bench}.csv"
    stamp = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "version": version,
        "commit": _commit(),
        "hardware": hardware(),
    }
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if is_new:
            writer.writeheader()
        for figure in figures:
            writer.writerow({**stamp, **asdict(figure), "value": f"{figure.value:.6g}"})
    return path


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", "src", "csrc", "benchmarks/*.py", "CMakeLists.txt")
    return (head or "none") + ("+changes" if changed else "")


def hardware() -> str:
    """CPU model, cores given to this process, memory, GPUs; in words."""
    model = platform.processor() or platform.machine()
    isa = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
            if line.startswith("flags"):
                isa = next((name for name in ("avx512f", "avx2") if name in line.split()), "")
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = [_gpu(about) for about in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return " ".join(filter(None, [model, isa, f"{cores} cores", f"{memory:.0f} GiB", *gpus]))


def _gpu(about: Path) -> str:
    lines = (line.partition(":") for line in about.read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "Model"), "a GPU")
