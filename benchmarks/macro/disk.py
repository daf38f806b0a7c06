"""Features six times the memory and more: a window's rows by large sorted reads, against a mapped file and single batches.

Each side is a process of its own inside a memory cgroup, so that the page cache, too, is charged to it. It starts with none
of the file in memory (cold), delivers one window untimed, by which the mapped sides fill the cache as far as the limit lets
them (warm), then the next window is timed: rows of the same mini-batches, in the same order, checked by a digest.

    mmap          the file mapped, rows gathered mini-batch by mini-batch: what one gets without thinking about it. Where the
                  kernel reads far ahead this takes minutes, so it is measured once, on some rows of a window, and scaled
    mmap_random   the same, the kernel told not to read ahead (MADV_RANDOM): the better of the two is the bar
    mmap_window   the window's distinct rows, sorted, from the mapped file; then each mini-batch from memory
    direct        DiskFeatures, mini-batch by mini-batch
    window        DiskFeatures, the window's distinct rows at once; then each mini-batch from memory: what ``macro`` does

Run as ``python -m benchmarks.macro.disk SIDE FILE BATCHES ANSWER`` it is one side's process.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figure

__all__ = ["SIDES", "enter", "limited", "peak_bytes", "run", "why_not"]

SIDES = ("mmap", "mmap_random", "mmap_window", "direct", "window")
BARS = ("mmap", "mmap_random")
WIDTH = 128  # float32: 512 bytes a row, 8 rows a page
LIMIT = 512 << 20
WINDOW = 16  # mini-batches
SOME_ROWS = 2_000  # of the first mini-batch: what side mmap delivers
CHUNK_ROWS = 1 << 18


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``disk_vs_mmap``: seconds of a window from the better mapped side over those of large sorted reads."""
    num_rows, batch_rows, rounds = (6_800_000, 10_000, 1) if is_quick else (8_400_000, 20_000, 3)
    size = num_rows * WIDTH * 4
    with tempfile.TemporaryDirectory(prefix="polyhop-disk-", dir=os.environ.get("POLYHOP_BENCH_DIR")) as name:
        folder = Path(name)
        reason = why_not(folder, size)
        if reason:
            print(f"  disk: skipped: {reason}", flush=True)
            return
        batches = _draw(num_rows, batch_rows)
        np.save(folder / "batches.npy", batches)
        _write(folder / "x.npy", num_rows)
        taken: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for turn in range(rounds):
            shift = turn % len(SIDES)
            for side in SIDES[shift:] + SIDES[:shift]:
                if side == "mmap" and taken[side]:
                    continue
                taken[side].append(_measure(side, folder))
                print(f"    {side}: {_said(taken[side][-1])}", flush=True)
    yield from _figures(taken, size, batches)


