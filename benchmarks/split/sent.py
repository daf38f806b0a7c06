"""Section ``sent``: bytes of a step of every way to train the same mini-batches, counted on four virtual ranks.

Without the gradients of the weights, which all send alike. Counts, so any machine will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness import Figure
from benchmarks.split.graphs import blocks, rmat, with_features
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.nn import GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.sample.splitting import presampled
from polyhop.strategies import Team, find, place
from polyhop.train.loss import cross_entropy_sum

__all__ = ["run"]

NUM_RANKS, FAN_OUTS, STEPS = 4, [10, 10, 10], 4
DEPENDENCE = 32  # steps
PLAIN = {"split_sums": False}
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "split": ("split", PLAIN),
    "data": ("data", {}),
    "data_cache": ("data", {"cache_bytes": "tenth"}),
    "data_striped": ("data", {"cache_bytes": "tenth", "cache_ranks": NUM_RANKS}),
    "pushpull": ("pushpull", {}),
    "depth2": ("split", {"split_depth": 2, **PLAIN}),
    "depth1": ("split", {"split_depth": 1, **PLAIN}),
    "copies": ("split", {"cache_bytes": "tenth", **PLAIN}),
    "sums": ("split", {}),
    "sums_copies": ("split", {"cache_bytes": "tenth"}),
    "bits16": ("split", {"bits": 16, **PLAIN}),
    "bits8": ("split", {"bits": 8, **PLAIN}),
    "labor": ("split", {"sampler": "labor", **PLAIN}),
}


def run(*, is_quick: bool) -> Iterator[Figure]:
    """For each graph, width of inputs and hidden layers: bytes of split, and of the others over them."""
    size, levels = (12_000, 13) if is_quick else (60_000, 16)
    shapes = ((128, 64),) if is_quick else ((128, 64), (512, 64), (128, 256), (512, 256))
    community, skewed = blocks(size), rmat(levels)
    parts = {
        "blocks": (
            community,
            presampled(community, NUM_RANKS, FAN_OUTS, size // 60, method="metis").partition,
        ),
        "rmat_by_lot": (skewed, partition(skewed, NUM_RANKS, "hash")),
    }
    for name, (graph, made) in parts.items():
        yield _dependent(name, with_features(graph, 128), made, size // 600)
        for width, hidden in shapes:
            yield from _of(f"{name}_{width}_{hidden}", with_features(graph, width), made, hidden, size // 60)


def _of(name: str, graph: Graph, made: Partition, hidden: int, batch: int) -> Iterator[Figure]:
    sent = {
        side: sum(run_in_threads(NUM_RANKS, _sent, graph, made, hidden, batch, *SIDES[side])) / 1e6
        for side in SIDES
    }
    told = ", ".join(f"{side} {size:.2f}" for side, size in sent.items())
    print(f"  {name}: MB a step of all ranks: {told}", flush=True)
    yield Figure(f"sent_split_{name}", sent["split"], "MB", f"a step of {batch} seeds, all ranks; {told}")
    for side in SIDES:
        if side != "split":
            yield Figure(
                f"sent_{side}_vs_split_{name}", sent[side] / sent["split"], "x", "bytes over those of split"
            )


def _dependent(name: str, graph: Graph, made: Partition, batch: int) -> Figure:
    """What it saves that LABOR's draws turn slowly: rows that a window of macro fetches once."""
    sent = {}
    for steps in (1, 8, DEPENDENCE):
        options = {"sampler": "labor", "labor_dependence": steps, "macro": 8, "delta": False}
        sent[steps] = sum(run_in_threads(NUM_RANKS, _sent, graph, made, 64, batch, "macro", options)) / 1e6
    told = ", ".join(f"{steps}: {size:.2f} MB" for steps, size in sent.items())
    print(f"  {name}: macro, windows of 8, draws turning over so many steps: {told}", flush=True)
    note = f"macro, windows of 8 mini-batches of {batch} seeds, bytes over those of independent LABOR; a step of all: {told}"
    return Figure(f"sent_dependent_vs_labor_{name}", sent[DEPENDENCE] / sent[1], "x", note)


def _sent(
    line: Collective,
    graph: Graph,
    made: Partition,
    hidden: int,
    batch: int,
    strategy: str,
    options: dict[str, Any],
) -> float:
    """Bytes of a step that this rank sends, without gradients of the weights."""
    torch.set_num_threads(1)
    held = share(graph, made, line.rank)
    assert held.split is not None
    assert graph.x is not None
    tenth = 4 * graph.num_features * graph.num_nodes // (10 * NUM_RANKS)
    given = {name: tenth if value == "tenth" else value for name, value in options.items()}
    module = find(strategy)
    config = module.Config(num_neighbors=FAN_OUTS, batch_size=batch, prefetch=1, **given)
    team, placement = Team(line), place("cpu", "32-true")
    model = GraphSAGE(graph.num_features, hidden, num_layers=len(FAN_OUTS), out_channels=graph.num_classes)
    step = module.build(
        model, held, config, train_ids=held.split.train, whole=module.hold(held, placement, team, config),
        loss=cross_entropy_sum, team=team,
    )  # fmt: skip
    batches, before, steps = step.batches(0), line.traffic.now(), 0
    for number, each in enumerate(batches):
        model.zero_grad(set_to_none=True)
        step.gradients(each, Key(0, 0, number))
        steps += 1
    spent = line.traffic.now() - before  # of a whole epoch: what is drawn ahead is in it
    return sum(size for kind, size in spent.bytes.items() if kind != "gradients") / steps
