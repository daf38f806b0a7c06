"""Training struck by SIGKILL or SIGSTOP at any moment: named in time, nothing stays, a restart ends in the same weights."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhop import launch
from polyhop.cli.ranks import _cut, train_rank
from polyhop.cli.recipe import Recipe
from polyhop.errors import LaunchError, PeerError
from polyhop.graph import Graph
from polyhop.launch import Launch
from polyhop.partition import default_method, partition
from polyhop.sample import presampled

sys.path.insert(0, str(Path(__file__).parents[1] / "launch"))

from faults import strike
from remains import Remains

PEER_TIMEOUT_S = 3.0
SLACK_S = 25.0
MOMENTS = int(os.environ.get("POLYHOP_MOMENTS", "5"))  # of each kind: 20 in all
OPTIONS: dict[str, Any] = {
    "macro": 5,
    "max_epochs": 3,
    "num_neighbors": [5, 5],
    "batch_size": 128,
    "seed": 0,
    "device": "cpu",
    "checkpoint_every": 4,
    "progress": "none",
    "resume": None,
}
RECIPE = Recipe(source="synth:arxiv?scale=0.02", model="sage", hidden=16, layers=2)


@pytest.fixture
def remains() -> Iterator[Remains]:
    seen = Remains()
    yield seen
    seen.check()


def work(folder: Path, strategy: str) -> tuple[Any, ...]:
    return (RECIPE, {**OPTIONS, "strategy": strategy}, folder, None, "hash")


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "number", "restarts"),
    [
        ("data", signal.SIGKILL, 0),
        ("data", signal.SIGKILL, 1),
        ("data", signal.SIGSTOP, 0),
        ("data", signal.SIGSTOP, 1),
        ("macro", signal.SIGKILL, 0),
        ("macro", signal.SIGKILL, 1),
        ("macro", signal.SIGSTOP, 0),
    ],
)
def test_training_struck_at_random_moments(
    tmp_path: Path, remains: Remains, strategy: str, number: signal.Signals, restarts: int
) -> None:
    """Blows at moments from the start of the ranks to the end of their work, until MOMENTS of them were felt."""
    seed = random.SystemRandom().randrange(2**31)
    moments = random.Random(seed)
    options = Launch(
        num_ranks=3, peer_timeout_s=PEER_TIMEOUT_S, start_timeout_s=30, pin=False, max_restarts=restarts
    )
    before = time.monotonic()
    launch.run(train_rank, work(tmp_path / "whole", strategy), options)
    whole_s = time.monotonic() - before
    felt = 0
    for round_ in range(5 * MOMENTS):
        if felt == MOMENTS:
            break
        folder = tmp_path / f"run-{round_}"
        rank, after_s = moments.randrange(3), moments.uniform(0, 1) * whole_s
        struck = strike(
            train_rank, work(folder, strategy), options, rank=rank, number=number, after_s=after_s
        )
        told = f"seed {seed}, rank {rank} after {after_s:.2f} of {whole_s:.2f} s: {struck}"
        felt += struck.is_felt
        if not struck.is_felt:  # too late: the machine has less to do than when the whole was timed
            whole_s = struck.whole_s
        if struck.error is None:
            assert digest(folder) == digest(tmp_path / "whole"), told
        else:
            assert not restarts, told
            assert isinstance(struck.error, PeerError | LaunchError), told
            assert f"rank {rank}" in str(struck.error), told
            limit_s = options.start_timeout_s if isinstance(struck.error, LaunchError) else PEER_TIMEOUT_S
            assert struck.seconds < limit_s + SLACK_S, told
        remains.check(within_s=10)
    assert felt == MOMENTS, f"seed {seed}"


def test_parts_of_split_follow_its_mini_batches(make_graph: Callable[..., Graph]) -> None:
    graph = make_graph(num_nodes=400)
    options = {
        "strategy": "split",
        "num_neighbors": [4, 3],
        "batch_size": 40,
        "sampler": "uniform",
        "seed": 2,
    }
    by_structure = partition(graph, 3, default_method(), seed=2).owner
    fitted = presampled(graph, 3, [4, 3], 40, seed=2).partition.owner
    assert not torch.equal(fitted, by_structure), "the case is no case"
    assert torch.equal(_cut(graph, 3, "auto", options).owner, fitted)
    for other in ({"strategy": "data"}, {"num_neighbors": None}):
        assert torch.equal(_cut(graph, 3, "auto", {**options, **other}).owner, by_structure)
    assert torch.equal(_cut(graph, 3, "hash", options).owner, partition(graph, 3, "hash", seed=2).owner)