def _figures(
    taken: dict[str, list[dict[str, Any]]], size: int, batches: np.ndarray[Any, Any]
) -> Iterator[Figure]:
    expected = taken["window"][0]["digests"]
    for side, runs in taken.items():
        for each in runs:
            if any(
                mine != theirs[: len(mine)] for mine, theirs in zip(each["digests"], expected, strict=True)
            ):
                raise RuntimeError(f"side {side} delivered other rows than side window")
    seconds = {side: statistics.median(each["seconds"] for each in runs) for side, runs in taken.items()}
    middle = {
        side: sorted(runs, key=lambda each: each["seconds"])[len(runs) // 2] for side, runs in taken.items()
    }
    bar = min(BARS, key=seconds.__getitem__)
    asked = batches.shape[1] * batches.shape[2]
    distinct = np.unique(batches[1]).size
    what = (
        f"{size / 1e9:.2f} GB of features written to disk, memory limit {LIMIT / 1e6:.0f} MB ({size / LIMIT:.1f} times); "
        f"window of {WINDOW} mini-batches, {asked:,} rows asked for, {distinct:,} distinct; warm"
    )
    for side in SIDES:
        spread = [each["seconds"] for each in taken[side]]
        cold = statistics.median(each["cold"] for each in taken[side])
        scaled = f"scaled from {SOME_ROWS:,} rows, read-ahead {_read_ahead()}; " if side == "mmap" else ""
        details = (
            f"{scaled}{_said(middle[side])}; [{min(spread):.3g} .. {max(spread):.3g}], cold {cold:.3g} s"
        )
        yield Figure(f"disk_{side}_s", seconds[side], "s", details)
        yield Figure(
            f"disk_{side}_pages",
            middle[side]["pages"],
            "pages",
            "read from disk in the timed window, 4 KiB each",
        )
    ours = middle["window"]
    yield Figure(
        "disk_vs_mmap",
        seconds[bar] / seconds["window"],
        "x",
        f"{what}; bar is {bar}; {_limit(ours)}",
        at_least=5,
    )
    others = {"direct": "per mini-batch, direct reads", "mmap_window": "the same window from the mapped file"}
    for side, meaning in others.items():
        yield Figure(f"disk_vs_{side}", seconds[side] / seconds["window"], "x", meaning)
    yield Figure("disk_vs_mmap_cold", _cold(taken, bar) / _cold(taken, "window"), "x", f"first window; {bar}")


def _read_ahead() -> str:
    """How far the kernel reads ahead of a fault in the largest disk's files."""
    found = [int(file.read_text()) for file in Path("/sys/block").glob("*d*/queue/read_ahead_kb")]
    return f"{max(found)} KiB" if found else "unknown"


def _cold(taken: dict[str, list[dict[str, Any]]], side: str) -> float:
    return statistics.median(each["cold"] for each in taken[side])


def _said(found: dict[str, Any]) -> str:
    rate = found["pages"] * 4096 / found["seconds"] / 1e9
    reads = f", {found['reads']:,} reads, {found['scans']} scans" if found["reads"] else ""
    return f"{found['seconds']:.3g} s, {found['pages']:,} pages ({rate:.2f} GB/s){reads}, peak {found['peak'] / 1e6:.0f} MB"


def _limit(found: dict[str, Any]) -> str:
    """What bounds our side: the sum of both is what the plan is made by."""
    seek, move = found["runs"] / found["reads_per_s"], found["pages"] * 4096 / found["bytes_per_s"]
    return (
        f"limit {seek + move:.2g} s: {found['runs']:,} reads apart at {found['reads_per_s']:,.0f}/s = {seek:.2g} s and "
        f"{found['pages']:,} pages at {found['bytes_per_s'] / 1e9:.2f} GB/s = {move:.2g} s, both measured by a short probe; "
        f"scan above {found['reads_per_s'] * 4096 / found['bytes_per_s']:.1%} of pages, wanted here {found['share']:.1%}"
    )


def _draw(num_rows: int, batch_rows: int) -> np.ndarray[Any, Any]:
    """int64 [2, WINDOW, batch_rows]: distinct nodes of each mini-batch of two windows, in no order.

    Half follow a power law, as what samplers meet often does, half are anywhere; popular nodes lie anywhere in the file.
    """
    rng = np.random.default_rng(0)
    place = np.uint64(2_654_435_761)  # spreads ranks over the ids; odd and prime, so no two meet
    out = np.empty((2, WINDOW, batch_rows), np.int64)
    for batch in out.reshape(-1, batch_rows):
        rank = (num_rows * rng.random(2 * batch_rows) ** 4).astype(np.uint64)
        popular = (rank * place % np.uint64(num_rows)).astype(np.int64)
        anywhere = rng.integers(num_rows, size=2 * batch_rows)
        both = np.stack([popular, anywhere], axis=1).reshape(-1)
        _, first = np.unique(both, return_index=True)
        batch[:] = both[np.sort(first)[:batch_rows]]
    return out


def _write(path: Path, num_rows: int) -> None:
    """Finite random floats, every block of them written, none left in memory."""
    rng = np.random.default_rng(1)
    header = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, WIDTH)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, num_rows, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, num_rows - start)
            words = rng.integers(1 << 30, size=rows * WIDTH, dtype=np.uint32)  # as floats: 0 .. 2
            file.write(words.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if path.stat().st_blocks * 512 < num_rows * WIDTH * 4:
        raise RuntimeError(f"{path} is sparse: its blocks were not written")


def why_not(folder: Path, size: int) -> str:
    """Why it cannot be measured here; empty if it can."""
    free = shutil.disk_usage(folder).free
    if free < 1.5 * size:
        return f"{folder} has {free / 1e9:.1f} GB free, {1.5 * size / 1e9:.1f} are needed (POLYHOP_BENCH_DIR names another)"
    try:
        with limited() as group:
            subprocess.run([sys.executable, "-c", ""], check=True, preexec_fn=enter(group))
    except (OSError, subprocess.SubprocessError) as error:
        return f"no memory cgroup to run in: {error}"
    return ""


@contextmanager
def limited(limit_bytes: int = LIMIT) -> Iterator[Path]:
    """A memory cgroup with a limit (v1, or v2 where that has the controller); removed again."""
    v1 = Path("/sys/fs/cgroup/memory")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"polyhop-bench-{os.getpid()}"
    for stale in group.parent.glob("polyhop-bench-*"):  # of a run that was killed
        if not Path("/proc", stale.name.removeprefix("polyhop-bench-")).exists():
            with suppress(OSError):
                stale.rmdir()
    group.mkdir()
    try:
        limit = group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")
        if not limit.exists():
            raise OSError(f"{limit} is not there: the memory controller is not delegated")
        limit.write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


def enter(group: Path) -> Callable[[], None]:
    """Runs in the child before anything else, so that all its memory counts."""

    def enter() -> None:
        (group / "cgroup.procs").write_text("0")

    return enter


def _measure(side: str, folder: Path) -> dict[str, Any]:
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    arguments = [side, str(folder / "x.npy"), str(folder / "batches.npy"), str(answer)]
    with limited() as group:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.macro.disk", *arguments],
            capture_output=True, text=True, check=False, preexec_fn=enter(group),
        )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"side {side} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _pages_read() -> int:
    """4 KiB pages that this process had read from disk, by faults, reading ahead, or reads."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) // 4096


def peak_bytes() -> int:
    """Most bytes that the cgroup held, page cache included."""
    place = Path("/proc/self/cgroup").read_text().splitlines()
    for line in place:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return int(Path(f"/sys/fs/cgroup/memory{path}/memory.max_usage_in_bytes").read_text())
        if not controllers and (file := Path(f"/sys/fs/cgroup{path}/memory.peak")).exists():
            return int(file.read_text())
    return 0


def _one_side(side: str, path: str, batches_path: str, answer: str) -> None:
    """Deliver two windows; the second is timed."""
    import torch

    from polyhop.graph import DiskFeatures

    batches = torch.from_numpy(np.load(batches_path))
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    store: Any = DiskFeatures(path) if side in ("direct", "window") else _mapped(Path(path), side)
    rates = store.disk if isinstance(store, DiskFeatures) else None  # measured now, not inside the timing
    deliver = _window if side.endswith("window") else _each
    digests, seconds = [], []
    rows = batches[0].numel()
    batches = batches[:, :1, :SOME_ROWS] if side == "mmap" else batches
    share = rows / batches[0].numel()
    before = after = 0
    counts = None
    for window in batches:
        before, counts = _pages_read(), getattr(store, "counts", None)
        found, taken = deliver(store, window)
        after = _pages_read()
        digests.append(found)
        seconds.append(share * taken)
    result: dict[str, Any] = {
        "cold": seconds[0], "seconds": seconds[1], "pages": int(share * (after - before)), "digests": digests,
        "peak": peak_bytes(), "reads": 0, "scans": 0,
    }  # fmt: skip
    if rates is not None and counts is not None:
        from polyhop.kernels.read_rows import plan_reads

        now = store.counts
        plan = plan_reads(torch.unique(batches[1]), WIDTH * 4, offset=128, disk=rates)
        result |= {
            "reads": now.num_reads - counts.num_reads, "scans": now.num_scans - counts.num_scans,
            "reads_per_s": rates.reads_per_s, "bytes_per_s": rates.bytes_per_s, "runs": plan.num_runs,
            "share": plan.pages_wanted / (store.num_rows * WIDTH * 4 / 4096),
        }  # fmt: skip
    Path(answer).write_text(json.dumps(result))


def _mapped(path: Path, side: str) -> Any:
    import torch

    from polyhop.graph import DenseFeatures

    array = np.load(path, mmap_mode="c")
    if side == "mmap_random":
        array._mmap.madvise(mmap.MADV_RANDOM)
    return DenseFeatures(torch.from_numpy(array), is_mapped=True, path=path)


def _digests(rows: Any) -> list[int]:
    """Of the rows that every side delivers, then of all."""
    return [_digest(rows[:SOME_ROWS]), *([_digest(rows)] if len(rows) > SOME_ROWS else [])]


def _digest(rows: Any) -> int:
    """Of rows and their order."""
    import torch

    sums = rows.view(torch.int32).sum(1, dtype=torch.int64)
    return int((sums * torch.arange(1, sums.numel() + 1)).sum()) % (1 << 61)


def _each(store: Any, window: Any) -> tuple[list[int], float]:
    digests, seconds = [], 0.0
    for ids in window:
        began = time.perf_counter()
        rows = store.gather(ids)
        seconds += time.perf_counter() - began
        digests += _digests(rows)
    return digests, seconds


def _window(store: Any, window: Any) -> tuple[list[int], float]:
    import torch

    from polyhop.kernels import gather_rows

    began = time.perf_counter()
    wanted, place = torch.unique(window, return_inverse=True)
    pool = store.gather(wanted)
    digests, seconds = [], time.perf_counter() - began
    for at in place:
        began = time.perf_counter()
        rows = gather_rows(pool, at)
        seconds += time.perf_counter() - began
        digests += _digests(rows)
    return digests, seconds


if __name__ == "__main__":
    _one_side(*sys.argv[1:])
