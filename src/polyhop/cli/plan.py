"""``polyhop plan``: what training a graph would take, every way there is, before anything is loaded or rented."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhop.cli import console
from polyhop.cli.clusters import Asked, known_cluster, plan_computed, plan_for, show_curves, statistics_of
from polyhop.cli.recipe import MODELS, Recipe
from polyhop.errors import ConfigError, unknown

if TYPE_CHECKING:
    from polyhop.plan import Limits, Link, Plan
    from polyhop.plan.curve import Curve
    from polyhop.train.config import Config

__all__ = ["command"]

_PAPER = "paper:"
_MOST_LOOKED_AT = 128  # parts: some 15 s on 2 cores, four times that for twice as many
_HOSTS = "Clusters that need not be there"
_CLOUD = "Functions of a cloud (--strategy serverless --servers KIND)"


# What plans are made for, as errors say it.
_HERE, _ON_CLUSTER = "on hosts like this one", "with --cluster"
_ON_CLOUD, _STATISTICS = "with functions of a cloud", "where statistics alone are written"
_IS_FOR = {
    _HERE: "hosts like this one",
    _ON_CLUSTER: "--cluster",
    _ON_CLOUD: "functions of a cloud (--strategy serverless)",
}
_RANKS = (_HERE, _ON_CLUSTER)

# Option -> which plans use it; all others: every plan.
BELONGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dropout", "fanout", "batch_size", "cache", "partitioner", "split"), (*_RANKS, _STATISTICS)),
    **dict.fromkeys(("workers", "epochs", "exact", "memory", "link", "latency", "out", "explain"), _RANKS),
    **dict.fromkeys(("strategy", "deadline", "budget", "as_json"), (*_RANKS, _ON_CLOUD)),
    "machine": (_HERE,),
    "cluster": (_ON_CLUSTER,),
    "statistics": (_ON_CLUSTER,),
    "curve": (_ON_CLUSTER,),
    "statistics_out": (_ON_CLUSTER, _STATISTICS),
    **dict.fromkeys(
        ("servers", "num_servers", "function_memory", "processor", "intervals", "staleness", "gpu_servers", "halo",
         "prices", "rates"),
        (_ON_CLOUD,),
    ),
}  # fmt: skip
_OF_A_GRAPH = ("partitioner", "split", "nodes")  # which statistics have said already


def command(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(help="A graph, as for train; with --servers also paper:amazon, paper:friendster, ..."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to plan for [default: 1; of a cluster all].", show_default=False),
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="auto: all are compared; or one, whose numbers are chosen.")
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help=" | ".join(MODELS) + " [default: sage; gcn with --servers].",
            rich_help_panel="Model",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Number of GNN layers.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the hidden layers.")] = 256,
    dropout: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of units dropped.")] = 0.5,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads (gat).")] = None,
    fanout: Annotated[
        str, typer.Option(help="Neighbours drawn per layer, from the seeds outward: 15,10; or full.")
    ] = "full",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Seeds per mini-batch.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Of the run, for its time and cost.")] = 100,
    cache: Annotated[str | None, typer.Option(help="Memory for other ranks' hot rows.")] = None,
    partitioner: Annotated[
        str, typer.Option(help="metis | fennel | ldg | hash | block | compare: the best of the first four.")
    ] = "auto",
    exact: Annotated[
        bool,
        typer.Option(
            "--exact/--allow-approximate", help="Only ways with the weights of one process, or others too."
        ),
    ] = True,
    memory: Annotated[
        str | None, typer.Option(help="Of a rank, such as 8GB [default: no limit].", show_default=False)
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Dollars; with --servers those of an epoch.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds that all epochs may train; with --servers those of one.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Between ranks, such as 1gbit or 100mbit [default: as measured here].")
    ] = None,
    latency: Annotated[float, typer.Option(min=0.0, help="Milliseconds of a message, with --link.")] = 0.3,
    machine: Annotated[
        Path | None,
        typer.Option(help="Figures of another host, as 'polyhop env --calibrate --out' writes them."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Hosts that need not be there: a file (YAML, JSON), or a preset such as p4d.24xlarge.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(help="What --statistics-out wrote, in place of a graph.", rich_help_panel=_HOSTS),
    ] = None,
    statistics_out: Annotated[
        Path | None, typer.Option(help="Write statistics of the graph here.", rich_help_panel=_HOSTS)
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(help="Draw 1 to 1,024 devices here (.svg, .png).", rich_help_panel=_HOSTS),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder to look in, before $POLYHOP_DATA.")] = None,
    nodes: Annotated[Path | None, typer.Option(help="Node table that belongs to a file of edges.")] = None,
    split: Annotated[str, typer.Option(help="Which of the graph's splits.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Write the plan here, for train --plan.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show what every way is made of.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
    servers: Annotated[
        str | None, typer.Option(help="Kind of server, as in the prices.", rich_help_panel=_CLOUD)
    ] = None,
    num_servers: Annotated[int, typer.Option(min=1, help="How many.", rich_help_panel=_CLOUD)] = 8,
    function_memory: Annotated[
        int, typer.Option(help="Memory of a function in MB.", rich_help_panel=_CLOUD)
    ] = 192,
    processor: Annotated[str, typer.Option(help="Of functions: x86 | arm.", rich_help_panel=_CLOUD)] = "x86",
    intervals: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of each server [default: three for each function].", rich_help_panel=_CLOUD
        ),
    ] = None,
    staleness: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Epochs that intervals may be ahead [default: layers wait: exact].",
            rich_help_panel=_CLOUD,
        ),
    ] = None,
    gpu_servers: Annotated[
        str, typer.Option(help="Kind of server with GPUs to compare with.", rich_help_panel=_CLOUD)
    ] = "p3.2xlarge",
    halo: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Other servers that read a row, on average [default: as if nodes lay at random].",
            rich_help_panel=_CLOUD,
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(help="Table of prices (JSON) [default: AWS, 2021].", rich_help_panel=_CLOUD),
    ] = None,
    rates: Annotated[
        Path | None,
        typer.Option(
            help="Measured rates (JSON) [default: fitted to published figures].", rich_help_panel=_CLOUD
        ),
    ] = None,
) -> None:
    """Say what an epoch would take every way there is, which is best, and why. Features are not read.

    \b
    Examples:
      polyhop plan debian-packages --workers 4
      polyhop plan debian-packages --workers 4 --fanout 15,10 --link 1gbit --out plan.json
      polyhop plan synth:products?scale=0.1 --workers 8 --layers 3 --memory 4GB --allow-approximate --explain
      polyhop plan debian-packages --cluster p4d.24xlarge --fanout 15,10 --curve curve.svg
      polyhop plan debian-packages --strategy serverless --servers c5n.2xlarge --num-servers 8
    """
    on_hosts = Asked(cluster, statistics, statistics_out, curve)
    on_hosts.check(name)
    if out is not None:
        from polyhop.plan.files import check_writable

        check_writable(out, "--out")
    if (name or "").startswith(_PAPER) and strategy != "serverless":
        raise ConfigError(f"{name} has sizes alone, for functions of a cloud: add --strategy serverless")
    is_cloud = servers is not None or (name or "").startswith(_PAPER) or workers in (None, 1)
    if strategy == "serverless" and name is not None and cluster is None and is_cloud:
        mode = _ON_CLOUD
    elif cluster is not None:
        mode = _ON_CLUSTER
    else:
        mode = _HERE if statistics_out is None else _STATISTICS
    _check_used(context, mode, partitioner, has_statistics=statistics is not None)
    limits = _limits(exact=exact, memory=memory, budget=budget, deadline=deadline, epochs=epochs)
    if mode == _HERE:
        _check_prices(limits)
    if mode == _ON_CLOUD:
        from polyhop.cli.advice import Asked as AskedOfCloud
        from polyhop.cli.advice import advise

        asked = AskedOfCloud(
            name or "", model or "gcn", layers, hidden, heads or 1, data_dir, nodes, servers or "c5n.2xlarge", num_servers,
            function_memory, processor, intervals, staleness, gpu_servers, halo, deadline, budget, prices, rates,
        )  # fmt: skip
        advise(asked, as_json=as_json)
        return
    recipe = Recipe(
        source=name or "",
        data_dir=None if data_dir is None else str(data_dir),
        nodes=None if nodes is None else str(nodes),
        split=int(split) if split.isdigit() else split,
        model=model or "sage",
        hidden=hidden,
        layers=layers,
        dropout=dropout,
        more={} if heads is None else {"heads": heads},
    )
    given = {
        "num_neighbors": _fan_outs(fanout, layers),
        "batch_size": batch_size,
        "max_epochs": epochs,
        "cache": cache,
    }
    config = _config(strategy, given)
    between, curves = None if link is None else _link(link, latency), list["Curve"]()
    if cluster is not None or statistics_out is not None:
        there = None if cluster is None else known_cluster(cluster, workers)
        known, recipe = statistics_of(on_hosts, recipe, config, partitioner)
        if there is None:
            return
        made, curves = plan_for(on_hosts, there, known, recipe, config, limits, between)
    else:
        made = _plan(recipe, workers or 1, config, partitioner, limits, machine, between)
    if as_json:
        told = {"curves": [each.to_json() for each in curves]} if curves else {}
        console.print_json(made.to_json() | told)
    else:
        _show(made, explain=explain)
        show_curves(curves, on_hosts)
    if out is not None:
        _write(made, out)
        if not as_json:
            graph, file = shlex.quote(name or "NAME"), shlex.quote(str(out))
            print(f"\nwritten to {out}: polyhop train {graph} ... --workers {made.num_ranks} --plan {file}")


def _check_used(context: typer.Context, mode: str, partitioner: str, *, has_statistics: bool) -> None:
    """ConfigError for an option on the command line that such a plan would not use."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if context.params["workers"] == 1 and mode == _ON_CLOUD:
        given.discard("workers")
    for name in sorted(given):
        where = BELONGS.get(name, (mode,))
        if mode not in where:
            told = " and ".join(_IS_FOR[each] for each in where if each in _IS_FOR)
            raise ConfigError(f"{_option(context, name)} is not used {mode}: it is for {told}; leave it out")
        if has_statistics and name in _OF_A_GRAPH:
            raise ConfigError(
                f"{_option(context, name)} is not used with --statistics, which were measured before: leave it out"
            )
    if "link" in given and mode == _HERE and (context.params["workers"] or 1) == 1:
        raise ConfigError(
            "--link is between ranks, and one rank has nobody to send to: add --workers N, or leave it out"
        )
    if "latency" in given and "link" not in given:
        raise ConfigError("--latency is of the links that --link gives: give both, or leave it out")
    if partitioner == "compare" and mode != _HERE:
        raise ConfigError(f"--partitioner compare is not used {mode}: it is for {_IS_FOR[_HERE]}; name one")


