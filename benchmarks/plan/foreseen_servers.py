"""What the planner foresees of functions against servers without them and against servers with GPUs, by published rates.

Functions are as many as are worth most, as the authors' autotuner looks for; each is paid for while it has a task.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from benchmarks.plan.comparisons import Comparison
from polyhop.serverless.advice import Choice, Plan, make_plan
from polyhop.serverless.cluster import EPOCHS_RATIO, Cluster
from polyhop.serverless.prices import load_prices
from polyhop.serverless.rates import PUBLISHED
from polyhop.serverless.shapes import Shape
from polyhop.serverless.value import Outcome, ratios

__all__ = ["predicted"]

_PER_SERVER = 100  # functions that one server may have


def predicted(comparison: Comparison) -> float:
    """The ratio as foreseen, of time or of value."""
    graph, cluster, more = comparison.graph, comparison.cluster, comparison.more
    sizes = (graph["num_nodes"], graph["num_edges"], tuple(graph["widths"]))
    hosts = (cluster["server"], cluster["gpu_server"], cluster["hosts"])
    plan = _plan(
        graph["name"], comparison.model["kind"], sizes, hosts, more.get("mode", 0), graph.get("halo")
    )
    first, second = (
        _outcome(comparison, plan, side["name"]) for side in (comparison.system, comparison.baseline)
    )
    found = ratios(first, second)
    return found.speed if more["quantity"] == "seconds" else found.value


@cache
def _plan(
    name: str,
    model: str,
    sizes: tuple[int, int, tuple[int, ...]],
    hosts: tuple[str, str, int],
    mode: str | int,
    ghosts: float | None,
) -> Plan:
    prices = load_prices()
    server, gpu, count = hosts
    functions = replace(prices.functions, concurrency=_PER_SERVER * count)
    cluster = Cluster(prices.server(server), count)
    given = replace(prices, functions=functions)
    rates = replace(PUBLISHED, server_bytes=2.5e9)
    return make_plan(
        Shape(
            name, *sizes, model=model, recomputes=False
        ),  # their released code sends activations again (1.8)
        cluster,
        rates,
        given,
        mode=mode,
        ghosts=ghosts,
        gpu=prices.server(gpu),
        parks=False,
    )


def _outcome(comparison: Comparison, plan: Plan, name: str) -> Outcome:
    """Where the set-up says how many more epochs staleness took on this graph, that many."""
    chosen: dict[str, Choice | None] = {"functions": plan.best, "CPU only": plan.cpu, "GPUs": plan.gpu}
    choice = chosen[name]
    assert choice is not None, "all three are compared"
    told = comparison.graph.get("epochs_of_staleness_0")
    if name != "functions" or comparison.more.get("mode", 0) != 0 or told is None:
        return choice.outcome
    times, found = told / EPOCHS_RATIO[0], choice.outcome
    return Outcome(found.name, times * found.seconds, times * found.dollars)
