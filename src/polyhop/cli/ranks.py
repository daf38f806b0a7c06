"""Training on several ranks: what each of them does, from the command's values to the result of rank 0.

Parts come from a folder (``--parts``, made by ``polyhop partition`` or, where there is none yet, by rank 0), or every rank
loads the graph, rank 0 says who owns what, and each cuts its own part out.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.cli.recipe import Recipe
from polyhop.errors import ConfigError, PartitionError

if TYPE_CHECKING:
    from polyhop.cli.planned import Planned
    from polyhop.comm import Collective
    from polyhop.graph import Graph, SharedGraph
    from polyhop.launch import RankContext
    from polyhop.partition import Partition, PartitionFolder
    from polyhop.train.state import Result

__all__ = ["check_parts", "check_procedural", "is_first_process", "share_of", "train_rank"]


def is_first_process() -> bool:
    """Whether this process speaks for the run: the one that starts the ranks, or rank 0 where each was started apart."""
    from polyhop.launch import is_rank_process

    return not is_rank_process() or os.environ.get("RANK", "0") == "0"


def check_parts(
    parts: Path, recipe: Recipe, num_ranks: int | None, num_groups: int = 1, *, is_whole: bool
) -> None:
    """PartitionError unless the folder is one of the recipe's graph, for so many ranks; ``is_whole``: with every file."""
    from polyhop.partition import open_parts

    folder = open_parts(parts)
    if num_ranks is not None:
        folder.check_ranks(num_ranks, num_groups)
    if is_whole:
        folder.check_sizes()
    _check_graph(folder, recipe)


def check_procedural(recipe: Recipe, parts: Path | None, method: str) -> None:
    """ConfigError where a graph that is computed when read is to be cut or kept."""
    from polyhop.datasets import is_procedural

    if not is_procedural(recipe.source):
        return
    if parts is not None or method not in ("auto", "block"):
        given = f"--partitioner {method}" if parts is None else f"--parts {parts}"
        raise ConfigError(
            f"{given}: {recipe.source!r} is computed when it is read, so there are no edges to cut it by and nothing to "
            "keep in a folder: every rank makes its own part, a range of ids; leave it out"
        )


def _check_graph(folder: PartitionFolder, recipe: Recipe) -> None:
    """A folder that says the recipe's name is believed; one of another name must hold the same graph."""
    from polyhop.graph import fingerprint_graph

    facts, source = folder.facts, Path(recipe.source)
    if facts.name in (recipe.source, source.name, source.stem):
        return
    graph = recipe.load()
    if dict(facts.fingerprint) != fingerprint_graph(graph):
        raise PartitionError(
            f"{folder.path} holds parts of {facts.name!r} ({facts.num_nodes:,} nodes, {facts.num_features:,} features), "
            f"not of {recipe.source!r} ({graph.num_nodes:,} nodes, {graph.num_features:,} features): give the folder of "
            "that graph to --parts, or the name of a folder that is to be made"
        )


def train_rank(
    context: RankContext,
    recipe: Recipe,
    options: dict[str, Any],
    folder: Path,
    parts: Path | None,
    method: str,
    obeyed: Planned | None = None,
) -> Result:
    """Train as one rank; a restarted rank goes on from the last checkpoint."""
    from polyhop.comm import group_size
    from polyhop.train.together import share_value
    from polyhop.trainer import Trainer

    line, groups = context.comm, options.get("split_groups", 1)
    num_parts = group_size(line.num_ranks, groups)
    folder = Path(share_value(str(folder), line))  # ranks that started apart may have named it apart
    if context.engine == "torchrun" and line.rank == 0 and parts is not None and parts.exists():
        check_parts(parts, recipe, line.num_ranks, groups, is_whole=False)
    features = options.get("feature_store", "auto")

    def cut(graph: Graph) -> Partition:
        return _cut(graph, num_parts, method, options)

    held = share_of(line, recipe, parts, cut, num_parts=num_parts, features=features)
    if obeyed is not None:
        obeyed.check_graph(held)
    recipe = recipe.fitted(held)
    model = recipe.build(options["seed"])
    if context.attempt > 0:
        options = {**options, "resume": "auto"}
    with recipe.kept_in(folder) if line.rank == 0 else _tidy(folder, context):
        made = None if obeyed is None else obeyed.plan
        return Trainer(**options, run_dir=folder).fit(model, held, line=line, plan=made)