def _option(context: typer.Context, name: str) -> str:
    """As it is given on the command line."""
    if name == "exact":
        return "--exact" if context.params[name] else "--allow-approximate"
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


def _fan_outs(given: str, layers: int) -> list[int] | None:
    if given == "full":
        return None
    try:
        found = [int(part) for part in given.split(",")]
    except ValueError:
        found = []
    if len(found) != layers:
        raise typer.BadParameter(
            f"{given!r}: expected one number for each of {layers} layers, such as 15,10 (-1 = all), or full",
            param_hint="--fanout",
        )
    return found


def _limits(
    *,
    exact: bool,
    memory: str | None,
    budget: float | None,
    deadline: float | None,
    epochs: int,
) -> Limits:
    import math

    from polyhop.plan import Limits
    from polyhop.train.config import parse_bytes

    return Limits(
        allows_approximate=not exact,
        memory_bytes=math.inf if memory is None else parse_bytes(memory),
        dollars=math.inf if budget is None else budget,
        seconds=math.inf if deadline is None else deadline,
        num_epochs=epochs,
    )


def _check_prices(limits: Limits) -> None:
    """ConfigError for a budget on hosts whose price nobody knows, before anything is loaded."""
    import math

    from polyhop.plan import NEEDS_PRICES

    if math.isfinite(limits.dollars):
        raise ConfigError(NEEDS_PRICES)


