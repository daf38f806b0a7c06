"""Runs the pairs, two at a time on one thread each, and reports mean differences with their standard errors."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from benchmarks.accuracy.recipes import GRAPHS, MODELS, PUBLISHED
from benchmarks.accuracy.training import train_pair
from benchmarks.harness import ROOT, Figure

__all__ = ["run"]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Per model and graph: mean difference in points (within 0.3 or two standard errors), distance to the published."""
    os.environ.setdefault("POLYHOP_DATA", str(ROOT.parent / "shared" / "data"))
    num_seeds = 3 if is_quick else 10
    pairs = [(graph, model) for graph in GRAPHS for model in MODELS]
    scores: dict[tuple[str, str], dict[int, dict[str, tuple[float, float]]]] = {pair: {} for pair in pairs}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        running = {
            pool.submit(train_pair, graph, model, seed): (graph, model, seed)
            for graph, model in pairs
            for seed in range(num_seeds)
        }
        for future in as_completed(running):
            graph, model, seed = running[future]
            scores[graph, model][seed] = future.result()
            if len(scores[graph, model]) == num_seeds:
                yield from _report(graph, model, list(scores[graph, model].values()))


def _report(graph: str, model: str, found: list[dict[str, tuple[float, float]]]) -> Iterator[Figure]:
    ours, theirs = ([pair[side][0] for pair in found] for side in ("polyhop", "pyg"))
    difference = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, error = statistics.mean(difference), statistics.stdev(difference) / math.sqrt(len(found))
    seconds = {side: statistics.median(pair[side][1] for pair in found) for side in ("polyhop", "pyg")}
    details = (
        f"polyhop {statistics.mean(ours):.2f} +- {statistics.stdev(ours):.2f}, pyg {statistics.mean(theirs):.2f} +- "
        f"{statistics.stdev(theirs):.2f}; difference {mean:+.2f}, standard error {error:.2f}, {len(found)} seeds; "
        f"{seconds['polyhop']:.1f} and {seconds['pyg']:.1f} CPU-seconds a run"
    )
    name = f"{model.lower()}_{graph.replace('-', '_')}"
    print(f"  {name}: {details}", flush=True)
    yield Figure(f"accuracy_difference_{name}", abs(mean), "points", details, at_most=max(0.3, 2 * error))
    if (model, graph) in PUBLISHED:
        published = PUBLISHED[model, graph]
        away = statistics.mean(ours) - published
        yield Figure(
            f"accuracy_published_{name}",
            abs(away),
            "points",
            f"published {published}, ours {away:+.2f}",
            at_most=1.0,
        )
