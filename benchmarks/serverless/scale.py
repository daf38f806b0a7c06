"""Section ``scale``: what one server can hand out, and an epoch of a billion edges with 1,000 functions, played through.

leases_per_s        a post with 1,000 connections (two wishes each) that answer tasks without content
bytes_per_s         a post with real functions, 4 MB each way, both ways together
simulated_epoch_s   Friendster's shape (3.6 G edges) on 32 c5n.4xlarge, 1,000 functions of one core, with these limits
same_bits           a real run with as many function processes as this machine bears against one with two: 1 = same weights
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from benchmarks.halo.graphs import make
from benchmarks.harness import Figure, busy_cores
from benchmarks.serverless.emulated import CORE_MB, loads, longest, measured_rates, servers_needed
from benchmarks.serverless.limits import Leases, leases
from benchmarks.serverless.running import Running, gnn, held_alone, launcher
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.serverless.cluster import Cluster, tasks_of
from polyhop.serverless.prices import load_prices
from polyhop.serverless.rates import Rates
from polyhop.serverless.shapes import PAPER, random_ghosts
from polyhop.serverless.simulate import simulate

__all__ = ["run"]

FUNCTIONS, SERVERS, KIND = 1000, 32, "c5n.4xlarge"
INTERVALS = 128
GOOD_CUT = 0.2  # of the rows that servers read of one another where nodes lie at random
MANY, FEW, EPOCHS, LATENCY_S = 40, 2, 3, 0.01


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Limits, then a simulation with them, then many real functions."""
    load = busy_cores()
    counts, tasks = ((50, 200), 1_000) if is_quick else ((200, 1000), 30_000)
    found = [leases(count, tasks) for count in counts]
    for each in found:
        print(f"  {_told(each)}", flush=True)
    yield Figure(
        "leases_per_s", found[-1].per_s, "leases/s",
        f"{'; '.join(map(_told, found))}; server and clients share this machine's cores; load before {load:.1f} cores",
    )  # fmt: skip
    rates = measured_rates(is_quick, found[-1].per_s)
    print(f"  {rates.source}", flush=True)
    yield Figure("bytes_per_s", rates.lease_bytes / 1e6, "MB/s", rates.source)
    yield from _simulated(rates)
    yield _many(is_quick)


def _told(each: Leases) -> str:
    return f"{each.connections} connections {each.per_s:.0f} leases/s, {each.per_cpu_s:.0f} a CPU-second of the server"


def _simulated(rates: Rates) -> Iterator[Figure]:
    prices, shape = load_prices(), PAPER["friendster"]
    cluster = Cluster(prices.server(KIND), SERVERS, CORE_MB, INTERVALS)
    tasks = tasks_of(shape, cluster, rates)
    each, ghosts = FUNCTIONS // SERVERS, random_ghosts(shape.num_nodes, shape.num_edges, SERVERS)
    spent = loads(tasks, cluster, rates, each)
    for mode in ("pipe", 0):
        epoch_s = simulate(tasks, cluster, rates, each, mode=mode, num_epochs=2).epoch_s
        alone_s = simulate(tasks, cluster, rates, 0, mode=mode, num_epochs=2).epoch_s
        cut = tasks_of(shape, cluster, rates, GOOD_CUT * ghosts)
        cut_s = simulate(cut, cluster, rates, each, mode=mode, num_epochs=2).epoch_s
        name = "simulated_epoch_s" if mode == "pipe" else "simulated_epoch_stale_s"
        yield Figure(
            name, epoch_s, "s",
            f"{shape.num_edges / 1e9:.1f} G edges, {SERVERS} {KIND}, {each * SERVERS} functions of a core, {mode}; CPU only "
            f"{alone_s:.3g} s; nodes at random: {ghosts:.0f} other servers read a row, {longest(spent)}; with a cut of a "
            f"fifth of that {cut_s:.3g} s",
        )  # fmt: skip
    needed = {what: servers_needed(spent, SERVERS, what) for what in ("bytes of a post", "leases")}
    told = ", ".join(f"{what}: {count}" for what, count in needed.items())
    yield Figure(
        "servers_for_1000_functions", max(needed.values()), "servers",
        f"so that posts keep {FUNCTIONS} functions of a core busy: {told}",
    )  # fmt: skip


def _many(is_quick: bool) -> Figure:
    """The same run with many functions and with few."""
    many = 6 if is_quick else MANY
    graph = make("blurred", scale=1 / 8)
    hashes, took_part = {}, {}
    for count in (FEW, many):
        ((hashes[count], took_part[count]),) = run_in_threads(1, _trained, graph, count)
        print(f"  {count} functions, {took_part[count]} took part: weights {hashes[count]}", flush=True)
    return Figure(
        "same_bits", float(hashes[FEW] == hashes[many]), "",
        f"{took_part[many]} of {many} function processes did tasks, against {FEW}; pipe, {EPOCHS} epochs, "
        f"{graph.num_nodes:,} nodes", at_least=1,
    )  # fmt: skip


def _trained(line: Collective, graph: Graph, functions: int) -> tuple[str, int]:
    torch.set_num_threads(1)
    options = {"functions": functions, "intervals": 2 * MANY}
    running = Running(
        gnn(graph, 32, 2, dropout=0.3), held_alone(graph), line, options, launcher(latency_s=LATENCY_S)
    )
    try:
        post = running.step.post
        for epoch in range(1000):
            running.train()
            if epoch + 1 == EPOCHS:
                weights = b"".join(value.numpy().tobytes() for value in running.model.state_dict().values())
            if epoch + 1 >= EPOCHS and post.sheets.num_at_work >= functions:
                break  # all have come by now
        return hashlib.sha256(weights).hexdigest()[:12], post.sheets.num_at_work
    finally:
        running.close()
