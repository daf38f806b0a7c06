"""Intervals through the chain and back, without threads or sockets: what is ready is done here, in any order."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph, Sizes
from polyhop.partition import Partition, share
from polyhop.serverless import segments as chains
from polyhop.serverless.edge_tasks import EdgeAttention
from polyhop.serverless.epochs import Epoch, Epochs, Totals
from polyhop.serverless.graph_ops import graph_op
from polyhop.serverless.intervals import cut_intervals
from polyhop.serverless.lending import Lending
from polyhop.serverless.mail import Done, Work
from polyhop.serverless.passes import Calls, Passes, Settings
from polyhop.serverless.segments import Dense
from polyhop.serverless.tables import Table
from polyhop.serverless.tasks import run_task
from polyhop.serverless.versions import Versions
from polyhop.serverless.wire import TaskKey
from polyhop.strategies import Team, place, serverless, serverless_step

sys.path.insert(0, str(Path(__file__).parents[1] / "strategies"))

from test_serverless import alone, model_of  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
LR = 0.02


class Driven:
    """A server's passes, driven by hand: ``seed`` chooses what is done next. Training rows count as they do everywhere."""

    def __init__(self, line: Collective, graph: Graph, model: Any, settings: Settings, seed: int) -> None:
        held = share(graph, Partition(torch.zeros(graph.num_nodes).int(), 1), 0)
        config = serverless.Config(max_epochs=4, seed=3)
        whole = serverless.hold(held, place("cpu", "64-true"), Team(line), config)
        y, train = held.part.y, held.split.train  # type: ignore[union-attr]
        train = train[y[train] >= 0]
        scale = 1.0 / train.numel()
        self.chain, layers = (
            chains.segments(model, Sizes.of_many(graph.num_nodes), scale=scale),
            list(model.convs),
        )
        self.intervals = cut_intervals(held.part, whole.host_block, 4, line)
        self.numbers = [each.number for each in self.intervals]
        self.ops = {
            at: graph_op(layers[each.layer], each, settings.edge_functions)
            for at, each in enumerate(self.chain)
            if isinstance(each, chains.Graph)
        }
        pieces = {at: each for at, each in enumerate(self.chain) if isinstance(each, Dense)}
        edges = {at: Dense(op.program) for at, op in self.ops.items() if isinstance(op, EdgeAttention)}
        self.programs = {at: each.program for at, each in (pieces | edges).items()}
        self.versions = Versions(pieces | edges)
        self.epochs, self.totals = Epochs(self.numbers, settings.staleness), Totals(self.numbers)
        tables = {
            at: Table(
                part_rows(held),
                len(self.numbers),
                {n: self.width(at, n) for n in op.of_sources},
                torch.float64,
            )
            for at, op in self.ops.items()
            if self.chain[at].has_gradient  # type: ignore[union-attr]
        }
        lending = Lending(
            self.intervals, tables, self.epochs, lambda *sent: pytest.fail("there is one server")
        )
        fixed = serverless_step._fixed(self.chain, layers, self.intervals, whole, y, train)
        calls = Calls(self.offer, self.can_run, self.ended)
        self.passes = Passes(
            self.chain, self.ops, self.intervals, fixed, self.versions, lending, settings, calls
        )
        self.ages, self.choice = lending.ages, random.Random(seed)
        self.todo: list[Any] = []
        self.offered: list[tuple[TaskKey, Work]] = []
        self.found: Epoch | None = None

    def width(self, at: int, name: str) -> int:
        before = self.chain[at - 1]
        assert isinstance(before, Dense)
        return int(before.program.shapes[name][0])

    def offer(self, key: TaskKey, work: Work) -> None:
        self.offered.append((key, work))
        self.todo.append(lambda: self.compute(key, work))

    def can_run(self, number: int, epoch: int, step: int) -> None:
        self.todo.append(lambda: self.passes.run(number, step))

    def compute(self, key: TaskKey, work: Work) -> None:
        _, weights = work.weights()
        found = run_task(
            self.programs[key.piece], key.is_backward, work.arrays, weights, work.wants, work.options
        )
        self.passes.came_back(Done(key, *found))

    def ended(self, number: int, loss: float, gradients: Mapping[str, Sequence[Tensor]]) -> None:
        epoch = self.epochs.end(number)
        if self.totals.add(epoch, number, loss, gradients):
            self.found = self.totals.summed(epoch, 0)

    def trained(self, epoch: int) -> Epoch:
        """All of an epoch."""
        self.epochs.go(epoch)
        for number in self.numbers:
            assert self.epochs.follow(number)
            self.passes.begin(number, self.epochs.begin(number))
        while self.todo:
            self.todo.pop(self.choice.randrange(len(self.todo)))()
        assert self.found is not None
        return self.found


