"""A rank that is killed while rows of a mini-batch are on their way: the others say who it was, and a restart goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import launch
from polyhop.errors import PeerError
from polyhop.graph import Graph
from polyhop.launch import Launch

sys.path.insert(
    0, str(Path(__file__).parent)
)  # ranks are processes of their own, and find the function by its name

import halo_dying  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
SPLIT: dict[str, Any] = {"strategy": "split", "num_neighbors": [4, 3, 3], "batch_size": 20, "eval_every": 100}


def run(
    graph: Graph,
    options: dict[str, Any],
    where: str,
    run_dir: Path | None = None,
    restarts: int = 0,
    num_ranks: int = 3,
) -> dict[str, Tensor]:
    given = Launch(
        num_ranks=num_ranks, peer_timeout_s=5, start_timeout_s=90, pin=False, max_restarts=restarts
    )
    folder = None if run_dir is None else str(run_dir)
    found: dict[str, Tensor] = launch.run(halo_dying.train, (graph, options, where, 1, folder), given)
    return found


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_rank_killed_in_a_shuffle_is_named(make_graph: MakeGraph, where: str) -> None:
    with pytest.raises(PeerError, match=r"rank 1 .*was (lost|killed)"):
        run(make_graph(), SPLIT, where)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_of_another_group_is_named_too(make_graph: MakeGraph, where: str) -> None:
    """Rank 1 dies; ranks 2 and 3, which exchange nothing with it but gradients, end as soon as rank 0 does."""
    with pytest.raises(PeerError, match=r"rank 1 .*was (lost|killed)"):
        run(make_graph(), {**SPLIT, "split_groups": 2}, where, num_ranks=4)


@pytest.mark.slow
def test_a_restart_of_groups_gives_the_same_weights(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, given = make_graph(), {**SPLIT, "split_groups": 2, "checkpoint_every": 3}
    whole = run(graph, given, "nowhere", run_dir=tmp_path / "whole", num_ranks=4)
    found = run(graph, given, "backward", run_dir=tmp_path / "struck", restarts=1, num_ranks=4)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"split_depth": 2, "cache": 2000}])
def test_a_restart_gives_the_same_weights(
    make_graph: MakeGraph, tmp_path: Path, more: dict[str, Any]
) -> None:
    graph, given = make_graph(), {**SPLIT, **more, "checkpoint_every": 3}
    whole = run(graph, given, "nowhere", run_dir=tmp_path / "whole")
    found = run(graph, given, "backward", run_dir=tmp_path / "struck", restarts=1)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name
