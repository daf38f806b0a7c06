"""Section ``latency``: epochs of tiny mini-batches where every message takes a millisecond longer.

An eighth of graph D for 4 ranks: mini-batches of 2 seeds instead of 16, so that as on the whole graph one reads a third of a
percent of the nodes from other ranks, and windows save rounds but hardly any rows. Links are not limited; ``comm`` holds
every message back by the latency that the lab hands on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.macro.graphs import SHAPES, make
from benchmarks.macro.launches import Ran, save, start, why_no_lab
from benchmarks.macro.workload import Job, Side

__all__ = ["run"]

LATENCY = "1ms"
WIDTH, HIDDEN = 32, 32  # small: it is messages that take the time
OURS = "k16"
SIDES = {
    "k1": Side(1),
    "k16": Side(16),
    "k64": Side(64),
    "auto": Side(0, delta=True),  # all as it is where nothing is asked for
    "rpc": Side(rpc=True),
}


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Epochs of k=1 over those of windows, with latency and without."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    shape = replace(SHAPES["D"], log_nodes=17, batch=2, num_parts=4)
    fixed = make(shape, WIDTH, most_steps=32 if is_quick else 64)
    print(f"  {describe(fixed.graph)}; {fixed.num_steps} steps of {shape.batch} seeds a rank", flush=True)
    with tempfile.TemporaryDirectory(prefix="polyhop-macro-") as name:
        answers = str(Path(name) / "answers")
        job = Job(
            str(save(fixed, Path(name))), answers, shape.batch_size, shape.fan_outs, SIDES, hidden=HIDDEN
        )
        job = replace(job, turns=1 if is_quick else 3)
        late = start(job, shape.num_parts, "late", latency=LATENCY)
        _show(LATENCY, late, fixed.num_steps)
        runs = {"latency": late}
        if not is_quick:
            runs["no_latency"] = start(job, shape.num_parts, "soon")
            _show("no latency", runs["no_latency"], fixed.num_steps)
    for end, ran in runs.items():
        aim = 4.0 if end == "latency" else None
        yield _ratio(f"epoch_vs_k1_{end}", ran, "k1", fixed.num_steps, aim)
        yield _ratio(f"epoch_vs_distdgl_mode_{end}", ran, "rpc", fixed.num_steps, None)
    for ours in ("k64", "auto"):
        yield _ratio(f"epoch_vs_k1_latency_{ours}", late, "k1", fixed.num_steps, None, ours=ours)


def _show(name: str, ran: Ran, num_steps: int) -> None:
    print(f"  {name}, load {ran.load:.1f} before:", flush=True)
    for side in SIDES:
        print(f"    {side:5}{ran.told('sage', side)}; {_per_step(ran, side, num_steps)}", flush=True)


def _per_step(ran: Ran, side: str, num_steps: int) -> str:
    rounds = ran.per_rank("sage", side, lambda one: one["rounds"]) / num_steps
    return f"{side} {1000 * ran.median('sage', side) / num_steps:.1f} ms and {rounds:.1f} rounds a step"


def _ratio(name: str, ran: Ran, peer: str, num_steps: int, aim: float | None, *, ours: str = OURS) -> Figure:
    cores, num_ranks = len(os.sched_getaffinity(0)), len(ran.sent("sage", peer))
    cpu = {
        s: ran.per_rank("sage", s, lambda one: one["cpu_s"]) * num_ranks / cores / num_steps for s in SIDES
    }
    saved = ran.feature_bytes("sage", "k1") / ran.feature_bytes("sage", "k16")
    details = "; ".join(_per_step(ran, side, num_steps) for side in SIDES)
    details += (
        f"; rows {saved:.2f}x fewer at k=16; computing and messages alone keep {cores} cores busy "
        + ", ".join(f"{1000 * seconds:.1f} ms a step ({side})" for side, seconds in cpu.items())
    )
    details += f"; other work on the machine, load {ran.load:.1f}" if ran.load > cores else ""
    details += f"; auto chose k={ran.epochs['sage']['auto'][-1][0]['k']}"
    value = ran.median("sage", peer) / ran.median("sage", ours)
    return Figure(name, value, "x", details, at_least=aim)
