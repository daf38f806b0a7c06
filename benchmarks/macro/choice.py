"""Section ``choice``: k chosen by itself against every k that might have been given, on the links and graph of ``times``.

The rate is fixed, near that at which ``times`` finds k=1 waiting for 70 % of an epoch on two cores. The sides that choose
have memory for any window; second thoughts after the first windows are part of what is measured, not of what is timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.macro.drawn import draw, two_windows
from benchmarks.macro.graphs import SHAPES, make
from benchmarks.macro.launches import Ran, save, start, why_no_lab
from benchmarks.macro.workload import Job, Side

__all__ = ["run"]

RATE = "300mbit"
WIDTH, HIDDEN, STEPS = 128, 64, 32
AUTO_BYTES = 300_000_000
MODEL = "sage"
KEEPING, PLAIN = (1, 4, 8, 16, 32), (1, 8, 16, 32)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """The epoch with k chosen over that of the best k that was given, with and without rows kept; the worse of the two."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    shape = replace(SHAPES["A"], log_nodes=15 if is_quick else 16, batch=31 if is_quick else 62)
    fixed = make(shape, WIDTH, most_steps=STEPS // 2 if is_quick else STEPS)
    print(f"  {describe(fixed.graph)}; {fixed.num_steps} steps of {shape.batch} seeds a rank", flush=True)
    room = two_windows(draw(fixed, shape.fan_outs, (0, 1)).inputs, 16)
    with tempfile.TemporaryDirectory(prefix="polyhop-macro-") as name:
        answers = str(Path(name) / "answers")
        parts = str(save(fixed, Path(name)))
        sides = {
            **{f"delta_k{k}": Side(k, delta=True, room=2 * room) for k in KEEPING},
            **{f"k{k}": Side(k) for k in PLAIN},
            "auto": Side(0, delta=True, memory=AUTO_BYTES),
            "auto_plain": Side(0, memory=AUTO_BYTES),
        }
        job = Job(parts, answers, shape.batch_size, shape.fan_outs, sides, (MODEL,), HIDDEN)
        ran = start(replace(job, turns=1 if is_quick else 2), shape.num_parts, "choice", rate=RATE)
    yield _chosen(ran)


def _chosen(ran: Ran) -> Figure:
    """The epoch with k chosen by itself over that of the best k that was given, with and without rows kept."""
    model = MODEL
    found: dict[str, tuple[float, str]] = {}
    for auto, prefix, ks in (("auto", "delta_k", KEEPING), ("auto_plain", "k", PLAIN)):
        times = {f"{prefix}{k}": ran.median(model, f"{prefix}{k}") for k in ks}
        best, own = min(times, key=lambda side: times[side]), ran.median(model, auto)
        k = ran.epochs[model][auto][-1][0]["k"]
        listed = ", ".join(f"{side} {seconds:.2f} s" for side, seconds in times.items())
        found[auto] = own / times[best], f"{auto} chose k={k}: {own:.2f} s; {listed}"
        notes = ran.epochs[model][auto][-1][0]["notes"]
        print(f"    {auto}: {' | '.join(notes)}", flush=True)
    details = "; ".join(f"{ratio:.3f}, {told}" for ratio, told in found.values())
    return Figure("auto_k_vs_best", max(ratio for ratio, _ in found.values()), "x", details, at_most=1.1)
