"""How good the parts of a run are, from what each rank knows of its own: no rank looks at the whole graph."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from polyhop.comm import Collective
from polyhop.graph import Graph, SharedGraph
from polyhop.graph.part import Part
from polyhop.partition.quality import quality_of_counts
from polyhop.train.run import Run

__all__ = ["describe_parts", "keep_quality"]

_COUNTS = ("nodes", "edges", "train", "cut_edges", "halo")


def keep_quality(graph: Graph | SharedGraph, run: Run, line: Collective) -> None:
    """partition.json of a run that is written down. All ranks call it; they know alike whether it is."""
    if not run.is_kept or not isinstance(graph, SharedGraph):
        return
    found = describe_parts(graph, line)
    if found is not None and run.folder is not None:
        run.folder.write_partition(found)


def describe_parts(graph: SharedGraph, line: Collective) -> dict[str, Any] | None:
    """Cut, balance and halo of all parts, and the counts of each; None where parts store no edges. All ranks call it.

    Ranks that hold the same part (groups) tell the same.
    """
    part = graph.part
    if not isinstance(part, Part):
        return None
    num_train = 0 if part.split is None else part.split.train.numel()
    num_cut = int((part.indices >= part.num_nodes).sum())
    own = torch.tensor([[part.num_nodes, part.num_edges, num_train, num_cut, part.halo.numel()]])
    everyone = line.all_gather(own.to(line.device), kind="sizes", counts=[1] * line.num_ranks)
    counts = torch.cat(everyone)[: part.num_parts].cpu()  # [P, 5]
    nodes, edges, train, cut, halo = counts.unbind(1)
    has_train = graph.split is not None
    found = quality_of_counts(
        nodes, edges, train if has_train else None, num_cut=int(cut.sum()), num_halo=int(halo.sum())
    )
    each = [dict(zip(_COUNTS, row, strict=True)) for row in counts.tolist()]
    return {"num_parts": part.num_parts, **asdict(found), "parts": each}
