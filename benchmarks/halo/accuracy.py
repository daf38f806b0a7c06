"""Section ``accuracy``: what messages in few bits cost in points, on real graphs, against exact ones from the same weights.

Four ranks as threads, as many runs at a time as there are cores; the test score at the best validation score. Inputs as they
are; those of amazon-computers, dense and mostly set, go through the fixed projection of ``graphs``: as they are, training
stands still for the first twenty epochs.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

from benchmarks.halo.graphs import load_real, narrowed
from benchmarks.halo.workload import model_of
from benchmarks.harness import Figure

__all__ = ["run", "train_pair"]

GRAPHS = ("facebook-pages", "amazon-computers", "debian-packages")
MODELS = ("gcn", "sage")
NUM_RANKS, SEEDS = 4, 5
HIDDEN, EPOCHS, JUDGED = 32, 60, 5
LR = 0.01
SIDES: dict[str, dict[str, Any]] = {"exact": {}, "adaptive": {"bits": "adaptive"}}


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Exact minus adaptive in points, mean over graphs and models; each of them; and the least room to the bound of any."""
    graphs = ("amazon-computers",) if is_quick else GRAPHS
    seeds, epochs = (1, 12) if is_quick else (SEEDS, EPOCHS)
    missing = {name: why for name in graphs if isinstance(why := load_real(name), str)}
    for name, why in missing.items():
        print(f"  {name} is left out: {why}", flush=True)
    cases = [(graph, model) for graph in graphs if graph not in missing for model in MODELS]
    drops: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        running = {
            case: [pool.submit(train_pair, *case, seed, epochs) for seed in range(seeds)] for case in cases
        }
        for case, futures in running.items():
            found = [future.result() for future in futures]
            drops[case] = [one["exact"] - one["adaptive"] for one in found]
            yield _case(case, found)
    if cases:
        yield from _all(drops)


def _case(case: tuple[str, str], found: list[dict[str, float]]) -> Figure:
    drop = [one["exact"] - one["adaptive"] for one in found]
    exact, ours = (statistics.mean(one[side] for one in found) for side in SIDES)
    error = _error(drop)
    details = (
        f"exact {exact:.2f}, adaptive {ours:.2f}; difference {statistics.mean(drop):+.2f}, standard error {error:.2f}, "
        f"{len(drop)} seeds, {NUM_RANKS} ranks"
    )
    name = f"accuracy_drop_{case[1]}_{case[0].replace('-', '_')}"
    print(f"  {name}: {details}", flush=True)
    return Figure(name, statistics.mean(drop), "points", details, at_most=0.3 + 2 * error)


def _all(drops: dict[tuple[str, str], list[float]]) -> Iterator[Figure]:
    means = {case: statistics.mean(drop) for case, drop in drops.items()}
    error = math.sqrt(sum(_error(drop) ** 2 for drop in drops.values())) / len(drops)
    details = ", ".join(f"{model} {graph} {value:+.2f}" for (graph, model), value in means.items())
    yield Figure(
        "accuracy_drop",
        statistics.mean(means.values()),
        "points",
        f"exact minus adaptive: {details}; standard error of the mean {error:.2f}",
        at_most=0.3,
    )


def _error(drop: list[float]) -> float:
    return statistics.stdev(drop) / math.sqrt(len(drop)) if len(drop) > 1 else 0.0


def train_pair(graph_name: str, model_name: str, seed: int, epochs: int) -> dict[str, float]:
    """Test score in points of each side, both from the same weights; which goes first alternates."""
    import torch

    from polyhop.comm import run_in_threads

    torch.set_num_threads(1)
    graph, made = _parts(graph_name)
    found = {}
    for side in SIDES if seed % 2 == 0 else reversed(SIDES):
        scores = run_in_threads(NUM_RANKS, _trained, graph, made, model_name, SIDES[side], seed, epochs)
        found[side] = 100 * scores[0]
    return found


@cache
def _parts(name: str) -> tuple[Any, Any]:
    from polyhop.graph import DenseFeatures
    from polyhop.partition import partition

    graph = load_real(name)
    assert not isinstance(graph, str), "it was there when the section began"
    if isinstance(graph.x, DenseFeatures):
        graph = narrowed(graph)
    return graph, partition(graph, NUM_RANKS, "metis")


def _trained(
    line: Any, graph: Any, made: Any, model_name: str, options: dict[str, Any], seed: int, epochs: int
) -> float:
    from polyhop.partition import share
    from polyhop.trainer import Trainer

    model = model_of(
        model_name, graph.num_features, graph.num_classes, HIDDEN, norm="layer_norm", seed=1000 + seed
    )
    trainer = Trainer(
        "halo", max_epochs=epochs, eval_every=JUDGED, lr=LR, seed=seed, device="cpu", progress="none", **options
    )  # fmt: skip
    result = trainer.fit(model, share(graph, made, line.rank), line=line)
    return float(result.test) if result.test is not None else math.nan
