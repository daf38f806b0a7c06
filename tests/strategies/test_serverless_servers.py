"""A graph server that is killed mid-epoch, a disk that is full: what happened is told, no function stays, a run goes on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch
from torch import Tensor

from polyhop import launch
from polyhop.errors import CheckpointError, PeerError
from polyhop.graph import Graph
from polyhop.launch import Launch
from polyhop.train.checkpoint import Checkpoints

sys.path.insert(
    0, str(Path(__file__).parent)
)  # ranks are processes of their own, and find the function by its name
sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

import serverless_dying  # type: ignore[import-not-found]
from remains import Remains  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _no_remains() -> Iterator[None]:
    """No process (functions are some), port or shared memory stays."""
    seen = Remains()
    yield
    seen.check(within_s=10)


def run(
    graph: Graph,
    where: str,
    rank: int = 1,
    run_dir: Path | None = None,
    restarts: int = 0,
    **options: Any,
) -> Weights:
    given = Launch(num_ranks=2, peer_timeout_s=5, start_timeout_s=90, pin=False, max_restarts=restarts)
    folder = None if run_dir is None else str(run_dir)
    found: Weights = launch.run(serverless_dying.train, (graph, options, where, rank, folder), given)
    return found


@pytest.mark.parametrize(
    ("where", "rank"),
    [
        ("task", 1),
        pytest.param("task", 0, marks=pytest.mark.slow),
        pytest.param("gather", 1, marks=pytest.mark.slow),
        pytest.param("sum", 0, marks=pytest.mark.slow),
        pytest.param("stop", 1, marks=pytest.mark.slow),
    ],
)
def test_a_server_killed_mid_epoch_is_named(make_graph: MakeGraph, where: str, rank: int) -> None:
    began = time.monotonic()
    with pytest.raises(PeerError, match=rf"rank {rank} .*was (lost|killed)"):
        run(make_graph(60), where, rank)
    assert time.monotonic() - began < 100


@pytest.mark.slow
@pytest.mark.parametrize("where", ["task", "gather", "sum"])
def test_a_restart_gives_the_same_weights(make_graph: MakeGraph, tmp_path: Path, where: str) -> None:
    """The other had functions at work; both go back to the last checkpoint and end as if nothing had been."""
    graph = make_graph(60)
    whole = run(graph, "nowhere", run_dir=tmp_path / "whole")
    found = run(graph, where, run_dir=tmp_path / "struck", restarts=1)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name
    lines = [len((tmp_path / d / "metrics.jsonl").read_text().splitlines()) for d in ("whole", "struck")]
    assert lines == [serverless_dying.EPOCHS] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_lost_a_server_goes_on(make_graph: MakeGraph, tmp_path: Path, rank: int) -> None:
    graph = make_graph(60)
    whole = run(graph, "nowhere")
    with pytest.raises(PeerError, match=f"rank {rank}"):
        run(graph, "task", rank, tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]  # nothing half-written, and not the end
    found = run(graph, "nowhere", run_dir=tmp_path / "run", resume="auto", functions=3)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
def test_a_run_whose_disk_was_full_goes_on(make_graph: MakeGraph, small_disk: Path) -> None:
    """The next checkpoint does not fit. The last good one stays, whole, and nothing of the one that failed."""
    graph = make_graph(60)
    whole, folder = run(graph, "nowhere"), small_disk / "run"
    told = rf"cannot write checkpoint {folder}.*step-00000006: No space left.*last good checkpoint is .*step-00000004"
    with pytest.raises(CheckpointError, match=told):
        run(graph, "disk", run_dir=folder)
    kept = Checkpoints(folder / "checkpoints")
    assert sorted(path.name for path in kept.folder.iterdir()) == ["step-00000002", "step-00000004"]
    newest = kept.newest()
    assert newest is not None
    assert newest.step == 4
    (small_disk / "ballast").unlink()
    found = run(graph, "nowhere", run_dir=folder, resume="auto")
    for name, value in whole.items():
        assert torch.equal(found[name], value), name
    epochs = [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert epochs == list(range(1, serverless_dying.EPOCHS + 1))
