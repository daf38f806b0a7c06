"""Intervals of parts: each source is of the interval that owns it, on whichever server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import Partition, share
from polyhop.serverless.intervals import cut_intervals
from polyhop.strategies import Team, place, serverless

MakeGraph = Callable[..., Graph]


def cut(line: Collective, graph: Graph) -> tuple[Any, Any]:
    owner = (torch.arange(graph.num_nodes) % line.num_ranks).int()
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    whole = serverless.hold(held, place("cpu", "64-true"), Team(line), serverless.Config())
    return held.part, cut_intervals(held.part, whole.host_block, 3, line)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_source_is_of_the_interval_that_owns_it(make_graph: MakeGraph, ranks: int) -> None:
    found = run_in_threads(ranks, cut, make_graph(90))
    owned = {
        int(node): interval.number
        for part, intervals in found
        for interval in intervals
        for node in part.src_ids[interval.rows]
    }
    assert len(owned) == 90
    for part, intervals in found:
        for interval in intervals:
            nodes = part.src_ids[interval.sources].tolist()
            assert interval.source_intervals.tolist() == [owned[node] for node in nodes]
            assert interval.reads == tuple(sorted({owned[node] for node in nodes}))
            assert interval.block.src_ids.tolist() == nodes
