"""Input rows that cross from a host's memory to its GPUs in a step, and what rows that stay on GPUs save.

    data       a rank's own mini-batch, every row once
    split      rows of the shared mini-batch that the rank owns
    pushpull   own columns of the mini-batches of all ranks

What is kept are the likeliest rows: of ``split`` those of own nodes, so that all ranks together keep every row once; of the
others rows (or columns) of any node, which ranks that read one another's memory may share out; where the room of one holds
all rows, every rank keeps its own.

Legend: P ranks, M cells of nodes that are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from polyhop.forecast.sight import InputRows
from polyhop.strategies.flows import Flows
from polyhop.strategies.work import Variant

__all__ = ["Kept", "crossing", "drawn", "of_peers", "served"]


@dataclass(frozen=True)
class Kept:
    """What a GPU does of loading: room for input rows; neighbours that it draws itself out of its host's memory."""

    num_bytes: float = 0.0
    is_shared: bool = False  # every rank reads what all ranks keep
    does_draw: bool = False
    peer_bytes_per_s: float = math.inf  # at which it reads what other ranks keep, where that is shared
    is_beside: bool = False  # rows are loaded while it draws


def crossing(flows: Flows, inputs: InputRows, variant: Variant, kept: Kept, row_bytes: float) -> float:
    """Bytes that a rank's GPU reads of its host in a step; ``row_bytes``: of an input row, all columns."""
    parts, hops = flows.num_ranks, flows.num_hops
    if variant.strategy == "split":
        likely, nodes, rows, width = (
            inputs.shared,
            inputs.nodes / parts,
            float(flows.shared[hops, 0]),
            row_bytes,
        )
    else:
        likely, nodes, rows, width = _mean(inputs, parts), inputs.nodes, _own_rows(flows), row_bytes
    if variant.strategy == "pushpull":
        rows, width = parts * rows, row_bytes / parts
    room = kept.num_bytes / width * (parts if kept.is_shared else 1)
    return rows * (1 - served(likely, nodes, room)) * width


def of_peers(flows: Flows, inputs: InputRows, variant: Variant, kept: Kept, row_bytes: float) -> float:
    """Bytes that a rank's GPU reads of the others' in a step, each of which keeps an equal share of the likeliest rows."""
    parts, room = flows.num_ranks, kept.num_bytes / row_bytes
    if variant.strategy != "data" or not kept.is_shared or room >= float(inputs.nodes.sum()):
        return 0.0
    found = served(_mean(inputs, parts), inputs.nodes, parts * room)
    return _own_rows(flows) * found * (parts - 1) / parts * row_bytes


def _mean(inputs: InputRows, parts: int) -> torch.Tensor:
    """How likely a rank reads a node of each cell, whoever owns it."""
    return (inputs.own + (parts - 1) * inputs.others) / parts


def _own_rows(flows: Flows) -> float:
    """Input rows of a rank's own mini-batch."""
    return float(flows.own[flows.num_hops].rows[0].sum())


def drawn(flows: Flows, variant: Variant) -> float:
    """Edges that a GPU draws in a step, where all lists lie in its host's memory: nothing is asked of other ranks."""
    edges = flows.shared_edges[:, 0] if variant.strategy == "split" else flows.own_edges[:, 0]
    return float(edges.sum())


def served(likely: torch.Tensor, nodes: torch.Tensor, room: float) -> float:
    """Share of what is read that is among so many of the likeliest rows."""
    order = torch.sort(likely, descending=True).indices
    before = nodes[order].cumsum(0) - nodes[order]
    found = (likely[order] * (room - before).clamp(min=0).minimum(nodes[order])).sum()
    return min(1.0, float(found / (likely * nodes).sum().clamp(min=1e-300)))