def part_rows(held: Any) -> int:
    return int(held.part.src_ids.numel())


def losses(line: Collective, graph: Graph, name: str, settings: Settings, seed: int, epochs: int = 3) -> Any:
    """(loss of each epoch, weights at the end, tasks offered, ages that were read)."""
    model = model_of(name, graph, 0.4)
    driven = Driven(line, graph, model, settings, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    found = []
    for epoch in range(epochs):
        driven.versions.publish(epoch, dict(model.named_parameters()))
        came = driven.trained(epoch)
        for weight, p in model.named_parameters():
            p.grad = came.gradients[weight].reshape(p.shape)
        optimizer.step()
        found.append(came.loss)
    assert driven.versions.alive == [epochs - 1]
    return found, model.state_dict(), driven.offered, driven.ages


def settings(**given: Any) -> Settings:
    return Settings(3, 0.4, dtype=torch.float64, streams=False, **given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gcn-3", {}),
        ("sage", {"fuses": False}),
        ("gat", {"remakes": False}),
        ("gat", {"edge_functions": True}),
    ],
    ids=str,
)
def test_the_numbers_of_one_process_in_whatever_order(make_graph: MakeGraph, name: str, given: Any) -> None:
    """Bit for bit the same in any order, and those of one process up to rounding."""
    graph = make_graph(80)
    expected = alone(graph, name, 0.4, 3)
    found = [run_in_threads(1, losses, graph, name, settings(**given), seed)[0] for seed in range(3)]
    for each in found:
        assert each[0] == pytest.approx(expected[0], rel=1e-10)
        assert each[0] == found[0][0]
        for weight, value in expected[1].items():
            assert torch.equal(each[1][weight], found[0][1][weight])
            assert float((each[1][weight] - value).abs().max()) <= 1e-10
        assert set(each[3].seen) == {0}


def test_where_rows_may_be_old_some_are(make_graph: MakeGraph) -> None:
    """All operations that can run are run at once: those of the first epoch read no old rows, later ones do."""
    found = run_in_threads(1, losses, make_graph(80), "gcn-3", settings(staleness=0), 1, 4)[0]
    assert set(found[3].seen) == {0, 1}
    assert found[0][-1] < found[0][0]


def test_tasks_of_an_epoch(make_graph: MakeGraph) -> None:
    """Every piece forward and back, but the last once where it is fused; keys are the steps there and back."""
    for fuses in (True, False):
        given = settings(fuses=fuses)
        _, _, offered, _ = run_in_threads(1, losses, make_graph(80), "gcn", given, 0, 1)[0]
        keys = sorted(key for key, _ in offered if key.interval == 0)
        places = [(key.piece, key.is_backward) for key in keys]
        last = max(place for place, _ in places)
        num_steps = 2 * (last + 1)
        assert places[-1][1] is True
        assert ((last, True) in places) == (not fuses)
        for key in keys:
            assert key.place == (num_steps - 1 - key.piece if key.is_backward else key.piece)


def test_what_reads_of_others(make_graph: MakeGraph) -> None:
    """Of a graph operation: gathering reads its sources; giving back nothing; collecting what readers gave."""

    def looked(line: Collective) -> dict[str, list[int]]:
        graph = make_graph(80)
        driven = Driven(line, graph, model_of("gcn-3", graph, 0.4), settings(), 0)
        driven.versions.publish(0, dict(model_of("gcn-3", graph, 0.4).named_parameters()))
        found: dict[str, list[int]] = {}
        passes = driven.passes
        for kind in ("gather", "give_back", "collect", "compute"):
            plain = getattr(passes, f"_{kind}")

            def noted(number: int, at: int, *more: Any, kind: str = kind, plain: Any = plain) -> None:
                step = at if kind == "gather" else 2 * len(driven.chain) - 1 - at
                assert passes.at(step) == (at, kind != "gather")
                found.setdefault(kind, []).append(len(passes.reads(number, step)))
                plain(number, at, *more)

            setattr(passes, f"_{kind}", noted)
        driven.trained(0)
        return found

    (found,) = run_in_threads(1, looked)
    assert set(found) == {"gather", "give_back", "collect"}
    assert min(found["gather"]) > 0
    assert min(found["collect"]) > 0
    assert set(found["give_back"]) == {0}
