"""``polyhop predict``: the best weights of a run, over every node of its graph, layer by layer in bounded memory."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhop.cli import console
from polyhop.cli.recipe import Recipe
from polyhop.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from polyhop.graph import Graph

__all__ = ["command"]

_CHUNK_ROWS = 65_536


def _ending(given: Path | None) -> Path | None:
    if given is not None and given.suffix not in (".npy", ".csv"):
        raise typer.BadParameter(
            f"{given}: expected a name that ends in .npy (scores) or .csv (ids and classes)"
        )
    return given


def command(
    run: Annotated[Path, typer.Argument(help="A run folder made by polyhop train.")],
    out: Annotated[Path | None, typer.Option(callback=_ending, help="File to write: .npy or .csv.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Another graph with the same features, instead of the run's own.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder to look for graphs in, instead of the run's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda ...")] = "auto",
    memory: Annotated[str | None, typer.Option(help="Working memory, such as 2GiB.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Predict every node with the best weights of a run.

    Exact: all neighbours, layer by layer, in bounded memory. A .npy file holds the scores (logits) [nodes, classes]; a .csv
    file one line per node: id, class, probability; for multi-label graphs the classes with a probability above one half,
    joined by ";".

    \b
    Examples:
      polyhop predict runs/mine                          metrics of every split
      polyhop predict runs/mine --out predictions.csv
      polyhop predict runs/mine --out scores.npy --memory 500MB
      polyhop predict runs/mine --data newer-graph --data-dir DATA --json
    """
    from polyhop.trainer import Trainer

    if not run.is_dir():
        raise InputError(f"{run} is not a folder: expected a run folder made by 'polyhop train'")
    recipe = Recipe.read(run)
    if data_dir is not None:
        recipe = replace(recipe, data_dir=str(data_dir))
    graph = recipe.load(data)
    model = recipe.build()
    weights, where = _weights(run)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{where} does not fit the model of {run}/command.json: {error}") from error
    trainer = Trainer(device=device, memory=memory, progress="none")
    scores = trainer.predict(model, graph, out if out is not None and out.suffix == ".npy" else None)
    if out is not None and out.suffix == ".csv":
        _write_csv(out, scores, graph, recipe.num_classes)
    facts: dict[str, Any] = {
        "graph": graph.name,
        "nodes": graph.num_nodes,
        "classes": recipe.num_classes,
        "weights": str(where),
        "metric": graph.metric,
        "scores": _measure(scores, graph),
        "out": None if out is None else str(out),
    }
    if as_json:
        console.print_json(facts)
        return
    measured = [
        (f"{split} {graph.metric}", f"{100 * value:.2f} %") for split, value in facts["scores"].items()
    ]
    rows = [("graph", graph.name), ("nodes", f"{graph.num_nodes:,}"), ("weights", str(where)), *measured]
    console.show_table([*rows, *([] if out is None else [("written", str(out))])])


def _weights(run: Path) -> tuple[dict[str, Tensor], Path]:
    """The run's best weights: of its end, or, for a run that did not end, of its newest checkpoint."""
    from polyhop.train.checkpoint import find_checkpoint
    from polyhop.train.files import read_tensors

    final = run / "model.safetensors"
    if final.is_file():
        return read_tensors(final), final
    found = find_checkpoint(run)
    console.say(f"polyhop: the run did not end; using its checkpoint {found.path}")
    return found.tensors.get("best", found.tensors["model"]), found.path


def _measure(scores: Any, graph: Graph) -> dict[str, float]:
    """The graph's metric for every split that has labelled nodes."""
    import torch

    from polyhop.train.metrics import METRICS

    if graph.y is None or graph.split is None:
        return {}
    found = {}
    for name, ids in vars(graph.split).items():
        labelled = ids if graph.is_multilabel else ids[graph.y[ids] >= 0]
        if labelled.numel():
            found[name] = METRICS[graph.metric](torch.as_tensor(scores[labelled]), graph.y[labelled])
    return found


def _write_csv(path: Path, scores: Any, graph: Graph, num_classes: int) -> None:
    """id, class, probability; complete or absent."""
    import torch

    names = _class_names(graph, num_classes)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("id", "class", "probability"))
            for start in range(0, graph.num_nodes, _CHUNK_ROWS):
                rows = torch.as_tensor(scores[start : start + _CHUNK_ROWS]).float()
                writer.writerows(_rows(rows, names, start, graph.is_multilabel))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _class_names(graph: Graph, num_classes: int) -> list[str]:
    listed = graph.meta.get("classes")
    if isinstance(listed, list) and len(listed) == num_classes:
        return [str(name) for name in listed]
    return [str(number) for number in range(num_classes)]


def _rows(scores: Tensor, names: list[str], start: int, is_multilabel: bool) -> list[tuple[int, str, str]]:
    if is_multilabel:
        shares = scores.sigmoid().tolist()
        chosen = [[c for c, share in enumerate(row) if share > 0.5] for row in shares]
        return [
            (start + i, ";".join(names[c] for c in picked), ";".join(f"{shares[i][c]:.4f}" for c in picked))
            for i, picked in enumerate(chosen)
        ]
    best = scores.softmax(1).max(1)
    pairs = zip(best.indices.tolist(), best.values.tolist())
    return [(start + i, names[c], f"{share:.4f}") for i, (c, share) in enumerate(pairs)]
