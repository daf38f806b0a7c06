"""Section ``rivals``: seconds until a model is as good, at one limited rate: few bits, stale, sampled and skipped halos.

All sides start from the same weights and take turns at the rate at which the exact run waits for 70 % of an epoch. Every few
epochs each is judged with the limit lifted, which is not timed. The target is the exact run's best validation score less
half a point. A side that never gets there is told as such; its ratio is then a lower bound.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.halo.graphs import cut, load_real, make, narrowed
from benchmarks.halo.launches import save, start, why_no_lab
from benchmarks.halo.workload import EXACT, OURS, Job
from benchmarks.harness import Figure

__all__ = ["reached", "run"]

NUM_RANKS, EPOCHS, JUDGED = 4, 60, 3
SHARE, BELOW = 0.7, 0.005
SIDES: dict[str, dict[str, Any]] = {
    EXACT: {},
    OURS: {"bits": "adaptive"},
    "4bit": {"bits": 4},
    "stale": {"halo": "stale"},
    "sampled": {"halo": "sampled", "halo_share": 0.1},
    "skipping": {"halo": "skipping"},
}


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Per rival: its seconds to the target over the adaptive ones, and the seconds themselves."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    real = None if is_quick else load_real("facebook-pages")
    graph = make("products", scale=1 / 32) if real is None or isinstance(real, str) else narrowed(real)
    made = cut(graph.name, graph, NUM_RANKS)
    print(f"  {made}; sage", flush=True)
    with tempfile.TemporaryDirectory(prefix="polyhop-halo-") as name:
        job = Job(
            str(save(made, Path(name))),
            str(Path(name) / "answers"),
            SIDES,
            "sage",
            norm="layer_norm",
            shares=(SHARE,),
            tries=2 if is_quick else 4,
            epochs=6 if is_quick else EPOCHS,
            judged=JUDGED,
        )
        found, load = start(job, NUM_RANKS, "rivals")
    yield from _raced(found, load)


def _raced(found: list[dict[str, Any]], load: float) -> Iterator[Figure]:
    first = found[0]
    seconds = {
        side: [max(one["epochs"][side][at]["s"] for one in found) for at in range(len(first["epochs"][side]))]
        for side in SIDES
    }
    scores = {side: [tuple(each) for each in first["scores"][side]] for side in SIDES}
    target = max(val for _, val, _ in scores[EXACT]) - BELOW
    rate = f"{first['mbit']:.0f} Mbit/s, where exact waits {100 * first['share']:.0f} %"
    print(f"  {rate}; target {100 * target:.2f} on validation nodes; load {load:.1f} before", flush=True)
    print(
        f"    {'side':10}{'epochs':>7}{'seconds':>9}{'best val':>9}{'test then':>10}{'MB an epoch':>12}",
        flush=True,
    )
    took = {side: reached(scores[side], seconds[side], target) for side in SIDES}
    for side in SIDES:
        epoch, total, is_there = took[side]
        _, val, test = max(scores[side], key=lambda each: each[1])
        sent = sum(sum(one["epochs"][side][-1]["bytes"].values()) for one in found) / 1e6
        print(
            f"    {side:10}{epoch if is_there else '-':>7}{total:9.2f}{100 * val:9.2f}{100 * test:10.2f}{sent:12.2f}",
            flush=True,
        )
    ours = took[OURS][1]
    for side in SIDES:
        epoch, total, is_there = took[side]
        best = max(val for _, val, _ in scores[side])
        details = f"{epoch} epochs to {100 * target:.2f}" if is_there else f"not reached in {epoch} epochs"
        details += f"; best {100 * best:.2f}; {rate}"
        yield Figure(f"time_to_target_{side}_s", total, "s", details)
        if side != OURS:
            yield Figure(f"time_to_target_{side}_vs_ours", total / ours, "x", details)


def reached(
    scores: list[tuple[int, float, float]], seconds: list[float], target: float
) -> tuple[int, float, bool]:
    """(epochs, seconds of them, whether the target was reached there)."""
    for epoch, val, _ in scores:
        if val >= target:
            return epoch, sum(seconds[:epoch]), True
    return len(seconds), sum(seconds), False