def _link(text: str, latency_ms: float) -> Link:
    """Of "1gbit", "100mbit", "2.5gbit"."""
    import re

    from polyhop.plan import Link

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])bit(?:/s)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--link {text!r}: expected a rate such as 1gbit or 100mbit")
    scale = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match[2].lower()]
    return Link(float(match[1]) * scale / 8, latency_ms / 1e3)


def _config(strategy: str, options: dict[str, Any]) -> Config:
    from polyhop.strategies import STRATEGIES
    from polyhop.train.config import Config

    if strategy not in ("auto", *STRATEGIES):
        raise ConfigError(unknown("strategy", strategy, ("auto", *STRATEGIES)))
    return Config(strategy=strategy, **options)


def _plan(
    recipe: Recipe,
    workers: int,
    config: Config,
    partitioner: str,
    limits: Limits,
    machine: Path | None,
    link: Link | None,
) -> Plan:
    """Edges, labels and the split are loaded; features are not."""
    from polyhop.cli.calibrate import known_machine
    from polyhop.cli.ranks import check_procedural
    from polyhop.datasets import is_procedural, load_unread
    from polyhop.partition import partition
    from polyhop.plan import load_machine
    from polyhop.planner import PlanOptions, plan_graph, unread_inputs

    if workers > _MOST_LOOKED_AT and not is_procedural(recipe.source):
        raise ConfigError(
            f"--workers {workers}: every part is made and looked at, which is done for up to {_MOST_LOOKED_AT} ranks; "
            "for more, describe the hosts and give --cluster FILE, which needs no parts"
        )
    given = None if machine is None else load_machine(machine)
    if given is None:
        known_machine(console.say)
    check_procedural(recipe, None, partitioner)
    made = plan_computed(recipe, workers, config, limits, given, link)
    if made is not None:
        return made
    graph, about = load_unread(
        recipe.source, data_dir=recipe.data_dir, nodes=recipe.nodes, split=recipe.split
    )
    recipe = recipe.of_widths(about.num_features, about.num_classes, about.name)
    if workers > graph.num_nodes:
        raise ConfigError(
            f"--workers {workers}: {about.name!r} has {graph.num_nodes:,} nodes; give at most one rank for each"
        )
    options = PlanOptions(limits, given, link, console.say)
    found = []
    for method in _methods(partitioner, workers):
        if partitioner == "compare":
            console.say(f"cutting {workers} parts with {method}")
        cut = partition(graph, workers, method)
        found.append(plan_graph(recipe.build(0), graph, config, cut, options, inputs=unread_inputs(about)))
    best = min(found, key=lambda each: (not each.fits, each.chosen.epoch_s))
    others = [("parts by " + str(each.partitioner), _in_short(each)) for each in found if each is not best]
    return replace(best, assumed=(*best.assumed, *others))


