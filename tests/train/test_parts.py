"""Quality that ranks put together from their own parts is that of the whole graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph, procedural_share
from polyhop.partition import Partition, partition, share
from polyhop.partition.quality import quality
from polyhop.train.parts import describe_parts


def on_rank(line: Collective, graph: Graph, cut: Partition, num_parts: int) -> Any:
    return describe_parts(share(graph, cut, line.rank % num_parts), line)


@pytest.mark.parametrize("num_ranks", [3, 6], ids=["a rank a part", "groups"])
def test_as_measured_over_all_edges(make_graph: Callable[..., Graph], num_ranks: int) -> None:
    graph = make_graph(300)
    cut = partition(graph, 3, "hash")
    found = run_in_threads(num_ranks, on_rank, graph, cut, 3)
    expected = asdict(quality(graph, cut))
    for told in found:
        assert {name: told[name] for name in expected} == pytest.approx(expected)
        assert [part["nodes"] for part in told["parts"]] == cut.sizes.tolist()
        assert sum(part["edges"] for part in told["parts"]) == graph.num_edges
        assert sum(part["train"] for part in told["parts"]) == graph.split.train.numel()  # type: ignore[union-attr]


def test_parts_without_edges_have_none() -> None:
    def told(line: Collective) -> Any:
        from polyhop.datasets import procedural_recipe

        name = "synth:procedural?nodes=1000&features=4"
        return describe_parts(procedural_share(*procedural_recipe(name), line.rank, 2, name=name), line)

    assert run_in_threads(2, told) == [None, None]
