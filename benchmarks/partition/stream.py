"""End to end: ``polyhop partition`` from a file of edges to a folder of parts, on one core, out of core.

Run as ``python -m benchmarks.partition.stream ANSWER ARGUMENTS...`` it is the measured process.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Figure

__all__ = ["run"]

PARTS = 8
METHODS = ("hash", "ldg", "fennel")
MEMORY = "1GB"


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``stream_medges_per_s``: edges of the file per second of wall time, the slowest method."""
    with tempfile.TemporaryDirectory(prefix="polyhop-stream-") as name:
        folder = Path(name)
        edges, num_edges = _write_edges(folder, "0.02" if is_quick else "0.4")
        runs: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
        for turn in range(1 if is_quick else 3):
            shift = turn % len(METHODS)
            for method in METHODS[shift:] + METHODS[:shift]:
                runs[method].append(_measure(edges, method, folder))
    rates = {}
    for method, found in runs.items():
        seconds = [one["wall"] for one in found]
        rates[method] = num_edges / statistics.median(seconds) / 1e6
        details = (
            f"{statistics.median(seconds):.1f} s [{min(seconds):.1f} .. {max(seconds):.1f}, cpu "
            f"{statistics.median(one['cpu'] for one in found):.1f}], peak {max(one['peak'] for one in found) / 2**20:.0f} "
            f"MiB with --memory {MEMORY}, cut {found[0]['cut']:.3f}"
        )
        print(f"  {method}: {rates[method]:.2f} M edges/s; {details}", flush=True)
        yield Figure(f"stream_medges_per_s_{method}", rates[method], "M/s", details)
    slowest = min(rates, key=rates.__getitem__)
    details = (
        f"{num_edges:,} edges, int64 .npy, shuffled, to {PARTS} parts on one core; the slowest, {slowest}"
    )
    yield Figure("stream_medges_per_s", rates[slowest], "M/s", details, at_least=4)


def _write_edges(folder: Path, scale: str) -> tuple[Path, int]:
    """Products-like edges in no order, int64 [2, E], as most people have them."""
    from benchmarks.graphs import describe, synth

    graph = synth(f"synth:products?scale={scale}&features=0")
    print("  " + describe(graph), flush=True)
    order = np.random.default_rng(0).permutation(graph.num_edges)
    path = folder / "edges.npy"
    edges = np.lib.format.open_memmap(path, "w+", np.int64, (2, graph.num_edges))
    for row, ends in enumerate((graph.indices, graph.destinations)):
        edges[row] = ends.numpy()[order]
    edges.flush()
    return path, graph.num_edges


def _measure(edges: Path, method: str, folder: Path) -> dict[str, float]:
    out, answer = folder / "parts", folder / "answer.json"
    arguments = ["partition", str(edges), "--parts", str(PARTS), "--method", method, "--memory", MEMORY]
    command = [sys.executable, "-m", "benchmarks.partition.stream", str(answer), *arguments]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--out", str(out), "--json"], capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"polyhop {' '.join(arguments)} failed:\n{done.stderr}")
    shutil.rmtree(out)
    cut = float(json.loads(done.stdout)["cut"])
    return {"wall": wall, "cut": cut, **json.loads(answer.read_text())}


def _write_costs(answer: str) -> None:
    """CPU seconds and peak bytes of this process (VmHWM, unlike getrusage's, is not inherited)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(lines["VmHWM"].split()[0]) * 1024
    Path(answer).write_text(json.dumps({"cpu": time.process_time(), "peak": peak}))


def _main(answer: str, *arguments: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    atexit.register(_write_costs, answer)
    sys.argv = ["polyhop", *arguments]
    runpy.run_module("polyhop", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
