"""Section ``savings``: bytes that fusing the loss and computing again keep off the wire, counted against computed.

A real graph if there is one, GCN of two layers, two servers with a function each; every combination of both options is run
and what tasks and results weigh is counted. Differences are held against those that ``serverless_cost`` computes and, for
GCN, against formulas (N nodes, 4-byte values, H hidden columns, C that the last graph operation gives):

    the loss apart    the last piece's rows and its labels go out twice       N (4 C + 8)
    kept              what relu gave comes back, and goes out again           2 N 4 H
    both              and of the last piece, what its loss saved              2 N 4 C more
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks.graphs import describe
from benchmarks.halo.graphs import load_real, make
from benchmarks.harness import Figure, busy_cores
from benchmarks.serverless.running import Running, gnn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share

__all__ = ["by_hand", "run"]

NUM_RANKS, HIDDEN, INTERVALS = 2, 64, 8
WEIGHED = ("tasks", "results")
Way = tuple[bool, bool]
"""(fuses the loss, computes again)"""
WAYS: tuple[Way, ...] = tuple(product((True, False), repeat=2))


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Errors in bytes, which must be 0, and what is saved of an epoch's bytes."""
    real = None if is_quick else load_real("amazon-computers")
    graph = make("blurred", scale=1 / 8) if real is None or isinstance(real, str) else real
    epochs = 1 if is_quick else 3
    print(f"  {describe(graph)}; {NUM_RANKS} servers, {epochs} epochs each way", flush=True)
    made, load = partition(graph, NUM_RANKS, "hash"), busy_cores()
    ran = {way: _ran(graph, made, way, epochs) for way in WAYS}
    for way, (counted, accounted) in ran.items():
        print(f"  {_name(way):32} counted {counted:,} bytes an epoch, computed {accounted:,}", flush=True)
    yield from figures(ran, graph.num_nodes, HIDDEN, graph.num_classes, f"load {load:.1f} cores")


def figures(
    ran: dict[Way, tuple[int, int]], num_nodes: int, hidden: int, classes: int, load: str
) -> Iterator[Figure]:
    """Of counted and computed bytes of an epoch, each way."""
    best = ran[True, True]
    counted = {way: ran[way][0] - best[0] for way in WAYS[1:]}
    computed = {way: ran[way][1] - best[1] for way in WAYS[1:]}
    hand = {way: by_hand(way, num_nodes, hidden, classes) for way in WAYS[1:]}
    for name, expected in (("savings_error_bytes", computed), ("savings_formula_error_bytes", hand)):
        off = {way: counted[way] - expected[way] for way in counted}
        told = ", ".join(f"{_name(way)} {counted[way]:,} more ({off[way]:+,})" for way in counted)
        yield Figure(name, max(map(abs, off.values())), "bytes", f"an epoch, {told}; {load}", at_most=0)
    both = (False, False)
    shares = {way: 100 * counted[way] / (best[0] + counted[way]) for way in counted}
    told = ", ".join(f"against {_name(way)} {shares[way]:.1f} %" for way in counted)
    yield Figure("bytes_saved", shares[both], "%", f"of tasks and results of an epoch: {told}")


def by_hand(way: Way, num_nodes: int, hidden: int, classes: int) -> int:
    """Bytes of an epoch beyond a fused loss and nothing kept, of a GCN of two layers that maps before the second."""
    fuses, remakes = way
    apart = 0 if fuses else num_nodes * (4 * classes + 8)
    kept = 0 if remakes else 2 * num_nodes * 4 * hidden
    return apart + kept + (0 if fuses or remakes else 2 * num_nodes * 4 * classes)


def _name(way: Way) -> str:
    fuses, remakes = way
    return f"{'loss fused' if fuses else 'loss apart'}, {'computed again' if remakes else 'kept'}"


def _ran(graph: Graph, made: Partition, way: Way, epochs: int) -> tuple[int, int]:
    """(counted, computed) of an epoch, all servers together."""
    found = run_in_threads(NUM_RANKS, _on_rank, graph, made, way, epochs)
    counted = sum(_weigh(each) for each, _ in found)
    assert counted % epochs == 0, f"{counted} bytes in {epochs} epochs: a task was sent twice"
    return counted // epochs, sum(_weigh(each) for _, each in found)


def _weigh(cost: Cost) -> int:
    return sum(cost.bytes[kind] for kind in WEIGHED)


def _on_rank(line: Collective, graph: Graph, made: Partition, way: Way, epochs: int) -> tuple[Cost, Cost]:
    held = share(graph, made, line.rank)
    options: dict[str, Any] = {
        "functions": 1, "intervals": INTERVALS, "fuse_loss": way[0], "rematerialise": way[1], "max_epochs": epochs
    }  # fmt: skip
    running = Running(gnn(held, HIDDEN, 2), held, line, options)
    try:
        for _ in range(epochs):
            running.train()
        return running.step.counted(), running.step.account()
    finally:
        running.close()
