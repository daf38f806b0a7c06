"""``polyhop partition``: a graph cut into parts, one folder for any number of ranks that divides them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polyhop.cli import console

__all__ = ["command"]


def command(
    name: Annotated[str, typer.Argument(help="A graph, as for train.")],
    parts: Annotated[int, typer.Option(min=1, help="Number of parts.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; without it only the report is made.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="metis | fennel | ldg | hash | block | file [default: metis where pymetis is installed]"
        ),
    ] = "auto",
    file: Annotated[
        Path | None,
        typer.Option(help="Parts made elsewhere: .npy or text, one number a node (--method file)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the methods that draw.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Folder to look in, before $POLYHOP_DATA.")] = None,
    nodes: Annotated[Path | None, typer.Option(help="Node table that belongs to a file of edges.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Cut a graph into parts, report what the cut costs, and write a folder of parts.

    \b
    Examples:
      polyhop partition debian-packages --parts 4                       the report only
      polyhop partition debian-packages --parts 4 --out parts
      polyhop partition cora --data-dir DATA --parts 8 --method fennel --json
      polyhop partition edges.csv --parts 2 --method file --file graph.part.2 --out parts
    """
    from polyhop import datasets
    from polyhop.partition import check_free, default_method, partition, quality, save_parts

    if out is not None:
        check_free(out)  # before the work, not after it
    chosen = method
    if method == "auto":
        chosen = default_method() if file is None else "file"
    options: dict[str, Any] = {} if file is None else {"path": file}
    graph = datasets.load(name, data_dir=data_dir, nodes=nodes)
    made = partition(graph, parts, chosen, seed=seed, **options)
    found = quality(graph, made)
    if out is not None:
        save_parts(graph, made, out, done=lambda part: console.say(f"part {part + 1}/{parts} written"))
    if as_json:
        console.print_json(
            {
                "graph": graph.name,
                "parts": parts,
                "method": chosen,
                "out": out,
                "sizes": made.sizes.tolist(),
                **vars(found),
            }
        )
        return
    console.show_table(
        [
            ("graph", f"{graph.name}, {graph.num_nodes:,} nodes, {graph.num_edges:,} edges"),
            ("parts", f"{parts} by {chosen}, {int(made.sizes.min()):,} to {int(made.sizes.max()):,} nodes"),
            *found.rows(),
            *([] if out is None else [("folder", str(out))]),
        ]
    )
