"""A rank that is killed while rows are on their way: the others are told who it was, nothing stays, a restart goes on."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import launch, nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import CheckpointError, ConfigError, InputError, PeerError
from polyhop.graph import Graph
from polyhop.launch import Launch
from polyhop.partition import Partition, share
from polyhop.trainer import Trainer

sys.path.insert(
    0, str(Path(__file__).parent)
)  # ranks are processes of their own, and find the function by its name

import halo_dying  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
REMAINS = Path(__file__).parents[1] / "launch" / "remains.py"
ADAPTIVE = {"bits": "adaptive"}


@pytest.fixture(autouse=True)
def _no_remains() -> Iterator[None]:
    """No process, port or shared memory stays."""
    spec = importlib.util.spec_from_file_location("remains", REMAINS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    remains = module.Remains()
    yield
    remains.check(within_s=10)


def run(
    graph: Graph,
    options: dict[str, Any],
    where: str,
    rank: int = 1,
    run_dir: Path | None = None,
    restarts: int = 0,
) -> dict[str, Tensor]:
    given = Launch(num_ranks=3, peer_timeout_s=5, start_timeout_s=90, pin=False, max_restarts=restarts)
    folder = None if run_dir is None else str(run_dir)
    found: dict[str, Tensor] = launch.run(halo_dying.train, (graph, options, where, rank, folder), given)
    return found


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("forward", {}),
        pytest.param("backward", ADAPTIVE, marks=pytest.mark.slow),
        pytest.param("assigner", ADAPTIVE, marks=pytest.mark.slow),
    ],
    ids=["forward", "backward", "assigner"],
)
def test_a_rank_killed_in_an_exchange_is_named(
    make_graph: MakeGraph, where: str, options: dict[str, Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"rank 1 .*was (lost|killed)"):
        run(make_graph(), options, where)
    assert time.monotonic() - began < 100


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("where", ["backward", "assigner"])
def test_any_rank_is_named(make_graph: MakeGraph, where: str, rank: int) -> None:
    with pytest.raises(PeerError, match=rf"rank {rank} .*was (lost|killed)"):
        run(make_graph(), ADAPTIVE, where, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "options"),
    [("backward", {}), ("forward", ADAPTIVE), ("assigner", ADAPTIVE), ("backward", {"halo": "stale"})],
    ids=["backward", "forward, adaptive", "assigner", "stale"],
)
def test_a_restart_gives_the_same_weights(
    make_graph: MakeGraph, tmp_path: Path, where: str, options: dict[str, Any]
) -> None:
    """The others had gone on by up to a step; all go back to the last checkpoint and end as if nothing had been."""
    graph = make_graph()
    given = {**options, "checkpoint_every": 2}
    whole = run(graph, given, "nowhere", run_dir=tmp_path / "whole")
    found = run(graph, given, where, run_dir=tmp_path / "struck", restarts=1)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name
    lines = [len((tmp_path / d / "metrics.jsonl").read_text().splitlines()) for d in ("whole", "struck")]
    assert lines == [14, 14]


# A checkpoint that other ranks or other parts go on with: told, or done right, and never wrong widths in silence.


def fit(
    line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any], run_dir: str, max_epochs: int
) -> dict[str, Tensor]:
    model = nn.GraphSAGE(graph.num_features, 8, num_layers=3, out_channels=graph.num_classes)
    trainer = Trainer(
        "halo", max_epochs=max_epochs, bits_period=4, bits_group=4, eval_every=100, device="cpu", progress="none",
        run_dir=run_dir, resume="auto", seed=3, **options,
    )  # fmt: skip
    trainer.fit(model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line)
    return model.state_dict()


@pytest.mark.parametrize("options", [{}, ADAPTIVE, {"halo": "stale"}, {"halo": "skipping"}], ids=str)
@pytest.mark.parametrize("other", ["more ranks", "fewer ranks", "other parts"])
def test_other_ranks_or_parts_go_on_or_are_told(
    make_graph: MakeGraph, tmp_path: Path, other: str, options: dict[str, Any]
) -> None:
    graph = make_graph()
    nodes = torch.arange(graph.num_nodes)
    run_dir = str(tmp_path / "run")
    run_in_threads(3, fit, graph, (nodes % 3).int(), options, run_dir, 7)
    num_ranks, owner = {
        "more ranks": (4, nodes % 4),
        "fewer ranks": (2, nodes % 2),
        "other parts": (3, nodes * 3 // graph.num_nodes),
    }[other]
    told, found = "", []
    try:
        found = run_in_threads(num_ranks, fit, graph, owner.int(), options, run_dir, 12)
    except (CheckpointError, ConfigError, InputError, PeerError) as error:
        told = str(error)
    assert found or any(word in told for word in ("parts", "ranks")), told
    for weights in found:
        assert all(torch.isfinite(value).all() for value in weights.values())
