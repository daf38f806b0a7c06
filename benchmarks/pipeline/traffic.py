"""Section ``traffic``: bytes of an epoch of eight ranks, counted, where the graph is spread and where the layers are.

A graph cut like Reddit (R(8) rows that eight parts read of one another, per node), 32 layers. Graph parallelism as
published maps rows before the first layer sends them, so every layer's H columns cross both ways: ``2 b n R L H``. Plain
``halo`` sends input rows instead, forward only, so these are made 2 H wide here: then both send the same. Counts, so any
machine will do; ratios depend on neither the number of nodes nor H. Gradients of the weights are told beside: those of a
real graph are small beside its rows, those of this one are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.halo.graphs import Cut, cut
from benchmarks.harness import Figure
from benchmarks.pipeline.workload import (
    NAIVE,
    OPTIMISED,
    OURS,
    SIDES,
    SWEPT,
    build_step,
    deep_model,
    reddit_like,
)
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.kernels.keys import Key
from polyhop.partition import share
from polyhop.strategies.pipeline_cost import graph_parallel_volume, pipeline_volume

__all__ = ["run"]

NUM_RANKS, NUM_LAYERS, HIDDEN = 8, 32, 8
NODES = 8192
AIMS = {"gcn": 11.0, "gcnii": 5.9}
BESIDE = ("gcn", "gcnii", "deepgcn")
LINK_BYTES_PER_S, LATENCY_S = 10e9 / 8, 50e-6
LINK_NODES, LINK_HIDDEN = 232_965, 100  # Reddit's: what the time on the link is told for
EXACTLY = 1e-12


@dataclass(frozen=True)
class _Counted:
    """Of a side, an epoch: bytes of rows of all ranks; of the busiest rank; its messages; bytes of gradients of all."""

    rows: int
    busiest: int
    messages: int
    gradients: int

    @classmethod
    def of(cls, costs: list[Cost]) -> _Counted:
        sent = [cost.bytes.get("hidden", 0) for cost in costs]
        return cls(
            sum(sent),
            max(sent),
            max(cost.messages.get("hidden", 0) for cost in costs),
            sum(cost.bytes.get("gradients", 0) for cost in costs),
        )

    def link_s(self) -> float:
        """Seconds that the busiest rank's rows take on a link, with as many nodes and columns as Reddit's runs had."""
        grown = self.busiest * LINK_NODES * LINK_HIDDEN / (NODES * HIDDEN)
        return grown / LINK_BYTES_PER_S + self.messages * LATENCY_S


def run(*, is_quick: bool) -> Iterator[Figure]:
    """R(8); of each model bytes of graph parallelism over those of the pipeline, counted and by the formula."""
    made = cut("like reddit", reddit_like(NODES, 2 * HIDDEN), NUM_RANKS)
    print(f"  {made}", flush=True)
    yield Figure(
        "replicas_8", made.halo, "rows a node", f"R(8): rows read across the cut; Reddit's is 2.61; {made}"
    )
    for model in AIMS if is_quick else BESIDE:
        yield from _of(model, made)


def _of(model: str, made: Cut) -> Iterator[Figure]:
    ran = {side: run_in_threads(NUM_RANKS, _sent, made, model, side) for side in SIDES}
    counted = {side: _Counted.of([cost for cost, _ in ranks]) for side, ranks in ran.items()}
    crossing = ran[OURS][0][1]
    for side, one in counted.items():
        print(
            f"  {model}, {side}: {one.rows / 1e6:.2f} MB of rows of all ranks, {one.busiest / 1e6:.2f} MB in {one.messages} "
            f"messages of the busiest, {one.gradients / 1e6:.2f} MB of gradients of weights",
            flush=True,
        )
    columns, n = [HIDDEN] * NUM_LAYERS, made.graph.num_nodes
    expected = (
        graph_parallel_volume(n, columns, made.halo, NUM_RANKS, 0).total,
        pipeline_volume(n, crossing).total,
    )
    yield from _exactly(model, (counted[NAIVE].rows, counted[OURS].rows), expected)
    ratio = counted[NAIVE].rows / counted[OURS].rows
    details = (
        f"{model}, {NUM_LAYERS} layers, {NUM_RANKS} ranks, R(8) {made.halo:.3f}: plain halo {counted[NAIVE].rows} bytes of "
        f"rows an epoch, pipeline {counted[OURS].rows}, {crossing[0] / HIDDEN:g} H between stages; formula "
        f"{expected[0] / expected[1]:.4f}"
    )
    yield Figure(f"volume_ratio_{model}", ratio, "x", details, at_least=AIMS.get(model))
    details = f"the same over optimised halo, {counted[OPTIMISED].rows} bytes"
    yield Figure(
        f"volume_ratio_{model}_vs_optimised", counted[OPTIMISED].rows / counted[OURS].rows, "x", details
    )
    swept = counted[SWEPT].rows
    details = f"plain halo over the pipeline with a sweep before the epoch, {swept} bytes"
    yield Figure(f"volume_ratio_{model}_swept", counted[NAIVE].rows / swept, "x", details)
    for side, end in ((NAIVE, ""), (OPTIMISED, "_vs_optimised")):
        top, bottom = counted[side].link_s(), counted[OURS].link_s()
        details = (
            f"{side} {1000 * top:.0f} ms over pipeline {1000 * bottom:.0f} ms: the busiest rank's rows and messages, "
            f"counted, at {8e-9 * LINK_BYTES_PER_S:g} Gbit/s and {1e6 * LATENCY_S:g} us a message, {LINK_NODES:,} nodes of "
            f"{LINK_HIDDEN}"
        )
        yield Figure(f"link_time_ratio_{model}{end}", top / bottom, "x", details)


def _exactly(model: str, counted: tuple[int, int], expected: tuple[float, float]) -> Iterator[Figure]:
    """How far counters are from the formulas: nothing."""
    away = max(abs(a / b - 1) for a, b in zip(counted, expected, strict=True))
    details = f"{model}: counted {counted}, formulas {tuple(round(each) for each in expected)}; plain halo, pipeline"
    yield Figure(f"volume_vs_formula_{model}", away, "off", details, at_most=EXACTLY)


def _sent(line: Collective, made: Cut, model_name: str, side: str) -> tuple[Cost, list[int]]:
    """What this rank sends in the second epoch (the first has what crosses once), and columns between stages."""
    torch.set_num_threads(1)
    strategy, options = SIDES[side]
    held = share(made.graph, made.partition, line.rank)
    model = deep_model(model_name, held, NUM_LAYERS, HIDDEN)
    step: Any = build_step(strategy, model, held, line, options)
    for epoch in range(2):
        line.barrier()
        before = line.traffic.now()
        model.zero_grad(set_to_none=True)
        step.gradients(0, Key(0, epoch))
        spent = line.traffic.now() - before
    columns = [boundary.columns for boundary in step.boundaries] if side == OURS else []
    step.close()
    return spent, columns
