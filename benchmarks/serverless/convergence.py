"""Section ``convergence``: epochs that bounded asynchrony takes to the accuracy of exact training, and where it ends.

GCN of two layers on two real graphs, two servers. Inputs are 128 columns of variance 1, a fixed projection of the graphs'
own: with raw counts of words, hundreds in a row, one step of Adam changes rows by more than they are, old ones mislead, and
no staleness learns at this rate. They are mapped first, so both layers gather rows that may be old.

``pipe`` has the numbers of one process on the full graph (tests), so one process stands for it; the others start from the
same weights, drop the same units, and their rate falls to 0 alike. Before the others run the target is fixed: of the same
seed, the best validation accuracy of pipe, less a point. Epochs are those until it is first reached; ratios are medians over
seeds, the worse graph counts. Final accuracy is the mean of the last ten evaluations on test nodes.

In the second variant functions are of three kinds that wait 0, 10 and 40 ms before every task: whoever gets a task by chance
makes it late, so that old rows are read more often (first seed only: it takes long). Servers count how old they are.

The rate matters: what an old row is off by grows with it. At 0.02 in 120 epochs, four times as fast, staleness 0 took 1.5
times as many epochs on one graph, did not reach the target on the other, and ended 0.5 and 1.8 points lower (one seed).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.graphs import describe
from benchmarks.halo.graphs import load_real, narrowed
from benchmarks.harness import Figure, busy_cores
from benchmarks.serverless.running import Running, UnevenLauncher, gnn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.strategies import WholeGraph, place, single
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

__all__ = ["Curve", "epochs_to", "figures", "run"]

GRAPHS = ("amazon-computers", "facebook-pages")
NUM_RANKS, WIDTH, HIDDEN, INTERVALS, LR, DROPOUT = 2, 128, 64, 8, 0.005, 0.5
PIPE_EPOCHS = None  # the first and the last fifth are exact, as by default
LAST, WITHIN = 10, 1.0  # evaluations that are averaged; points below the best that are the target
DELAYS_S = (0.0, 0.01, 0.04)
AIMS = {0: 1.15, 1: 1.6}
DROP_AIM = 0.3
Variant = tuple[int, bool]
"""(staleness, are functions late at random)"""
VARIANTS: tuple[Variant, ...] = ((0, False), (1, False), (0, True), (1, True))


@dataclass(frozen=True)
class Curve:
    """Points of validation after every epoch, of test after the last ones; ages of what was read."""

    val: tuple[float, ...]
    test: tuple[float, ...]
    ages: dict[int, int]

    @property
    def final(self) -> float:
        return statistics.mean(self.test)


def epochs_to(val: Sequence[float], target: float) -> float:
    """Infinite where it is never reached."""
    return next((at + 1.0 for at, value in enumerate(val) if value >= target), math.inf)


Found = dict[str, dict[int, dict[Variant | None, Curve]]]
"""graph -> seed -> variant (None: pipe) -> its curve"""


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Ratios of epochs and drops of accuracy, each for functions on time and late."""
    seeds, epochs = (1, 60) if is_quick else (3, 200)
    found: Found = {}
    for name in GRAPHS[:1] if is_quick else GRAPHS:
        graph = load_real(name)
        if isinstance(graph, str):
            print(f"  {name} is left out: {graph}", flush=True)
            continue
        graph = narrowed(graph, WIDTH)
        made = partition(graph, NUM_RANKS, "hash")
        print(
            f"  {describe(graph)}; {NUM_RANKS} servers, {INTERVALS} intervals each, {epochs} epochs",
            flush=True,
        )
        found[name] = {seed: _seed(graph, made, seed, epochs) for seed in range(seeds)}
    if found:
        yield from figures(found)


def _seed(graph: Graph, made: Partition, seed: int, epochs: int) -> dict[Variant | None, Curve]:
    curves: dict[Variant | None, Curve] = {None: _exact(graph, seed, epochs)}
    target = max(curves[None].val) - WITHIN
    print(f"    seed {seed}: pipe {_told(curves[None], target)}", flush=True)
    for variant in VARIANTS if seed == 0 else VARIANTS[:2]:
        load = busy_cores()
        curves[variant] = run_in_threads(NUM_RANKS, _stale, graph, made, variant, seed, epochs)[0]
        print(
            f"    seed {seed}: {_name(variant)} {_told(curves[variant], target)}; load {load:.1f} cores",
            flush=True,
        )
    return curves


def _told(curve: Curve, target: float) -> str:
    ages = f", ages {dict(sorted(curve.ages.items()))}" if curve.ages else ""
    reached = epochs_to(curve.val, target)
    return f"to {target:.2f}: {reached:g} epochs, best {max(curve.val):.2f}, test at the end {curve.final:.2f}{ages}"


def _name(variant: Variant) -> str:
    return f"staleness {variant[0]}{', functions late' if variant[1] else ''}"


