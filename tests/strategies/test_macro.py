"""Macrobatches give the bits of ``data``, for any window, pool and transport."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyhop
from polyhop import launch, nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, PeerError
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.trainer import Trainer

sys.path.insert(
    0, str(Path(__file__).parent)
)  # ranks are processes of their own, and find the function by its name

from dying import train_and_die

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

SEEDING = threading.Lock()
NUM_STEPS = 5
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 8, num_layers=3, out_channels=c, dropout=0.5),
    "sage": lambda f, c: nn.GraphSAGE(f, 8, num_layers=3, out_channels=c, dropout=0.5),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=2, dropout=0.4),
    "gin": lambda f, c: nn.GIN(f, 8, num_layers=3, out_channels=c),
}


@dataclass
class Trained:
    weights: dict[str, Tensor]
    losses: list[float]
    test: float | None
    sent: Cost


def model_of(name: str, graph: Graph) -> torch.nn.Module:
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def fit(
    line: Collective, graph: Graph, owner: Tensor, name: str, strategy: str, options: dict[str, Any]
) -> Trained:
    """Two epochs of five steps, in float32."""
    given = {"max_epochs": 2, "batch_size": 20, "num_neighbors": [4, 3, 3], "eval_every": 100, "seed": 3}
    trainer = Trainer(strategy, **{**given, "device": "cpu", "progress": "none", **options})
    model = model_of(name, graph)
    result = trainer.fit(model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line)
    losses = [record["loss"] for record in result.history]
    return Trained(model.state_dict(), losses, result.test, line.traffic.now())


def assert_bits(found: list[Trained], expected: list[Trained]) -> None:
    for rank, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.losses[-1] == want.losses[-1], rank
        assert got.test == want.test
        for name, value in want.weights.items():
            assert torch.equal(got.weights[name], value), (rank, name)


def hashed(graph: Graph, num_ranks: int) -> Tensor:
    return partition(graph, num_ranks, "hash").owner


@pytest.mark.parametrize("name", MODELS)
def test_bits_of_data_for_any_window(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph(weighted=name == "gcn")
    owner = hashed(graph, 3)
    expected = run_in_threads(3, fit, graph, owner, name, "data", {})
    for k in (1, 2, 3, 7, 8, 32, NUM_STEPS):
        assert_bits(run_in_threads(3, fit, graph, owner, name, "macro", {"macro": k}), expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_bits_of_data_over_gloo(make_graph: MakeGraph, ranks: Run, num_ranks: int) -> None:
    graph = make_graph()
    owner = hashed(graph, num_ranks)
    expected = run_in_threads(num_ranks, fit, graph, owner, "sage", "data", {})
    for k in (2, NUM_STEPS):
        assert_bits(ranks(num_ranks, fit, graph, owner, "sage", "macro", {"macro": k}), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "forgets": {"delta": False},
    "cache": {"cache": "2KB"},
    "large cache": {"cache": "1MB"},
    "cache, forgets": {"cache": "2KB", "delta": False},
    "little memory": {"memory": 27_000},
    "labor": {"sampler": "labor"},
    "labor, dependent": {"sampler": "labor", "labor_dependence": 3},
    "all neighbours": {"num_neighbors": [-1, -1, -1]},
    "bfloat16": {"feature_dtype": "bfloat16"},
    "int8": {"feature_dtype": "int8"},
    "double": {"precision": "64-true"},
    "automatic": {"macro": "auto"},
    "one step": {"batch_size": 1000},
    "tiny steps": {"batch_size": 1, "max_epochs": 1},
}


@pytest.fixture(scope="module")
def plain(make_graph: MakeGraph) -> list[Trained]:
    """What ``data`` trains where nothing that it knows of is asked for."""
    graph = make_graph()
    return run_in_threads(3, fit, graph, hashed(graph, 3), "sage", "data", {})


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_change_nothing_of_it(
    make_graph: MakeGraph, plain: list[Trained], options: dict[str, Any]
) -> None:
    graph = make_graph()
    owner = hashed(graph, 3)
    same = {k: v for k, v in options.items() if k not in ("delta", "macro", "cache", "memory")}
    expected = run_in_threads(3, fit, graph, owner, "sage", "data", same) if same else plain
    found = run_in_threads(3, fit, graph, owner, "sage", "macro", {"macro": 3, **options})
    assert_bits(found, expected)


@pytest.mark.parametrize("made", [{"sparse": True}, {"kind": "multi"}, {"weighted": True}], ids=str)
def test_bits_of_data_on_other_graphs(make_graph: MakeGraph, made: dict[str, Any]) -> None:
    graph = make_graph(**made)
    owner = hashed(graph, 3)
    expected = run_in_threads(3, fit, graph, owner, "gcn", "data", {})
    assert_bits(run_in_threads(3, fit, graph, owner, "gcn", "macro", {"macro": 3}), expected)


@pytest.mark.parametrize("kind", ["skewed", "empty"])
def test_uneven_and_empty_parts(make_graph: MakeGraph, kind: str) -> None:
    graph = make_graph()
    nodes = torch.arange(graph.num_nodes)
    owner = (torch.where(nodes % 10 == 9, nodes % 4, 0) if kind == "skewed" else nodes % 3).int()
    for options in ({"macro": 2}, {"macro": 100, "batch_size": 60}):  # 60: fewer steps than ranks
        same = {k: v for k, v in options.items() if k != "macro"}
        expected = run_in_threads(4, fit, graph, owner, "sage", "data", same)
        assert_bits(run_in_threads(4, fit, graph, owner, "sage", "macro", options), expected)


def test_the_partition_changes_nothing_of_the_draws(make_graph: MakeGraph) -> None:
    """The same seeds on the same ranks would give the same bits; other parts give other sums, so to rounding."""
    graph = make_graph()
    wanted = {"precision": "64-true", "macro": 3}
    one, other = (
        run_in_threads(3, fit, graph, partition(graph, 3, method).owner, "sage", "macro", wanted)
        for method in ("hash", "ldg")
    )
    for name, value in one[0].weights.items():
        assert float((other[0].weights[name] - value).abs().max()) <= 1e-10


def test_resumed_in_the_middle_of_a_window(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    owner = hashed(graph, 2)
    whole = run_in_threads(2, fit, graph, owner, "sage", "macro", {"macro": 4})
    options = {"run_dir": tmp_path / "run", "macro": 4, "checkpoint_every": 2}
    run_in_threads(2, fit_part, graph, owner, 7, options)
    again = run_in_threads(2, fit, graph, owner, "sage", "macro", {**options, "resume": "auto", "macro": 3})
    assert_bits(again, whole)
    assert again[0].losses == whole[0].losses


def fit_part(line: Collective, graph: Graph, owner: Tensor, num_steps: int, options: dict[str, Any]) -> None:
    """Train, and fail after so many steps."""
    calls = [0]

    def count(module: torch.nn.Module, _: Any) -> None:
        calls[0] += module.training
        if calls[0] > num_steps:
            raise RuntimeError("enough")

    model = model_of("sage", graph)
    model.register_forward_pre_hook(count)
    given = {"max_epochs": 2, "batch_size": 20, "num_neighbors": [4, 3, 3], "eval_every": 100, "seed": 3}
    trainer = Trainer("macro", **{**given, "device": "cpu", "progress": "none", **options})
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line)


def test_shared_variates(make_graph: MakeGraph) -> None:
    """A window of one is plain LABOR; a wider one fetches fewer rows, and trains on other draws."""
    graph = make_graph(600)
    owner = hashed(graph, 2)
    options = {"sampler": "labor", "delta": False, "macro": 1}
    plain = run_in_threads(2, fit, graph, owner, "sage", "macro", options)
    alike = run_in_threads(2, fit, graph, owner, "sage", "macro", {**options, "share_variates": True})
    assert_bits(alike, plain)
    apart, shared = (
        run_in_threads(2, fit, graph, owner, "sage", "macro", {**options, "macro": 8, "share_variates": on})
        for on in (False, True)
    )
    assert apart[0].losses == plain[0].losses
    assert shared[0].losses != plain[0].losses
    assert shared[0].sent.bytes["features"] < 0.9 * apart[0].sent.bytes["features"]


def test_dependent_steps_fetch_fewer_rows(make_graph: MakeGraph) -> None:
    graph = make_graph(600)
    owner = hashed(graph, 2)
    options = {"sampler": "labor", "delta": False, "macro": 8}
    apart, alike = (
        run_in_threads(2, fit, graph, owner, "sage", "macro", {**options, "labor_dependence": steps})
        for steps in (1, 16)
    )
    assert alike[0].sent.bytes["features"] < 0.9 * apart[0].sent.bytes["features"]


def test_what_cannot_be(make_graph: MakeGraph) -> None:
    graph = make_graph()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"share_variates": True, "macro": 4}, "sampler='labor'"),
        ({"share_variates": True, "sampler": "labor"}, "macro=K"),
        ({"share_variates": True, "sampler": "labor", "labor_dependence": 4, "macro": 4}, "give one of them"),
        ({"memory": 500}, "one mini-batch needs .* memory is 500 B"),
        ({"num_neighbors": None, "batch_size": None}, "one fan-out per layer"),
    ]
    for options, message in cases:
        told = run_in_threads(2, refused, graph, hashed(graph, 2), options)
        assert all(re.search(message, each) for each in told), (message, told)
    with pytest.raises(ConfigError, match="at least 1, or 'auto'"):
        Trainer("macro", macro=0)
    with pytest.raises(ConfigError, match="runs on ranks"):
        Trainer("macro", num_neighbors=[2, 2, 2], progress="none").fit(model_of("sage", graph), graph)


def refused(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        fit(line, graph, owner, "sage", "macro", options)
    return str(raised.value)


def test_a_rank_killed_inside_a_window_is_named(make_graph: MakeGraph) -> None:
    options = launch.Launch(num_ranks=3, peer_timeout_s=5, start_timeout_s=60, pin=False)
    with pytest.raises(PeerError, match=r"rank 1 .*was (lost|killed)"):
        launch.run(train_and_die, (make_graph(),), options)


@pytest.mark.parametrize(
    ("name", "max_epochs", "batch_size"), [("cora", 12, 70), ("amazon-computers", 3, 400)]
)
def test_accuracy_of_data_on_real_graphs(data_dir: Path, name: str, max_epochs: int, batch_size: int) -> None:
    graph = polyhop.load(name, data_dir=data_dir)
    options = {"max_epochs": max_epochs, "batch_size": batch_size, "num_neighbors": [10, 5, 5]}
    owner = hashed(graph, 2)
    expected = run_in_threads(2, fit, graph, owner, "gcn", "data", options)
    assert_bits(run_in_threads(2, fit, graph, owner, "gcn", "macro", options), expected)
    assert expected[0].test is not None
    assert expected[0].test > 0.3
