"""Groups of ranks that split slices of a mini-batch: the weights of one process; only sums of gradients leave a group."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, PartitionError
from polyhop.exchange import Seeds, bucket_sizes
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.wire import Wire
from polyhop.strategies import Team, place, split
from polyhop.strategies.data_cost import account_leaving
from polyhop.strategies.split_cost import Facts, account, asked, estimate
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

GRID = [(1, 4), (2, 2), (4, 1), (2, 1), (2, 4)]  # (groups, ranks of each)
SEEDING = threading.Lock()
MODELS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "sage": lambda f, c: nn.GraphSAGE(f, 8, num_layers=3, out_channels=c, dropout=0.5),
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=4, dropout=0.4),
    "wide": lambda f, c: nn.GraphSAGE(f, 96, num_layers=3, out_channels=c, dropout=0.5),  # summed in tiers
}


def model_of(name: str, graph: Any) -> torch.nn.Module:
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def trainer(strategy: str, **options: Any) -> Trainer:
    """Ten steps of Adam in double, evaluated after each epoch of five."""
    given = {"max_epochs": 2, "batch_size": 20, "num_neighbors": [4, 3, 3], "precision": "64-true"}
    return Trainer(strategy, **{**given, "device": "cpu", "progress": "none", "seed": 3, **options})


@dataclass
class Trained:
    weights: dict[str, Tensor]
    history: list[dict[str, Any]]
    test: float | None
    steps: int
    left: Cost  # what went to other groups


def share_of(line: Collective, graph: Graph, owner: Tensor, num_groups: int) -> Any:
    size = line.num_ranks // num_groups
    return share(graph, Partition(owner, size), line.rank % size)


def outside(line: Collective, num_groups: int) -> list[int]:
    size = line.num_ranks // num_groups
    return [q for q in range(line.num_ranks) if q // size != line.rank // size]


def fit_group(
    line: Collective, graph: Graph, owner: Tensor, num_groups: int, name: str, options: dict[str, Any]
) -> Trained:
    model, others = model_of(name, graph), outside(line, num_groups)
    before = line.traffic.to(others)
    result = trainer("split", split_groups=num_groups, **options).fit(
        model, share_of(line, graph, owner, num_groups), line=line
    )
    left = line.traffic.to(others) - before
    return Trained(model.state_dict(), list(result.history), result.test, result.steps, left)


def alone(graph: Graph, name: str, **options: Any) -> Trained:
    model = model_of(name, graph)
    result = trainer("single", **options).fit(model, graph)
    return Trained(model.state_dict(), list(result.history), result.test, result.steps, Cost())


def assert_same(found: list[Trained], expected: Trained) -> None:
    for rank, each in enumerate(found):
        assert each.steps == expected.steps
        for name, value in expected.weights.items():
            assert torch.equal(each.weights[name], found[0].weights[name]), (rank, name)
            assert float((each.weights[name] - value).abs().max()) <= 1e-10, (rank, name)
        assert each.test == expected.test
        assert set(each.left.bytes) <= {"gradients", "weights", "sizes"}  # no ids, rows or scores
    for mine, theirs in zip(found[0].history, expected.history, strict=True):
        for name in ("loss", "val", "val_loss", "test", "test_loss"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-10), name


def owners(graph: Graph, num_parts: int, kind: str = "hash") -> Tensor:
    """int32 [N]: ``skewed`` gives part 0 most, ``empty`` leaves the last without nodes."""
    nodes = torch.arange(graph.num_nodes)
    if kind == "skewed":
        return torch.where(nodes % 10 == 9, nodes % num_parts, 0).int()
    if kind == "empty":
        return (nodes % max(1, num_parts - 1)).int()
    return partition(graph, num_parts, kind).owner


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_every_grid_gives_the_weights_of_one_process(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph(weighted=name == "gcn")
    expected = alone(graph, name)
    for num_groups, size in GRID:
        found = run_in_threads(num_groups * size, fit_group, graph, owners(graph, size), num_groups, name, {})
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["gat", "wide"])
def test_two_groups_of_two_processes(make_graph: MakeGraph, ranks: Run, name: str) -> None:
    graph = make_graph()
    found = ranks(4, fit_group, graph, owners(graph, 2), 2, name, {})
    assert_same(found, alone(graph, name))
    over_threads = run_in_threads(4, fit_group, graph, owners(graph, 2), 2, name, {})
    for each, other in zip(found, over_threads, strict=True):
        assert each.left.only("gradients").bytes == other.left.only("gradients").bytes
        for key, value in each.weights.items():
            assert torch.equal(value, other.weights[key]), key


OPTIONS: dict[str, dict[str, Any]] = {
    "one seed": {"batch_size": 1, "max_epochs": 1},  # the other groups have none
    "few seeds": {"batch_size": 3},  # of four groups, one has none
    "last batch of one": {"batch_size": 19},  # of 39 train nodes
    "all neighbours": {"num_neighbors": [-1, -1, -1]},
    "labor": {"sampler": "labor"},
    "depth and copies": {"split_depth": 2, "cache": 2000},
    "patience": {"patience": 1, "max_epochs": 6, "lr": 0.05},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("num_groups", "kind"), [(2, "skewed"), (4, "empty")])
def test_groups_without_seeds_and_options(
    make_graph: MakeGraph, options: dict[str, Any], num_groups: int, kind: str
) -> None:
    graph = make_graph(num_nodes=80 if "batch_size" in options else 200)
    owner = owners(graph, 2, kind)
    found = run_in_threads(num_groups * 2, fit_group, graph, owner, num_groups, "sage", options)
    shared = {name: value for name, value in options.items() if name not in ("cache", "split_depth")}
    assert_same(found, alone(graph, "sage", **shared))


@pytest.mark.parametrize(("kind", "metric"), [("multi", "f1_micro"), ("single", "roc_auc")])
def test_scores_count_every_node_once(make_graph: MakeGraph, kind: str, metric: str) -> None:
    graph = make_graph(kind=kind, sparse=True)
    found = run_in_threads(4, fit_group, graph, owners(graph, 2, "empty"), 2, "gcn", {"metric": metric})
    assert_same(found, alone(graph, "gcn", metric=metric))


def judge_and_predict(line: Collective, graph: Graph, owner: Tensor, num_groups: int) -> tuple[Any, Tensor]:
    held, model = share_of(line, graph, owner, num_groups), model_of("sage", graph)
    given = trainer("split", split_groups=num_groups)
    return given.evaluate(model, held, line=line), torch.as_tensor(given.predict(model, held, line=line))


def test_evaluation_and_prediction(make_graph: MakeGraph) -> None:
    graph = make_graph()
    one, model = trainer("single"), model_of("sage", graph)
    scores, logits = one.evaluate(model, graph), torch.as_tensor(one.predict(model, graph))
    found = run_in_threads(4, judge_and_predict, graph, owners(graph, 2), 2)
    assert all(each[0] == pytest.approx(scores, abs=1e-12) for each in found)
    assert torch.allclose(found[0][1], logits, rtol=0, atol=1e-12)
    assert all(each[1].numel() == 0 for each in found[1:])


# ---------------------------------------------------------------- seeds


def seeds_of(line: Collective, graph: Graph, owner: Tensor, num_groups: int, batch: int) -> list[Tensor]:
    """The user's ids of this rank's seeds, step by step."""
    part = share_of(line, graph, owner, num_groups).part
    assert part.split is not None
    team, train = Team(line, num_groups=num_groups), part.split.train
    group = (team.group_index, num_groups)
    seeds = Seeds(part.user_ids[train], train + part.start, team.group, seed=5, batch_size=batch, group=group)
    return [part.user_ids[own - part.start] for own in seeds.own(2)]


@pytest.mark.parametrize("batch", [1, 7, 32, 1000])
def test_slices_make_the_global_batch(make_graph: MakeGraph, batch: int) -> None:
    graph = make_graph()
    assert graph.split is not None
    order = NeighborLoader(graph, [2], graph.split.train, batch, seed=5).order(2)
    for num_groups, size in GRID:
        found = run_in_threads(num_groups * size, seeds_of, graph, owners(graph, size), num_groups, batch)
        for step in range(len(found[0])):
            wanted = order[step * batch : (step + 1) * batch].sort().values
            assert torch.equal(torch.cat([each[step] for each in found]).sort().values, wanted)
            shares = [
                sum(each[step].numel() for each in found[group * size : (group + 1) * size])
                for group in range(num_groups)
            ]
            assert max(shares) - min(shares) <= 1


# ---------------------------------------------------------------- what is sent

SEED, BATCH, EPOCH, FAN_OUTS = 5, 24, 2, [4, -1, 3]


def run_epoch(
    line: Collective, graph: Graph, owner: Tensor, num_groups: int, name: str, bits: int
) -> tuple[list[tuple[Cost, Cost]], list[int]]:
    """((traffic, what left the group) of every step, columns that cross at each layer)."""
    held, team = share_of(line, graph, owner, num_groups), Team(line, num_groups=num_groups)
    model = model_of(name, graph).double()
    config = split.Config(
        num_neighbors=FAN_OUTS, batch_size=BATCH, seed=SEED, bits=bits, prefetch=0, split_sums=False
    )
    whole = split.hold(held, place("cpu", "64-true"), team, config)
    step: Any = split.build(
        model, held, config, train_ids=held.split.train, whole=whole, loss=cross_entropy_sum, team=team
    )
    found, others = [], outside(line, num_groups)
    before = line.traffic.now(), line.traffic.to(others)
    for number, batch in enumerate(step.batches(EPOCH)):
        for parameter in model.parameters():
            parameter.grad = None
        step.gradients(batch, Key(SEED, EPOCH, number))
        after = line.traffic.now(), line.traffic.to(others)
        found.append((after[0] - before[0], after[1] - before[1]))
        before = after
    step.close()
    return found, step.columns


def slice_of(graph: Graph, step: int, group: int, num_groups: int) -> MiniBatch:
    """What a group splits, as one process draws it."""
    assert graph.split is not None
    order = NeighborLoader(graph, FAN_OUTS, graph.split.train, BATCH, seed=SEED).order(EPOCH)
    seeds = order[step * BATCH : (step + 1) * BATCH]
    low, high = (at * seeds.numel() // num_groups for at in (group, group + 1))
    return NeighbourSampler(graph, FAN_OUTS, seed=SEED).sample(seeds[low:high], EPOCH, step)


def returns_of(graph: Graph, columns: list[int]) -> list[bool]:
    return [columns[0] != graph.num_features, *[True] * (len(columns) - 1)]


@pytest.mark.parametrize(
    ("name", "bits", "num_groups", "size"),
    [
        pytest.param(*model, *grid, marks=() if model == ("sage", 32) or grid == (2, 2) else pytest.mark.slow)
        for model in (("sage", 32), ("gat", 32), ("wide", 32), ("sage", 4))
        for grid in ((1, 3), (2, 2), (3, 1), (2, 3))
    ],
)
def test_account_equals_the_counters(
    make_graph: MakeGraph, name: str, bits: int, num_groups: int, size: int
) -> None:
    graph, num_ranks = make_graph(num_nodes=300), num_groups * size
    shared = partition(graph, size, "hash")
    found = run_in_threads(num_ranks, run_epoch, graph, shared.owner, num_groups, name, bits)
    sizes, columns = bucket_sizes(list(model_of(name, graph).double().parameters())), found[0][1]
    for step in range(len(found[0][0])):
        crossing = [
            asked(slice_of(graph, step, group, num_groups), shared.new_ids, shared.bounds)
            for group in range(num_groups)
        ]
        for rank, (costs, _) in enumerate(found):
            sent, left = costs[step]
            expected = account(
                crossing[rank // size], columns, Wire(graph.num_nodes), sizes, rank, num_ranks,
                returns=returns_of(graph, columns), value_bytes=8, bits=bits, num_groups=num_groups,
            )  # fmt: skip
            leaving = account_leaving(sizes, 8, num_ranks, rank, num_groups)
            assert dict(sent.bytes) == dict(expected.bytes), (step, rank)
            assert dict(sent.messages) == dict(expected.messages), (step, rank)
            assert dict(left.bytes) == dict(leaving.bytes), (step, rank)  # sums of gradients, nothing else
            assert dict(left.messages) == dict(leaving.messages), (step, rank)
            assert set(left.bytes) == ({"gradients"} if num_groups > 1 else set())


def test_estimate_is_within_a_tenth(make_graph: MakeGraph) -> None:
    graph, num_groups, size = make_graph(num_nodes=1500), 2, 2
    assert graph.split is not None
    shared = partition(graph, size, "hash")
    found = run_in_threads(4, run_epoch, graph, shared.owner, num_groups, "sage", 32)
    start = torch.zeros(graph.num_nodes, 1, dtype=torch.float64)
    start[graph.split.train] = BATCH / num_groups / graph.split.train.numel()
    likely = [each[:, 0] for each in inclusion(full_block(graph), start, FAN_OUTS)]
    facts = Facts(
        graph.indptr, graph.indices, shared.owner.long(), likely[:-1], FAN_OUTS, found[0][1],
        returns_of(graph, found[0][1]), Wire(graph.num_nodes),
        bucket_sizes(list(model_of("sage", graph).parameters())), 4, value_bytes=8, num_groups=num_groups,
    )  # fmt: skip
    for rank, (costs, _) in enumerate(found):
        expected = estimate(facts, rank)
        assert expected.bytes["gradients"] == costs[0][0].bytes["gradients"]
        for kind in ("ids", "hidden"):
            mean = sum(cost.bytes[kind] for cost, _ in costs[:-1]) / len(
                costs[:-1]
            )  # the last one is smaller
            assert expected.bytes[kind] == pytest.approx(mean, rel=0.1), (rank, kind)


# ---------------------------------------------------------------- what is refused


def refused(line: Collective, graph: Graph, num_parts: int, index: int, num_groups: int) -> str:
    held = share(graph, partition(graph, num_parts, "hash"), index)
    try:
        trainer("split", split_groups=num_groups).fit(model_of("sage", graph), held, line=line)
    except (ConfigError, PartitionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("num_parts", "num_groups", "expected"),
    [
        (2, 3, r"ConfigError: split_groups=3 with 4 ranks: .*divides the ranks evenly \(1, 2, 4\)"),
        (2, 8, "ConfigError: split_groups=8 with 4 ranks"),
        (4, 2, r"PartitionError: rank \d of 4 in 2 groups of 2 was given part 0 of 4: .*here part \d of 2"),
        (2, 1, r"PartitionError: rank \d of 4 was given part 0 of 2"),
    ],
)
def test_what_does_not_fit_is_refused_everywhere(
    make_graph: MakeGraph, num_parts: int, num_groups: int, expected: str
) -> None:
    for text in run_in_threads(4, refused, make_graph(), num_parts, 0, num_groups):
        assert re.match(expected, text), text


@pytest.mark.parametrize("strategy", ["single", "data", "halo"])
def test_other_strategies_have_no_groups(strategy: str) -> None:
    with pytest.raises(ConfigError, match=f"split_groups=2 with strategy '{strategy}'.*--strategy split"):
        trainer(strategy, split_groups=2)


def test_no_groups_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="split_groups=0: expected a whole number of at least 1"):
        trainer("split", split_groups=0)


def dies(line: Collective, graph: Graph, owner: Tensor) -> None:
    def fails(record: dict[str, Any]) -> None:
        if line.rank == 3:
            raise ValueError("planted")

    fit_group(line, graph, owner, 2, "sage", {"callbacks": [fails]})


def test_a_rank_of_another_group_that_fails_ends_all(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(Exception, match="planted"):
        run_in_threads(4, dies, graph, owners(graph, 2))