def _methods(given: str, num_parts: int) -> list[str]:
    """Of making parts, those to plan with."""
    from polyhop.partition import default_method

    if given != "compare" or num_parts == 1:
        return [default_method() if given in ("auto", "compare") else given]
    return list(dict.fromkeys([default_method(), "fennel", "ldg", "hash"]))


def _in_short(made: Plan) -> str:
    from polyhop.plan import duration

    rows = next((text for what, text in made.assumed if what == "parts"), "")
    return f"{rows}; {made.chosen.name} {duration(made.chosen.epoch_s)} an epoch"


def _write(made: Plan, out: Path) -> None:
    import json

    from polyhop.plan.files import replaced_whole

    try:
        with replaced_whole(out) as file:
            file.write_text(json.dumps(made.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from error


def _show(made: Plan, *, explain: bool) -> None:
    from polyhop.plan import duration, money, size

    print("assumed")
    console.show_table(list(made.assumed), indent=2)
    print("\nan epoch")
    has_prices = any(each.prediction.dollars is not None for each in made.ranked)
    rows = [("", "seconds", "memory a rank", "sent by a rank", "dollars" if has_prices else "", "", "")]
    for each in made.ranked:
        one = each.prediction
        pace = one.epoch_s / max(made.chosen.epoch_s, 1e-12)
        note = "; ".join(each.why_not) or one.bound
        rows.append(
            (
                one.name,
                duration(one.epoch_s),
                size(one.memory.needed),
                size(one.sent_bytes) if one.sent_bytes else "-",
                "" if one.dollars is None else money(one.dollars),
                f"{pace:.1f} x",
                note,
            )
        )
        if explain:
            parts = ", ".join(f"{name} {duration(value)}" for name, value in one.parts.items())
            kinds = ", ".join(f"{kind} {size(value)}" for kind, value in one.sent.items() if value)
            rows.append(("", "", "", "", "", "", f"  {parts}; {kinds}" if kinds else f"  {parts}"))
    widths = [max(len(row[at]) for row in rows) for at in range(6)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[at].rjust(widths[at]) for at in range(1, 6) if widths[at])]
        print(("  " + "  ".join([*cells, row[6]])).rstrip())
    print("\n" + "\n".join(made.why))
    for line in made.advice:
        print(line)
