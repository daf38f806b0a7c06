"""What functions of a cloud would be worth to training on servers: ``polyhop plan NAME --strategy serverless``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.cli import console
from polyhop.errors import ConfigError

if TYPE_CHECKING:
    from polyhop.datasets import GraphSizes
    from polyhop.serverless.advice import Choice, Plan
    from polyhop.serverless.shapes import Shape
    from polyhop.serverless.simulate import Played

__all__ = ["Asked", "advise"]

_PAPER = "paper:"
_MOST_PLAYED = 200_000  # tasks


@dataclass(frozen=True)
class Asked:
    """Options of the command."""

    name: str
    model: str
    layers: int
    hidden: int
    heads: int
    data_dir: Path | None
    nodes: Path | None
    servers: str
    num_servers: int
    function_memory: int
    processor: str
    intervals: int | None
    staleness: int | None
    gpu_servers: str
    halo: float | None
    deadline: float | None
    budget: float | None
    prices: Path | None
    rates: Path | None


def advise(asked: Asked, *, as_json: bool) -> None:
    """Say what an epoch would take and cost, on servers alone and with functions."""
    from polyhop.serverless.advice import make_plan
    from polyhop.serverless.cluster import Cluster
    from polyhop.serverless.prices import load_prices
    from polyhop.serverless.rates import PUBLISHED, load_rates

    table = load_prices(asked.prices)
    cluster = Cluster(
        table.server(asked.servers), asked.num_servers, asked.function_memory, processor=asked.processor
    )
    found = PUBLISHED if asked.rates is None else load_rates(asked.rates)
    with_gpus = table.server(asked.gpu_servers)
    if not with_gpus.gpus:
        raise ConfigError(f"--gpu-servers {asked.gpu_servers}: the prices know no GPU in it")
    is_known = bool(found.gpu_gather and found.gpu_flops)
    made = make_plan(
        _shape(asked), cluster, found, table,
        mode="pipe" if asked.staleness is None else asked.staleness, ghosts=asked.halo,
        num_intervals=asked.intervals, gpu=with_gpus if is_known else None, deadline_s=asked.deadline,
        budget=asked.budget,
    )  # fmt: skip
    played = _played(made)
    if as_json:
        console.print_json(
            {"assumed": dict(_assumed(made)), **made.to_json(), "played_s": played and played.epoch_s}
        )
    else:
        _show(made, played)


def _shape(asked: Asked) -> Shape:
    """Sizes of the graph and widths of the model: what a plan needs to know of them."""
    name, model, layers, hidden, heads = asked.name, asked.model, asked.layers, asked.hidden, asked.heads
    from polyhop.errors import unknown
    from polyhop.serverless.shapes import MODELS, PAPER, Shape

    if model not in MODELS:
        raise ConfigError(f"{unknown('model', model, MODELS)} Others have no plan on functions yet.")
    if name.startswith(_PAPER):
        known = {_PAPER + each: shape for each, shape in PAPER.items()}
        if name not in known:
            raise ConfigError(unknown("graph", name, known))
        shape = known[name]
        widths = (shape.widths[0], *[hidden] * (layers - 1), shape.widths[-1])
        return replace(shape, widths=widths, model=model, heads=heads)
    from polyhop import datasets

    sizes = datasets.sizes(name, data_dir=asked.data_dir, nodes=asked.nodes)
    if not sizes.num_features or not sizes.num_classes:
        raise ConfigError(
            f"graph {sizes.name!r} has {sizes.num_features} features and {sizes.num_classes} classes: a plan needs both"
        )
    widths = (sizes.num_features, *[hidden] * (layers - 1), sizes.num_classes)
    return Shape(sizes.name, sizes.num_nodes, sizes.num_edges, widths, model, _orders(sizes, widths), heads)


def _orders(sizes: GraphSizes, widths: tuple[int, ...]) -> tuple[bool, ...]:
    """Of each layer, whether training would map first: the rule of the layers themselves."""
    from polyhop.graph import Sizes
    from polyhop.nn.layer import cheaper_to_map_first

    whole = Sizes(sizes.num_nodes, sizes.num_nodes, sizes.num_edges)
    return tuple(
        cheaper_to_map_first(whole, before, after, at > 0)
        for at, (before, after) in enumerate(pairwise(widths))
    )


def _played(plan: Plan) -> Played | None:
    """The epoch of the chosen cluster, played through, where that takes a moment only."""
    from polyhop.serverless.cluster import tasks_of
    from polyhop.serverless.simulate import simulate

    best = plan.best
    tasks = tasks_of(plan.shape, best.cluster, plan.rates, plan.ghosts)
    if len(tasks) * best.cluster.num_intervals * best.cluster.num_servers > _MOST_PLAYED:
        return None
    return simulate(tasks, best.cluster, plan.rates, best.num_functions, mode=plan.mode)


def _assumed(plan: Plan) -> list[tuple[str, str]]:
    """What the figures rest on."""
    from polyhop.serverless.advice import server_bytes
    from polyhop.serverless.cluster import EPOCHS_RATIO

    shape, cluster, rates = plan.shape, plan.best.cluster, plan.rates
    orders = [
        "map" if shape.does_map_first(layer) else "aggregate" for layer in range(1, shape.num_layers + 1)
    ]
    held = server_bytes(shape, cluster, plan.ghosts) / 2**30
    room = float(cluster.server.memory_gib)
    short = "" if held <= room else ": TOO LITTLE MEMORY, take more servers"
    gbit = 8e-9
    hourly = 3600 * float(plan.prices.functions.dollars_per_s(cluster.memory_mb, cluster.processor))
    mode = (
        "layers wait for each other: exact"
        if plan.mode == "pipe"
        else f"staleness {plan.mode}: {EPOCHS_RATIO.get(plan.mode, max(EPOCHS_RATIO.values())):g} epochs do the work of one"
    )
    return [
        ("graph", f"{shape.name}: {shape.num_nodes:,} nodes, {shape.num_edges:,} edges"),
        ("model", f"{shape.model}, columns {' > '.join(map(str, shape.widths))}; first: {', '.join(orders)}"),
        ("servers", f"{cluster.num_servers} {cluster.server.name} at ${float(cluster.server.dollars_per_hour):g}/h, "
                    f"{cluster.cores} vCPUs; each holds some {held:,.1f} of {room:g} GiB{short}"),
        ("functions", f"{cluster.memory_mb} MB, {cluster.processor}, ${hourly:.5f}/h, alive through the epoch, at most "
                      f"{plan.prices.functions.concurrency} at once, inside the servers' network"),
        ("prices", f"{plan.prices.name} ({plan.prices.date}); no servers for weights, no egress"),
        ("rates", rates.source),
        ("", f"{rates.gather:.3g} edge-columns/s and {rates.server_flops:.3g} flop/s a vCPU; "
             f"{rates.flops_of(cluster.memory_mb):.3g} flop/s and {gbit * rates.function_bytes:.3g} Gbit/s a function, "
             f"{gbit * rates.server_bytes:.3g} Gbit/s a server, {1000 * rates.latency_s:g} ms a lease"),
        ("halo", f"a row is read by {plan.ghosts:.2f} other servers"),
        ("order", mode),
    ]  # fmt: skip


def _show(plan: Plan, played: Played | None) -> None:
    print("assumed")
    console.show_table(_assumed(plan), indent=2)
    print("\nan epoch")
    gpu = (
        []
        if plan.gpu is None
        else [(f"{plan.gpu.cluster.num_servers} {plan.gpu.cluster.server.name}", plan.gpu)]
    )
    equal = plan.equal
    more = []
    if equal is not None and equal.cluster.num_servers != plan.cpu.cluster.num_servers:
        more = [(f"CPU only, {equal.cluster.num_servers} servers", equal)]
    _rows(
        [("CPU only", plan.cpu), (f"{plan.best.num_functions} functions each", plan.best), *more, *gpu],
        plan.cpu,
    )
    if played is not None:
        print(f"  played through event by event: {played.epoch_s:.3g} s an epoch with functions")
    print("\nfunctions on each server (keeping up with its cores takes " + _kept_up(plan) + ")")
    _rows([(f"{choice.num_functions:,}", choice) for choice in plan.around()], plan.cpu)
    print("\n" + plan.to_json()["says"])


def _kept_up(plan: Plan) -> str:
    return "more than there may be" if plan.little is None else f"{plan.little:,}"


def _rows(rows: list[tuple[str, Choice]], cpu: Choice) -> None:
    """Time, cost and value of each, and value against CPU only."""
    margin = max(len(name) for name, _ in rows)
    print(
        f"  {'':{margin}}  {'seconds':>9}  {'dollars':>10}  {'value':>9}  {'to CPU':>7}  graph, tensor, scatter s"
    )
    for name, choice in rows:
        one: Any = choice.outcome
        parts = ", ".join(
            f"{part:.3g}" for part in (choice.epoch.graph_s, choice.epoch.tensor_s, choice.epoch.scatter_s)
        )
        print(
            f"  {name:<{margin}}  {one.seconds:9.4g}  {one.dollars:10.4g}  {one.value:9.4g}  "
            f"{one.value / cpu.outcome.value:6.2f}x  {parts}"
        )
