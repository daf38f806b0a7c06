"""Section ``phases``: where a split step's seconds go with four virtual ranks on one device: the GPU where there is one.

Ranks are threads that share the device and this machine's cores, and messages are copies in memory: the phases can be
compared with each other, and between devices, but say nothing of the speed of several devices.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Figure
from benchmarks.split.graphs import blocks, with_features
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.nn import GraphSAGE
from polyhop.partition import Partition, default_method, partition, share
from polyhop.strategies import Team, place, split
from polyhop.trace import Trace
from polyhop.train.loss import cross_entropy_sum

__all__ = ["run"]

NUM_RANKS, FAN_OUTS, BATCH = 4, [10, 10, 10], 1024
WIDTH, HIDDEN = 128, 256
NAMES = ("sample", "load", "forward", "backward", "wait", "sum")


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Milliseconds of a step and rank in each phase, on the CPU and on the GPU; and how far their gradients are apart."""
    os.environ["POLYHOP_KERNELS"] = "auto"  # there are none for GPUs
    graph = with_features(blocks(12_000 if is_quick else 60_000), WIDTH)
    made = partition(graph, NUM_RANKS, default_method())
    devices, grads = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])], {}
    for device in devices:
        found = run_in_threads(NUM_RANKS, _steps, graph, made, device)
        details = f"{NUM_RANKS} virtual ranks on one {device}, {BATCH} seeds a step, {WIDTH} features, hidden {HIDDEN}"
        for name in (*NAMES, "step"):
            value = 1000 * mean(spent[name] for spent, _ in found)
            yield Figure(f"phase_{name}_ms_{device}", value, "ms", details)
        half = 4 * WIDTH * graph.num_nodes // (2 * NUM_RANKS)
        found = run_in_threads(NUM_RANKS, _steps, graph, made, device, "32-true", half)
        for name in ("load", "step"):
            value = 1000 * mean(spent[name] for spent, _ in found)
            share = mean(spent["hot"] for spent, _ in found)
            more = f"; half of the own rows stay on the device: {100 * share:.0f} % of those loaded"
            yield Figure(f"phase_{name}_ms_{device}_hot", value, "ms", details + more)
    if len(devices) > 1:
        for precision, most in (("32-true", None), ("64-true", 1e-10)):
            for device in devices:
                grads[device] = run_in_threads(NUM_RANKS, _steps, graph, made, device, precision)[0][1]
            apart = float((grads["cuda"] - grads["cpu"]).norm() / grads["cpu"].norm())
            details = (
                f"gradients of the last step, GPU from CPU, {precision}: norm of the difference over the norm"
            )
            yield Figure(f"phase_gradients_apart_{precision[:2]}", apart, "share", details, at_most=most)


def _steps(
    line: Collective,
    graph: Graph,
    made: Partition,
    device: str,
    precision: str = "32-true",
    hot_bytes: int = 0,
) -> tuple[dict[str, float], Tensor]:
    """(seconds of a step in each phase, after a first epoch that warms up, and the share of hot rows; the last step's
    gradients)."""
    held, trace, team, placement = (
        share(graph, made, line.rank),
        Trace(),
        Team(line),
        place(device, precision),
    )
    assert held.split is not None
    model = GraphSAGE(WIDTH, HIDDEN, num_layers=3, out_channels=graph.num_classes)
    made_of = torch.Generator().manual_seed(0)  # ranks are threads, and torch's own generator is one
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05, generator=made_of)
    model.to(placement.device, placement.dtype)
    config = split.Config(num_neighbors=FAN_OUTS, batch_size=BATCH, prefetch=1, device_cache_bytes=hot_bytes)
    step: Any = split.build(
        model, held, config, train_ids=held.split.train, whole=split.hold(held, placement, team, config),
        loss=cross_entropy_sum, trace=trace, team=team,
    )  # fmt: skip
    steps, before, whole = 0, trace.totals(), 0.0
    for epoch in range(2):
        if epoch == 1:
            before = trace.totals()
        for number, batch in enumerate(step.batches(epoch)):
            model.zero_grad(set_to_none=True)
            start = time.perf_counter()
            float(step.gradients(batch, Key(0, epoch, number)))  # waits for the device
            if epoch == 1:
                whole, steps = whole + time.perf_counter() - start, steps + 1
    step.close()
    spent = {name: trace.totals().get(name, 0.0) - before.get(name, 0.0) for name in NAMES}
    grads = torch.cat([p.grad.detach().cpu().reshape(-1) for p in model.parameters() if p.grad is not None])
    each = {name: seconds / steps for name, seconds in spent.items()}
    return {**each, "step": whole / steps, "hot": step.loader.num_hot / step.loader.num_loaded}, grads
