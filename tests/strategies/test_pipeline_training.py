"""Whole trainings over a pipeline: weights, optimiser, clipping, evaluation, checkpoints as of one process; a stage lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import launch, nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import CheckpointError, ConfigError, PeerError, UnsupportedError
from polyhop.graph import Graph
from polyhop.launch import Launch
from polyhop.partition import partition, share
from polyhop.train.state import Result
from polyhop.trainer import Trainer

sys.path.insert(
    0, str(Path(__file__).parent)
)  # ranks are processes of their own, and find the function by its name

import pipeline_dying  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
Weights = dict[str, Tensor]
SEEDING = threading.Lock()


def model_of(graph: Graph) -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        return nn.GCNII(graph.num_features, 12, num_layers=4, out_channels=graph.num_classes, dropout=0.3)


def trainer(strategy: str, **options: Any) -> Trainer:
    given = {"max_epochs": 6, "lr": 0.02, "precision": "64-true", "seed": 5, **options}
    return Trainer(strategy, device="cpu", progress="none", **given)


def on_rank(line: Collective, graph: Graph, options: dict[str, Any]) -> tuple[Weights, Result]:
    model = model_of(graph)
    held = share(graph, partition(graph, line.num_ranks, "hash"), line.rank)
    result = trainer("pipeline", **options).fit(model, held, line=line)
    return model.state_dict(), result


def over_stages(graph: Graph, num_ranks: int, **options: Any) -> tuple[Weights, Result]:
    found = run_in_threads(num_ranks, on_rank, graph, options)
    for weights, _ in found:
        assert all(torch.equal(value, found[0][0][name]) for name, value in weights.items()), "ranks differ"
    return found[0]


def alone(graph: Graph, **options: Any) -> tuple[Weights, Result]:
    model = model_of(graph)
    result = trainer("single", **options).fit(model, graph)
    return model.state_dict(), result


@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 0.05}, {"optimizer": "adamw", "weight_decay": 0.1}, {"optimizer": "sgd", "momentum": 0.9}],
    ids=str,
)
@pytest.mark.parametrize(
    "mode",
    [
        {"chunks": 1},
        {"chunks": 4, "exact_layers": True},
        {"ranks": 4, "stages": 2, "chunks": 2},
        {"ranks": 4, "stages": 2, "chunks": 5, "exact_layers": True},
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(
    make_graph: MakeGraph, options: dict[str, Any], mode: dict[str, Any]
) -> None:
    graph, ranks = make_graph(60), mode.get("ranks", 3)
    expected, judged = alone(graph, **options)
    mode = {name: value for name, value in mode.items() if name != "ranks"}
    found, result = over_stages(graph, ranks, **options, **mode)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)
    assert [each["val"] for each in result.history] == [each["val"] for each in judged.history]
    losses = [each["loss"] for each in judged.history]
    assert [each["loss"] for each in result.history] == pytest.approx(losses, rel=1e-9)


def test_stages_do_not_matter(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    one, several = (over_stages(graph, stages, chunks=5, history_gamma=2)[0] for stages in (1, 3))
    assert all(torch.equal(several[name], value) for name, value in one.items())


def test_stages_of_ways_do_not_matter(make_graph: MakeGraph) -> None:
    """To the bit; where gradients are clipped to rounding: their norm is a sum over ranks."""
    graph, options = make_graph(60), {"chunks": 5, "history_gamma": 2}
    one, several = (over_stages(graph, 2 * stages, stages=stages, **options)[0] for stages in (1, 3))
    assert all(torch.equal(several[name], value) for name, value in one.items())
    one, several = (
        over_stages(graph, 2 * stages, stages=stages, clip=0.05, **options)[0] for stages in (1, 3)
    )
    for name, value in one.items():
        assert torch.allclose(several[name], value, rtol=1e-9, atol=1e-12), name


def test_history_learns(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    found = over_stages(graph, 2, chunks=6, max_epochs=40)[1]
    expected = alone(graph, max_epochs=40)[1]
    assert found.history[-1]["loss"] < 0.6 * found.history[0]["loss"]
    assert found.best_val is not None
    assert expected.best_val is not None
    assert found.best_val > expected.best_val - 0.1


@pytest.mark.parametrize("options", [{}, {"history_period": 4}, {"exact_layers": True}], ids=str)
@pytest.mark.parametrize("stages", [None, 2])
def test_resumed_is_undisturbed(
    make_graph: MakeGraph, tmp_path: Path, options: dict[str, Any], stages: int | None
) -> None:
    """Weights, optimiser state and history of all stages come back; a refresh of the history is two epochs off."""
    graph, given = make_graph(60), {"chunks": 5, "eval_every": 4, "stages": stages, **options}
    ranks = 3 if stages is None else 4
    whole, _ = over_stages(graph, ranks, max_epochs=9, **given)
    folder = {"run_dir": str(tmp_path / "run"), "checkpoint_every": 6}
    over_stages(graph, ranks, max_epochs=6, **given, **folder)
    found, _ = over_stages(graph, ranks, max_epochs=9, resume="auto", **given, **folder)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_other_stages_cannot_go_on(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, given = make_graph(60), {"chunks": 5, "run_dir": str(tmp_path / "run")}
    over_stages(graph, 3, max_epochs=2, **given)
    with pytest.raises(CheckpointError, match="other stages or chunks"):
        over_stages(graph, 2, max_epochs=4, resume="auto", **given)


def test_other_ways_cannot_go_on(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, given = make_graph(60), {"chunks": 4, "run_dir": str(tmp_path / "run")}
    over_stages(graph, 4, max_epochs=2, stages=2, **given)
    for ranks, stages in ((2, 2), (4, 4), (4, 1)):
        with pytest.raises(CheckpointError, match="stages"):
            over_stages(graph, ranks, max_epochs=4, stages=stages, resume="auto", **given)


def test_one_process_is_told_to_use_ranks(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    with pytest.raises(ConfigError, match="runs on ranks"):
        trainer("pipeline").fit(model_of(graph), graph)
    with pytest.raises(UnsupportedError, match="bits=delta"):
        over_stages(graph, 2, bits="delta")
    with pytest.raises(ConfigError, match="history_gamma"):
        trainer("pipeline", history_gamma=1.5)


def dying(
    graph: Graph, options: dict[str, Any], where: str, run_dir: Path | None = None, restarts: int = 0
) -> Weights:
    num_ranks = 4 if "stages" in options else 3
    given = Launch(
        num_ranks=num_ranks, peer_timeout_s=5, start_timeout_s=90, pin=False, max_restarts=restarts
    )
    folder = None if run_dir is None else str(run_dir)
    found: Weights = launch.run(pipeline_dying.train, (graph, options, where, 1, folder), given)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_stage_killed_mid_epoch_is_named(make_graph: MakeGraph, where: str) -> None:
    with pytest.raises(PeerError, match=r"rank 1 .*was (lost|killed)"):
        dying(make_graph(60), {}, where)


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_way_killed_mid_epoch_is_named(make_graph: MakeGraph, where: str) -> None:
    """Its way beside it waits for rows, its neighbours in other stages for a chunk."""
    with pytest.raises(PeerError, match=r"rank 1 .*was (lost|killed)"):
        dying(make_graph(60), {"stages": 2, "chunks": 8}, where)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"history_period": 3}, {"stages": 2, "chunks": 8}], ids=str)
def test_a_restart_gives_the_same_weights(
    make_graph: MakeGraph, tmp_path: Path, options: dict[str, Any]
) -> None:
    graph, given = make_graph(60), {**options, "checkpoint_every": 2}
    whole = dying(graph, given, "nowhere", run_dir=tmp_path / "whole")
    found = dying(graph, given, "backward", run_dir=tmp_path / "struck", restarts=1)
    for name, value in whole.items():
        assert torch.equal(found[name], value), name