@contextmanager
def _tidy(folder: Path, context: RankContext) -> Iterator[None]:
    """A rank that ends before its first step leaves no trace, nor the folder that was made for it."""
    trace = folder / f"trace-rank{context.comm.rank}.jsonl"

    def leave() -> None:
        with suppress(OSError):
            if b'"step"' not in trace.read_bytes():
                trace.unlink()
                folder.rmdir()

    context.on_loss(leave)
    try:
        yield
    except BaseException:
        leave()
        raise


def share_of(
    line: Collective,
    recipe: Recipe,
    parts: Path | None,
    cut: Callable[[Graph], Partition],
    *,
    num_parts: int,
    features: str = "auto",
) -> SharedGraph:
    """This rank's share of the graph; ``features``: where rows of a folder of parts are kept.

    ``cut`` makes ``num_parts`` parts, where there are none yet; rank r holds part r modulo their number.
    """
    import torch

    from polyhop.datasets import is_procedural, procedural_recipe
    from polyhop.graph import fingerprint_graph, procedural_share
    from polyhop.partition import Partition, open_parts, save_parts, share
    from polyhop.train.together import share_value

    index = line.rank % num_parts
    if is_procedural(recipe.source):
        return procedural_share(*procedural_recipe(recipe.source), index, num_parts, name=recipe.source)
    if parts is not None:
        if line.rank == 0 and not parts.exists():
            graph = recipe.load()
            save_parts(graph, cut(graph), parts)
        share_value(True, line)  # nobody opens it before it is there
        if not parts.exists():
            raise PartitionError(
                f"no folder {parts} on host {socket.gethostname()}: every host needs it, at the same path; share it, or "
                f"copy manifest.json and the parts of this host's ranks (rank 0 of {line.num_ranks} has it)"
            )
        folder = open_parts(parts)
        _agree(line, f"folder {parts}", folder.about)
        return folder.share(index, num_parts, features=features)
    graph = recipe.load()
    _agree(line, f"graph {recipe.source}", fingerprint_graph(graph))
    if line.rank == 0:
        owner = cut(graph).owner
    else:
        owner = torch.empty(graph.num_nodes, dtype=torch.int32)
    owner = line.broadcast(owner.to(line.device), kind="ids").cpu()
    return share(graph, Partition(owner, num_parts), index)


def _cut(graph: Graph, num_parts: int, method: str, options: dict[str, Any]) -> Partition:
    """Parts by the method given; by itself, strategy split has them follow the mini-batches that it will draw."""
    from polyhop.partition import default_method, partition
    from polyhop.sample import presampled

    if method != "auto":
        return partition(graph, num_parts, method, seed=options["seed"])
    has_seeds = graph.split is not None and graph.split.train.numel() > 0
    if options["strategy"] != "split" or options["num_neighbors"] is None or not has_seeds:
        return partition(graph, num_parts, default_method(), seed=options["seed"])
    return presampled(
        graph, num_parts, options["num_neighbors"], options["batch_size"] or 1024,
        sampler=options["sampler"], seed=options["seed"], judged=1,
    ).partition  # fmt: skip


def _agree(line: Collective, what: str, facts: dict[str, Any]) -> None:
    """PartitionError on a rank whose facts are not those of rank 0: on another host, a name may mean another thing."""
    from polyhop.train.together import share_value

    own = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    if share_value(own, line) != own:
        raise PartitionError(
            f"{what} on host {socket.gethostname()} is not the one that rank 0 has: copy that to every host"
        )
