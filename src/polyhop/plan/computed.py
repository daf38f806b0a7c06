"""How fast a host computes rows and edges of a graph that nobody stores, in place of reading them: measured in a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from polyhop.kernels.procedural import Virtual, virtual_draw, virtual_rows
from polyhop.plan.machine import Machine

__all__ = ["computing_machine"]

_ROWS, _FANOUT, _REPEATS = 4096, 10, 3


def computing_machine(machine: Machine, graph: Virtual) -> Machine:
    """The same host, for ranks that compute what they train on."""
    ids = torch.arange(_ROWS) * (graph.num_nodes // _ROWS) if graph.num_nodes > _ROWS else torch.arange(2)
    row_bytes = 4 * graph.num_features * ids.numel()
    edges = max(1, virtual_draw(graph, ids, _FANOUT, 0)[1].numel())
    rows_s = _best_s(lambda: virtual_rows(graph, ids))
    drawn_s = _best_s(lambda: virtual_draw(graph, ids, _FANOUT, 0))
    gathered = 1 / (
        1 / machine.gather_bytes_per_s + rows_s / row_bytes
    )  # computed, then moved like any other
    return replace(machine, gather_bytes_per_s=gathered, edge_s=max(machine.edge_s, drawn_s / edges))


def _best_s(call: Callable[[], object]) -> float:
    found = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)
