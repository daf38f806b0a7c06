"""Neighbour sampling with relabelling of whole mini-batches, in CPU time, against DGL's fused sampler."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import dgl_side
from benchmarks.graphs import describe, skewed
from benchmarks.harness import Figure, alternate
from polyhop.graph import Graph
from polyhop.sample import NeighborLoader, NeighbourSampler

__all__ = ["run"]

NUM_NEIGHBORS = [15, 10, 5]  # from the seeds outward
BATCH = 1024


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``sampler_medges_per_core``, ``sampler_vs_dgl``, ``sampler_2thread_growth``."""
    graph = skewed(200_000, 5_700_000) if is_quick else skewed(2_000_000, 57_000_000)
    print("  " + describe(graph), flush=True)
    order = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    batches = list(order[: 16 * BATCH].split(BATCH))
    growth = _growth(
        graph, list(order[: 48 * BATCH].split(BATCH))
    )  # before DGL and its threads are in the process
    edges: dict[str, int] = {}
    sides = _sides(graph, batches, edges)
    times = alternate(sides, repeats=5, counts_cpu=True)
    rate = {side: edges[side] / timing.median / 1e6 for side, timing in times.items()}
    for side, timing in times.items():
        print(
            f"  {side}: {edges[side]:,} edges, {timing} CPU, {rate[side]:.2f} M edges per core-second",
            flush=True,
        )
    best = max(rate["dgl fused"], rate["dgl"])
    yield Figure(
        "sampler_medges_per_core",
        rate["polyhop"],
        "M/s",
        f"fan-outs {NUM_NEIGHBORS}, {BATCH} seeds",
        at_least=10,
    )
    yield Figure(
        "sampler_vs_dgl", rate["polyhop"] / best, "x", f"CPU time per edge; dgl {best:.2f} M/s", at_least=1.5
    )
    yield growth
    yield _loader_rate(graph, order[: 16 * BATCH])


def _sides(graph: Graph, batches: list[Tensor], edges: dict[str, int]) -> dict[str, Callable[[], None]]:
    sampler = NeighbourSampler(graph, NUM_NEIGHBORS, seed=0)

    def ours() -> None:
        drawn = (sampler.sample(seeds, 0, step) for step, seeds in enumerate(batches))
        edges["polyhop"] = sum(block.num_edges for batch in drawn for block in batch.blocks)

    made = dgl_side.graph(graph, formats=False)

    def theirs(name: str, is_fused: bool) -> Callable[[], None]:
        dgl_sampler = dgl_side.sampler(NUM_NEIGHBORS, is_fused=is_fused)

        def draw() -> None:
            drawn = (dgl_sampler.sample(made, seeds)[2] for seeds in batches)
            edges[name] = sum(block.num_edges() for blocks in drawn for block in blocks)

        return draw

    return {"polyhop": ours, "dgl fused": theirs("dgl fused", True), "dgl": theirs("dgl", False)}


def _growth(graph: Graph, batches: list[Tensor]) -> Figure:
    """CPU time of the same batches drawn by two threads at once, each with batches of its own, over one thread."""
    sampler = NeighbourSampler(graph, NUM_NEIGHBORS, seed=0)

    def draw(mine: list[Tensor]) -> None:
        for step, seeds in enumerate(mine):
            sampler.sample(seeds, 0, step)

    def two() -> None:
        threads = [threading.Thread(target=draw, args=(batches[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    times = alternate({"one": lambda: draw(batches), "two": two}, repeats=7, counts_cpu=True)
    gain = statistics.median(times["one"].wall) / statistics.median(times["two"].wall)
    details = f"one thread {times['one']}, two threads {times['two']}; wall time {gain:.2f} x faster"
    return Figure(
        "sampler_2thread_growth", times["two"].median / times["one"].median, "x", details, at_most=1.15
    )


def _loader_rate(graph: Graph, seeds: Tensor) -> Figure:
    """Edges per wall second through the loader with two sampling threads, no features."""
    loader = NeighborLoader(graph, NUM_NEIGHBORS, seeds, batch_size=BATCH, num_workers=2, gather=False)

    def draw() -> int:
        return sum(block.num_edges for loaded in loader.batches(0) for block in loaded.batch.blocks)

    total = draw()
    timing = alternate({"loader": draw}, repeats=3)["loader"]
    return Figure(
        "loader_medges_per_s", total / timing.median / 1e6, "M/s", "two sampling threads, wall time"
    )
