"""``polyhop partition``: a graph cut into parts, one folder for any number of ranks that divides them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhop.cli import console, stages
from polyhop.errors import ConfigError

if TYPE_CHECKING:
    from polyhop.graph import Graph
    from polyhop.partition import Partition
    from polyhop.sample import SplitQuality

__all__ = ["command"]

_DEFAULT_MEMORY = "1GB"


def command(
    name: Annotated[str, typer.Argument(help="A graph, as for train; or a file of edges, also .npy.")],
    parts: Annotated[int, typer.Option(min=1, help="Number of parts.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; without it only the report is made.")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="metis | fennel | ldg | hash | block | file [default: metis where pymetis is installed, ldg out of core]"
        ),
    ] = "auto",
    file: Annotated[
        Path | None,
        typer.Option(help="Parts made elsewhere: .npy or text, one number a node (--method file)."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Work out of core, from files, in this much memory (1GB) beside the program's own 0.3 GB. A killed run "
            "goes on when started again. [default for .npy edges and large files: 1GB]"
        ),
    ] = None,
    passes: Annotated[int | None, typer.Option(min=1, help="Passes over the nodes (fennel, ldg).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the methods that draw.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Folder to look in, before $POLYHOP_DATA.")] = None,
    nodes: Annotated[
        Path | None,
        typer.Option(
            help="Node table of a file of edges; out of core also a folder of x.npy, y.npy, train.npy, ..."
        ),
    ] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of nodes, out of core [default: as --nodes says, else the largest id + 1]"
        ),
    ] = None,
    duplicates: Annotated[
        str, typer.Option(help="Repeated edges: error | keep | drop (in memory only).")
    ] = "error",
    presample: Annotated[
        bool,
        typer.Option(
            "--presample",
            help="Follow the mini-batches that training will draw: even work and few rows sent for strategy split "
            "(metis, fennel).",
            rich_help_panel="Pre-sampling",
        ),
    ] = False,
    fanout: Annotated[
        str | None,
        typer.Option(help="As for train: 15,10, from the seeds outward.", rich_help_panel="Pre-sampling"),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Seeds of all ranks together.", rich_help_panel="Pre-sampling")
    ] = 1024,
    sampler: Annotated[str, typer.Option(help="uniform | labor", rich_help_panel="Pre-sampling")] = "uniform",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to sample.", rich_help_panel="Pre-sampling")] = 2,
    hidden: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Width of the hidden layers: weighs rows by what they send [default: all alike].",
            rich_help_panel="Pre-sampling",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Cut a graph into parts, report what the cut costs, and write a folder of parts.

    \b
    Examples:
      polyhop partition debian-packages --parts 4                       the report only
      polyhop partition debian-packages --parts 4 --out parts
      polyhop partition cora --data-dir DATA --parts 8 --method fennel --json
      polyhop partition edges.csv --parts 2 --method file --file graph.part.2 --out parts
      polyhop partition edges.npy --nodes DATA --parts 16 --memory 1GB --out parts
      polyhop partition debian-packages --parts 4 --presample --fanout 15,15,15 --out parts
    """
    from polyhop.partition import check_free, default_method, is_out_of_core

    if fanout is not None and not presample:
        raise ConfigError("--fanout says what mini-batches to follow: it goes with --presample")
    if out is not None:
        check_free(out)  # before the work, not after it
    options: dict[str, Any] = {} if file is None else {"path": file}
    options |= {} if passes is None else {"passes": passes}
    chosen = method if method != "auto" or file is None else "file"
    plan = _Presampling(_fan_outs(fanout), batch_size, sampler, epochs, hidden) if presample else None
    if is_out_of_core(name, chosen, memory):
        if plan is not None:
            raise ConfigError(
                f"--presample draws mini-batches from the whole graph: {name} is cut out of core"
            )
        chosen = "ldg" if chosen == "auto" else chosen
        facts = _from_files(name, parts, chosen, out, memory or _DEFAULT_MEMORY, options, nodes=nodes,
                            num_nodes=num_nodes, seed=seed, duplicates=duplicates)  # fmt: skip
    else:
        chosen = default_method() if chosen == "auto" else chosen
        facts = _in_memory(name, parts, chosen, out, options, data_dir=data_dir, nodes=nodes, seed=seed,
                           duplicates=duplicates, plan=plan)  # fmt: skip
    _report({"parts": parts, "method": chosen, "out": out, **facts}, as_json)