def figures(found: Found) -> Iterator[Figure]:
    """Of all variants."""
    for variant in VARIANTS:
        staleness, is_late = variant
        end = f"s{staleness}{'_late' if is_late else ''}"
        ages: Counter[int] = Counter()
        for seeds in found.values():
            for curves in seeds.values():
                ages.update(curves[variant].ages if variant in curves else {})
        read = ", ".join(f"{age}: {100 * count / ages.total():.1f} %" for age, count in sorted(ages.items()))
        yield _ratio(found, variant, end, read)
        yield _drop(found, variant, end)


def _ratio(found: Found, variant: Variant, end: str, read: str) -> Figure:
    worst, told = 0.0, []
    for graph, seeds in found.items():
        ratios = []
        for curves in (each for each in seeds.values() if variant in each):
            exact = curves[None]
            target = max(exact.val) - WITHIN
            ratios.append(epochs_to(curves[variant].val, target) / epochs_to(exact.val, target))
        worst = max(worst, statistics.median(ratios))
        told.append(f"{graph} {', '.join(f'{each:.2f}' for each in ratios)}")
    details = f"epochs to pipe's best less {WITHIN:g} point, over pipe's, by seed: {'; '.join(told)}; ages read {read}"
    return Figure(f"epochs_ratio_{end}", worst, "x", details, at_most=AIMS[variant[0]])


def _drop(found: Found, variant: Variant, end: str) -> Figure:
    worst, told = -math.inf, []
    for graph, seeds in found.items():
        drops = [curves[None].final - curves[variant].final for curves in seeds.values() if variant in curves]
        error = statistics.stdev(drops) / math.sqrt(len(drops)) if len(drops) > 1 else 0.0
        worst = max(worst, statistics.mean(drops))
        told.append(f"{graph} {statistics.mean(drops):+.2f} (standard error {error:.2f})")
    details = f"points of test accuracy below pipe, mean of the last {LAST} evaluations: {', '.join(told)}"
    return Figure(f"accuracy_drop_{end}", worst, "points", details, at_most=DROP_AIM)


class _Judge:
    """Scores of a model on the whole graph after every epoch."""

    def __init__(self, graph: Graph, epochs: int) -> None:
        self._graph, self._epochs = graph, epochs
        self._trainer = Trainer("single", device="cpu", progress="none")
        self.val: list[float] = []
        self.test: list[float] = []

    def look(self, model: torch.nn.Module) -> None:
        self.val.append(self._score(model, "val"))
        if len(self.val) > self._epochs - LAST:
            self.test.append(self._score(model, "test"))
        model.train()

    def _score(self, model: torch.nn.Module, split: str) -> float:
        return 100 * self._trainer.evaluate(model, self._graph, split)["accuracy"]

    def curve(self, ages: dict[int, int] | None = None) -> Curve:
        return Curve(tuple(self.val), tuple(self.test), ages or {})


def _model(graph: Any, seed: int) -> torch.nn.Module:
    return gnn(graph, HIDDEN, 2, dropout=DROPOUT, seed=100 + seed)


def _rate(epoch: int, epochs: int) -> float:
    """Falls to 0 as a cosine."""
    return LR * (1 + math.cos(math.pi * epoch / epochs)) / 2


def _exact(graph: Graph, seed: int, epochs: int) -> Curve:
    model, judge = _model(graph, seed), _Judge(graph, epochs)
    assert graph.split is not None
    assert graph.y is not None
    train = graph.split.train[graph.y[graph.split.train] >= 0]
    whole = WholeGraph(graph, place("cpu", "32-true"))
    step = single.build(
        model, graph, single.Config(seed=seed), train_ids=train, whole=whole, loss=cross_entropy_sum
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = _rate(epoch, epochs)
        optimizer.zero_grad(set_to_none=True)
        step.gradients(next(iter(step.batches(epoch))), Key(seed, epoch))
        optimizer.step()
        judge.look(model)
    return judge.curve()


def _stale(
    line: Collective, graph: Graph, made: Partition, variant: Variant, seed: int, epochs: int
) -> Curve:
    torch.set_num_threads(1)
    staleness, is_late = variant
    held = share(graph, made, line.rank)
    options = {"functions": len(DELAYS_S) if is_late else 1, "intervals": INTERVALS, "staleness": staleness}
    local = (lambda order: UnevenLauncher(order, DELAYS_S)) if is_late else None
    running = Running(
        _model(held, seed),
        held,
        line,
        {**options, "max_epochs": epochs, "pipe_epochs": PIPE_EPOCHS},
        local,
        seed=seed,
    )
    judge = _Judge(graph, epochs)
    try:
        for epoch in range(epochs):
            running.set_rate(_rate(epoch, epochs))
            running.train()
            if line.rank == 0:
                judge.look(running.model)
        return judge.curve(dict(running.step.server.ages.seen))
    finally:
        running.close()
