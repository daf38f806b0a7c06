"""``polyhop data``: what a graph looks like before anything is trained on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polyhop.cli import console

__all__ = ["command"]


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A graph, as for train; none lists the known names."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder to look in, before $POLYHOP_DATA.")] = None,
    nodes: Annotated[Path | None, typer.Option(help="Node table that belongs to a file of edges.")] = None,
    split: Annotated[str, typer.Option(help="Which of the graph's splits: a number or a name.")] = "0",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Describe a graph: degrees, components, homophily, split.

    \b
    Examples:
      polyhop data                                   names that are found
      polyhop data debian-packages
      polyhop data cora --data-dir DATA --json
      polyhop data edges.csv --nodes nodes.csv
      polyhop data synth:arxiv?scale=0.1
    """
    from polyhop import datasets

    if name is None:
        _list(datasets.names(data_dir), as_json)
        return
    chosen = int(split) if split.isdigit() else split
    graph = datasets.load(name, data_dir=data_dir, nodes=nodes, split=chosen)
    facts = datasets.describe(graph)
    if as_json:
        console.print_json(facts)
        return
    console.show_table(_rows(facts))
    _plot(facts)


def _list(names: list[str], as_json: bool) -> None:
    generators = [
        "synth:arxiv",
        "synth:products",
        "synth:reddit",
        "synth:papers",
        "synth:procedural",
        "rmat:",
        "sbm:",
    ]
    if as_json:
        console.print_json({"names": names, "generators": generators})
        return
    console.show_table([("names", ", ".join(names)), ("generators", ", ".join(generators))])


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The description as a table of names and values."""
    degree, components, split = facts["in_degree"], facts["components"], facts["split"]
    classes, homophily = facts["classes"], facts["homophily"]
    size = sum(facts["bytes"].values()) - facts["bytes"]["mapped"]
    direction = "symmetric" if facts["is_symmetric"] else "directed"
    weights = ", weighted" if facts["has_weights"] else ""
    rows = [
        ("graph", facts["name"]),
        ("nodes", f"{facts['num_nodes']:,} ({facts['isolated']:,} without edges)"),
        ("edges", f"{facts['num_edges']:,} ({direction}{weights}, {facts['num_loops']:,} loops)"),
        (
            "in-degree",
            f"{degree['min']:,} to {degree['max']:,}, median {degree['median']:,}, mean {degree['mean']:.1f}",
        ),
        (
            "components",
            f"{components['count']:,} (largest {_share(components['largest'], facts['num_nodes'])})",
        ),
        ("features", f"{facts['num_features']:,} ({facts['features']})"),
    ]
    if classes is not None:
        kind = "labels, several per node" if facts["is_multilabel"] else "classes"
        spread = f"{min(classes['counts'], default=0):,} to {max(classes['counts'], default=0):,} nodes each"
        rows.append((kind, f"{facts['num_classes']} ({spread}; {classes['unlabelled']:,} nodes without)"))
    if homophily is not None:
        rows.append(("homophily", f"{homophily:.3f} (share of edges that join equal classes)"))
    if split is not None:
        shares = ", ".join(f"{name} {_share(count, facts['num_nodes'])}" for name, count in split.items())
        rows.append(("split", shares))
    rows.append(("metric", facts["metric"]))
    mapped = f", {facts['bytes']['mapped'] / 2**20:,.1f} MiB mapped" if facts["bytes"]["mapped"] else ""
    rows.append(("memory", f"{size / 2**20:,.1f} MiB{mapped}"))
    return rows


def _share(count: int, total: int) -> str:
    return f"{count:,} = {100 * count / max(total, 1):.1f} %"


def _plot(facts: dict[str, Any]) -> None:
    """Nodes by in-degree, in powers of two."""
    from polyhop.report import bars

    histogram = facts["in_degree"]["histogram"]
    if not histogram:
        return
    drawn = {_bin(power): count for power, count in enumerate(histogram)}
    print(f"\nnodes by in-degree\n{bars(drawn, ascii=console.is_ascii())}")


def _bin(power: int) -> str:
    """Label of a bin: bin 0 is degree 0, bin k is 2^(k-1) .. 2^k - 1."""
    if power <= 1:
        return str(power)
    return f"{2 ** (power - 1)}-{2**power - 1}"