def _in_memory(
    name: str, parts: int, method: str, out: Path | None, options: dict[str, Any], *, data_dir: Path | None,
    nodes: Path | None, seed: int, duplicates: str, plan: _Presampling | None,
) -> dict[str, Any]:  # fmt: skip
    from polyhop import datasets
    from polyhop.partition import partition, quality, save_parts

    graph = datasets.load(name, data_dir=data_dir, nodes=nodes, duplicates=duplicates)
    fresh: dict[str, Any] = {}
    if plan is None:
        made = partition(graph, parts, method, seed=seed, **options)
    else:
        made, fresh["fresh"] = plan.cut(graph, parts, method, seed, options)
    found = quality(graph, made)
    if out is not None:
        save_parts(graph, made, out, done=lambda part: console.say(f"part {part + 1}/{parts} written"))
    sizes = made.sizes.tolist()
    return {
        "graph": graph.name,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "sizes": sizes,
        "quality": found,
        **fresh,
    }


@dataclass(frozen=True)
class _Presampling:
    """What the command line says of the training to come."""

    num_neighbors: list[int]
    batch_size: int
    sampler: str
    epochs: int
    hidden: int | None

    def cut(
        self, graph: Graph, parts: int, method: str, seed: int, options: dict[str, Any]
    ) -> tuple[Partition, SplitQuality]:
        """Owners, and what fresh mini-batches say of them."""
        from polyhop.sample import presampled

        columns = None
        if self.hidden is not None:
            columns = [max(graph.num_features, 1), *[2 * self.hidden] * (len(self.num_neighbors) - 1)]
        made = presampled(
            graph, parts, self.num_neighbors, self.batch_size, epochs=self.epochs, method=method, sampler=self.sampler,
            columns=columns, seed=seed, **options,
        )  # fmt: skip
        return made.partition, made.quality


def _fan_outs(given: str | None) -> list[int]:
    if given is None:
        raise ConfigError(
            "--presample draws mini-batches as training does: give its --fanout, such as 15,10,5"
        )
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise ConfigError(
            f"--fanout {given!r}: expected one number per layer from the seeds outward, such as 15,10 (-1 = all)"
        ) from None


def _from_files(
    name: str, parts: int, method: str, out: Path | None, memory: str, options: dict[str, Any], **given: Any
) -> dict[str, Any]:
    from polyhop.partition import Quality, partition_files

    if out is None:
        raise ConfigError("out of core the parts are written as they are made: give --out DIR")
    with stages.stages("edges") as tell:
        try:
            folder = partition_files(
                name, parts, method, out, memory=memory, options=options, tell=tell, **given
            )
        except KeyboardInterrupt:
            console.say(
                f"stopped; what is done is kept in {out.with_name('.tmp-' + out.name)}: the same command goes on"
            )
            raise
    about = folder.about
    return {
        "graph": about["name"],
        "nodes": about["num_nodes"],
        "edges": about["num_edges"],
        "sizes": [part["nodes"] for part in about["parts"]],
        "quality": Quality(**about["quality"]),
    }


def _report(facts: dict[str, Any], as_json: bool) -> None:
    found, fresh, sizes = facts.pop("quality"), facts.pop("fresh", None), facts["sizes"]
    if as_json:
        more = {} if fresh is None else {"fresh": {**vars(fresh), "row_share": fresh.row_share}}
        console.print_json({**facts, **vars(found), **more})
        return
    console.show_table(
        [
            ("graph", f"{facts['graph']}, {facts['nodes']:,} nodes, {facts['edges']:,} edges"),
            ("parts", f"{facts['parts']} by {facts['method']}, {min(sizes):,} to {max(sizes):,} nodes"),
            *found.rows(),
            *([] if fresh is None else fresh.table()),
            *([] if facts["out"] is None else [("folder", str(facts["out"]))]),
        ]
    )
