"""Section ``convergence``: how fast the gradient vanishes under plain descent with a constant rate, exact and adaptive.

For unbiased gradients of bounded variance the mean of |gradient|^2 over the first T steps is at most c / T plus a floor that
the variance sets. Here that mean is measured (the exact gradient at every step's weights, whoever made the step) and fitted
as T^slope. No mean over T can fall faster than 1 / T: a slope of -1 is the limit, not a norm. The first steps weigh so much
in that mean that noise hardly shows in it; the last steps, where it would, are compared by themselves.

``POLYHOP_HALO_PICTURE=FILE.png`` draws both curves (needs matplotlib).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.halo.graphs import cut, load_real, make, narrowed
from benchmarks.halo.running import build_step
from benchmarks.halo.workload import SEED, model_of
from benchmarks.harness import Figure
from polyhop.comm import Collective, run_in_threads
from polyhop.kernels.keys import Key
from polyhop.partition import share
from polyhop.trace import NO_TRACE

__all__ = ["means", "run", "slope"]

NUM_RANKS, HIDDEN = 4, 64
STEPS, FIRST = 300, 10  # steps; the fit leaves out those before
LR = 0.1
SIDES: dict[str, dict[str, Any]] = {"exact": {}, "adaptive": {"bits": "adaptive"}, "1bit": {"bits": 1}}


def run(*, is_quick: bool) -> Iterator[Figure]:
    """The slopes, how far they are apart, and how much larger the adaptive mean is at the end; one bit is the control."""
    real = None if is_quick else load_real("amazon-computers")
    graph = make("products", scale=1 / 32) if real is None or isinstance(real, str) else narrowed(real)
    made = cut(graph.name, graph, NUM_RANKS)
    steps = 30 if is_quick else STEPS
    print(f"  {made}; gcn, hidden {HIDDEN}, {steps} steps of rate {LR}", flush=True)
    squares = {
        side: run_in_threads(NUM_RANKS, _descended, made, options, steps)[0]
        for side, options in SIDES.items()
    }
    found = {side: means(each) for side, each in squares.items()}
    for side, each in found.items():
        last = f"{each[0]:.3g} at T=1, {each[FIRST - 1]:.3g} at {FIRST}, {each[-1]:.3g} at {steps}"
        details = f"mean of |gradient|^2 over T steps as T^slope, T from {FIRST}; {last}; O(1/T) is -1"
        yield Figure(f"convergence_slope_{side}", slope(each), "slope", details)
    apart, control = (abs(slope(found[side]) - slope(found["exact"])) for side in ("adaptive", "1bit"))
    details = f"adaptive from exact; the control, one bit everywhere, is {control:.3f} apart"
    yield Figure("convergence_slopes_apart", apart, "slope", details, at_most=0.05)
    ratio, control = (found[side][-1] / found["exact"][-1] for side in ("adaptive", "1bit"))
    details = (
        f"mean of |gradient|^2 over {steps} steps, adaptive over exact; one bit over exact {control:.3f}"
    )
    yield Figure("convergence_mean_ratio", ratio, "x", details)
    last = max(1, steps // 6)
    ends = {side: float(np.mean(each[-last:])) for side, each in squares.items()}
    details = (
        f"mean of |gradient|^2 over the last {last} steps, adaptive over exact; the control, one bit everywhere, over exact "
        f"{ends['1bit'] / ends['exact']:.3f}"
    )
    yield Figure("convergence_end_ratio", ends["adaptive"] / ends["exact"], "x", details)
    picture = os.environ.get("POLYHOP_HALO_PICTURE")
    if picture:
        _draw(found, picture)


def _descended(line: Collective, made: Any, options: dict[str, Any], steps: int) -> list[float]:
    """|gradient|^2, exact, before each step."""
    torch.set_num_threads(1)
    held = share(made.graph, made.partition, line.rank)
    model = model_of("gcn", held.num_features, held.num_classes, HIDDEN, dropout=0.0, norm="layer_norm")
    model.train()
    descent = torch.optim.SGD(model.parameters(), lr=LR)
    judge = build_step(model, held, line, {}, NO_TRACE)
    taken = build_step(model, held, line, options, NO_TRACE) if options else None
    found = []
    for epoch in range(steps):
        descent.zero_grad(set_to_none=True)
        judge.gradients(0, Key(SEED, epoch))
        found.append(
            sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
        )
        if taken is not None:
            descent.zero_grad(set_to_none=True)
            taken.gradients(0, Key(SEED, epoch))
        descent.step()
    for step in (judge, taken):
        if step is not None:
            step.close()
    return found


def means(squares: Sequence[float]) -> np.ndarray[Any, Any]:
    """Over the first T, for each T."""
    return np.cumsum(squares) / np.arange(1, len(squares) + 1)


def slope(values: np.ndarray[Any, Any], first: int = FIRST) -> float:
    """Of log values against log T, T from ``first``, points spread evenly over log T."""
    last = len(values)
    at = np.unique(np.geomspace(min(first, last - 1), last, 50).astype(int))
    return float(np.polyfit(np.log(at), np.log(values[at - 1]), 1)[0])


def _draw(found: dict[str, np.ndarray[Any, Any]], picture: str) -> None:
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        print("  no picture: matplotlib is not installed", flush=True)
        return
    canvas = Canvas(figsize=(6, 4), layout="constrained")
    axes = canvas.subplots()
    for side, each in found.items():
        axes.loglog(range(1, len(each) + 1), each, label=f"{side}, slope {slope(each):.2f}")
    steps = np.array([FIRST, len(found["exact"])])
    axes.loglog(steps, found["exact"][FIRST - 1] * FIRST / steps, "k:", label="1 / T")
    axes.set_xlabel("steps T")
    axes.set_ylabel("mean of |gradient|² over T steps")
    axes.legend()
    canvas.savefig(picture, dpi=120)
    print(f"  picture: {picture}", flush=True)
