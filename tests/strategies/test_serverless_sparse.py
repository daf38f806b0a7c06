"""Strategy ``serverless`` on sparse inputs: their products stay on the server, weights are those of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

from polyhop.comm import run_in_threads
from polyhop.graph import Graph
from polyhop.strategies import serverless_step

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import ThreadLauncher  # type: ignore[import-not-found]
from test_serverless import alone, assert_same, on_rank  # type: ignore[import-not-found]


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("options", [{}, {"fuse_loss": False, "rematerialise": False}], ids=str)
def test_weights_of_one_process(
    make_graph: Callable[..., Graph], monkeypatch: Any, name: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph = make_graph(80, sparse=True)
    expected = alone(graph, name, 0.4, 4)
    given = {"intervals": 3, "functions": 1, **options}

    def pieces_sent(step: Any) -> tuple[Any, Any]:
        counted, account = step.counted(), step.account()
        return counted.bytes["tasks"], 4 * account.bytes["tasks"]

    for found in run_in_threads(2, on_rank, graph, name, 0.4, 4, given, pieces_sent):
        assert_same(found, expected, 1e-10)
        counted, accounted = found[2]
        assert counted == accounted > 0
