"""Section ``redundancy``: what ranks with mini-batches of their own load and compute twice. Counts: any machine will do."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.split.graphs import products, rmat
from polyhop.graph import Graph
from polyhop.sample.presample import Trial
from polyhop.sample.splitting import redundancy

__all__ = ["run"]

FAN_OUTS, BATCH, NUM_BATCHES = [15, 15, 15], 1024, 8
RANKS = (2, 4, 8)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Rows loaded and edges computed by data parallelism, over those of one split mini-batch."""
    yield from _of(rmat(13 if is_quick else 17), 64 if is_quick else BATCH, "", aim=None if is_quick else 2.5)
    yield from _of(products(0.01 if is_quick else 0.05), 64 if is_quick else BATCH, "_products", aim=None)


def _of(graph: Graph, batch: int, end: str, aim: float | None) -> Iterator[Figure]:
    print(f"  {describe(graph)}", flush=True)
    trial = Trial(graph, FAN_OUTS, batch)
    for num_ranks in RANKS:
        found = redundancy(trial, num_ranks, min(NUM_BATCHES, len(trial)))
        details = f"{num_ranks} ranks, {batch} seeds in all, fan-out {FAN_OUTS}, {graph.name}"
        name = f"load_ratio_p{num_ranks}{end}"
        yield Figure(name, found.rows, "x", details, at_least=aim if num_ranks == 4 else None)
        yield Figure(f"edge_ratio_p{num_ranks}{end}", found.edges, "x", details)
