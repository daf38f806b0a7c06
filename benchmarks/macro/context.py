"""Section ``context``: published epochs of other systems beside one that our cost model expects of a cluster. No claim.

Nothing is run. The cluster and what a mini-batch costs there are assumptions, all stated in the details; the published times
are those of their authors, on other machines and, for two of them, on GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.harness import Figure
from polyhop.sample.reuse import Reuse
from polyhop.strategies.macro_plan import Facts, choose, seconds

__all__ = ["run"]

PUBLISHED = (
    "DistDGL 13 s an epoch (100 M nodes, 3 B edges, 16 machines); DistDGLv2 5 to 10 s (hundreds of millions of nodes, 64 "
    "GPUs); DistGNN-MB 2.0 s (papers100M, GraphSAGE, 32 machines); P3: ratios (up to 7 times DGL), no seconds known here"
)
HOSTS, TRAIN, BATCH = 32, 1_207_179, 1000  # papers100M's train nodes; seeds of a rank
WIDTH, LAYERS = 128, 3
INPUTS, REMOTE = 450_000, 0.45  # nodes of a mini-batch; the share of them that is remote: as on graph A
NODES = 111_059_956
BYTES_PER_S, LATENCY_S = 100e9 / 8 * 0.9, 30e-6
COMPUTE_S, BATCH_CPU_S = 0.10, 0.03  # of a step on two sockets: 450,000 rows of 128 read, 60 GFLOP; sampling
MEMORY_BYTES = 16 << 30


def run(*, is_quick: bool) -> Iterator[Figure]:
    """One simulated epoch."""
    steps = -(-TRAIN // (HOSTS * BATCH))
    facts = Facts(
        steps,
        LAYERS,
        HOSTS,
        _reuse(INPUTS * REMOTE, NODES * (1 - 1 / HOSTS)),
        row_bytes=4.0 * WIDTH + 8,
        pool_row_bytes=4.0 * WIDTH + 40,
        structure_bytes=4.0 * INPUTS,
        block_bytes=30.0 * INPUTS,
        gradient_bytes=2 * 4 * 200_000,
        latency_s=LATENCY_S,
        bytes_per_s=BYTES_PER_S,
        compute_s=COMPUTE_S,
        batch_cpu_s=BATCH_CPU_S,
        row_cpu_s=1e-7,
        memory_bytes=MEMORY_BYTES,
        num_epochs=20,
        num_rounds=4 * LAYERS,
    )
    found = []
    for gbit in (100, 10, 1):
        given = replace(facts, bytes_per_s=gbit * 1e9 / 8 * 0.9)
        choice = choose(given)
        found.append(
            f"{gbit} Gbit/s: k={choice.k} {choice.seconds:.1f} s, one at a time {seconds(given, 1):.1f} s"
        )
    assumed = (
        f"simulated, not run: {HOSTS} hosts, papers100M's shape, GraphSAGE {LAYERS} layers, {steps} steps of {BATCH} seeds "
        f"a host, {INPUTS:,} inputs of {WIDTH} columns of which {REMOTE:.0%} remote, {1000 * COMPUTE_S:.0f} ms of "
        f"computing a step, {MEMORY_BYTES >> 30} GiB a host: all assumed; {'; '.join(found)}"
    )
    details = f"{assumed}. Published, for context only: {PUBLISHED}"
    yield Figure("context_simulated_epoch_s", choose(facts).seconds, "s", details)


def _reuse(rows: float, num_nodes: float) -> Reuse:
    """Remote nodes in a power law whose mini-batch reads so many rows: hubs in nearly every one, most nodes in few."""
    share = (torch.arange(1, 4097, dtype=torch.float64) - 0.5) / 4096
    weight = share ** (-1 / 1.4)
    count = torch.full_like(weight, num_nodes / weight.numel())
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = Reuse(middle * weight, count).distinct(1)
        low, high = (middle, high) if found < rows else (low, middle)
    return Reuse(high * weight, count)
