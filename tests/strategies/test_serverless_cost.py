"""Bytes and messages of strategy ``serverless``: counted as accounted, and what fusing and computing again save."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

from polyhop.comm import Cost, run_in_threads
from polyhop.graph import Graph
from polyhop.serverless import stream
from polyhop.strategies import serverless_step

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]
from test_serverless import on_rank  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
KINDS = ("tasks", "results", "rows", "sums")
EPOCHS = 3


def costs(
    graph: Graph, monkeypatch: Any, name: str, ranks: int, **options: Any
) -> list[tuple[Cost, Cost, Cost]]:
    """Of every rank: accounted an epoch, counted in all, weights that were sent."""
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))

    def look(step: Any) -> tuple[Cost, Cost, Cost]:
        counted = step.counted()
        return step.account(), counted.only(*KINDS), counted.only("weights")

    given = {"intervals": 4, "functions": 1, **options}
    return [each[2] for each in run_in_threads(ranks, on_rank, graph, name, 0.4, EPOCHS, given, look)]


@pytest.mark.parametrize("options", [{}, {"fuse_loss": False}, {"rematerialise": False},
                                     {"fuse_loss": False, "rematerialise": False}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["gcn", "gcn-3", "sage", "gat"])
def test_counted_as_accounted(
    make_graph: MakeGraph, monkeypatch: Any, name: str, options: dict[str, bool]
) -> None:
    for accounted, counted, weights in costs(make_graph(80), monkeypatch, name, 2, **options):
        assert counted == accounted * EPOCHS
        assert counted.bytes["rows"] > 0
        assert weights.bytes["weights"] > 0


@pytest.mark.parametrize("remakes", [True, False])
@pytest.mark.parametrize("name", ["gat", "gat-bare"])
def test_attention_weights_of_functions_are_accounted(
    make_graph: MakeGraph, monkeypatch: Any, name: str, remakes: bool
) -> None:
    graph = make_graph(80)
    more: Any = {"rematerialise": remakes}
    here = costs(graph, monkeypatch, name, 2, **more)
    for (accounted, counted, _), (on_server, _, _) in zip(
        costs(graph, monkeypatch, name, 2, edge_functions=True, **more), here, strict=True
    ):
        assert counted == accounted * EPOCHS
        for kind in ("rows", "sums"):  # what crosses between servers is the same
            assert accounted.bytes[kind] == on_server.bytes[kind]
        assert (
            accounted.messages["tasks"] - on_server.messages["tasks"] == 2 * 2 * 4
        )  # ways, layers, intervals


def test_bytes_of_attention_weights_by_hand(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """One interval, all edges in it: 2 layers of 2 heads, doubles, int32 indices, loops added at 80 nodes."""
    graph = make_graph(80)
    given: Any = {"intervals": 1}
    ((plain, _, _),) = costs(graph, monkeypatch, "gat", 1, **given)
    ((edges, _, _),) = costs(graph, monkeypatch, "gat", 1, edge_functions=True, **given)
    num_edges, v = graph.num_edges, 8 * 2
    given_once = 8 * 81 + 4 * num_edges + v * (80 + 80)
    weights = v * (num_edges + 80)
    assert edges.bytes["tasks"] - plain.bytes["tasks"] == 2 * (2 * given_once + weights)
    assert edges.bytes["results"] - plain.bytes["results"] == 2 * (weights + v * (80 + 80))


@pytest.mark.parametrize("options", [{}, {"fuse_loss": False, "rematerialise": False}, {"stream": False}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("sparse", [False, True])
def test_messages_of_large_tasks_are_accounted(
    make_graph: MakeGraph, monkeypatch: Any, sparse: bool, options: dict[str, bool]
) -> None:
    """Intervals of more than a tile, in blocks of a tile: more messages, of the same bytes."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1 << 14)
    graph = make_graph(3000, sparse=sparse)
    ((accounted, counted, _),) = costs(graph, monkeypatch, "sage", 1, **{"intervals": 2, **options})
    assert counted == accounted * EPOCHS
    is_cut = accounted.messages["tasks"] > accounted.messages["results"]
    assert is_cut == options.get("stream", True)
    ((whole, _, _),) = costs(graph, monkeypatch, "sage", 1, **{"intervals": 2, **options, "stream": False})
    assert accounted.bytes == whole.bytes


def test_fusing_and_computing_again_save_what_was_computed(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """GCN, 2 layers of 12, doubles. Unfused: rows and labels go twice. Kept: what forward saved goes both ways."""
    graph = make_graph(80)
    ((plain, _, _),) = costs(graph, monkeypatch, "gcn", 1)
    ((unfused, _, _),) = costs(graph, monkeypatch, "gcn", 1, fuse_loss=False)
    # The last piece's rows, mapped before they are gathered, and labels.
    assert unfused.bytes["tasks"] - plain.bytes["tasks"] == 80 * (8 * graph.num_classes + 8)
    assert unfused.bytes["results"] == plain.bytes["results"]
    assert unfused.messages["tasks"] - plain.messages["tasks"] == 4  # intervals
    ((kept, _, _),) = costs(graph, monkeypatch, "gcn", 1, rematerialise=False)
    saved = kept.bytes["results"] - plain.bytes["results"]
    assert (
        saved == kept.bytes["tasks"] - plain.bytes["tasks"] == 80 * 8 * 12
    )  # the relu's output of the first piece
