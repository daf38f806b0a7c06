"""One rank of section ``grid``: plans on the links as they are, then trains every way that it foresaw, in turns.

Run as ``python -m benchmarks.plan.rank JOB`` (a file) in each host of the lab, whose links the ranks limit themselves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.relimit import relimit
from benchmarks.plan.cases import SEED, Job
from polyhop import launch
from polyhop.cli.ranks import share_of
from polyhop.comm import Collective
from polyhop.forecast import labelled
from polyhop.graph import Graph, SharedGraph
from polyhop.kernels import kept_memory
from polyhop.partition import Partition, default_method, partition
from polyhop.plan import Limits, Plan, Prediction
from polyhop.planner import PlanOptions, plan_together
from polyhop.strategies import Team, find, place
from polyhop.trace import Trace
from polyhop.train import loop
from polyhop.train.loss import cross_entropy_sum
from polyhop.train.optim import build_optimizer
from polyhop.train.state import Session
from polyhop.trainer import Trainer

__all__ = ["arguments", "measure"]

LR = 0.003
_LEAST_S, _MOST_EPOCHS = 0.7, 3  # a turn trains one epoch, or up to three where they are short
_SETTLED = 12  # epochs after which adaptive widths have been chosen for the first time


def arguments(job_file: Path) -> list[str]:
    """The command that is one rank."""
    return [sys.executable, "-m", "benchmarks.plan.rank", str(job_file)]


def measure(context: launch.RankContext, job_file: str) -> None:
    """Write what this rank saw to ANSWER/rank-<k>.json."""
    job, line = Job.from_json(json.loads(Path(job_file).read_text())), context.comm

    def cut(graph: Graph) -> Partition:
        return partition(graph, line.num_ranks, default_method(), seed=SEED)

    held = share_of(line, job.case.recipe(), None, cut, num_parts=line.num_ranks)
    with kept_memory():
        found = _phases(held, line, job)
    (Path(job.answer) / f"rank-{line.rank}.json").write_text(json.dumps(found))


def _phases(held: SharedGraph, line: Collective, job: Job) -> list[dict[str, Any]]:
    """Plans and timed epochs at every rate."""
    sides: dict[str, _Running] = {}
    found = []
    for rate in job.rates:
        _limit(line, rate)
        made = _planned(held, line, job)
        tried = {each.name: each for each in _tried([one.prediction for one in made.ranked], job)}
        for name, prediction in tried.items():
            if name not in sides:
                sides[name] = _Running(held, line, job, prediction)
                sides[name].warm_up()
        epochs = _epochs({name: sides[name] for name in tried}, job.turns)
        found.append({"mbit": rate, "plan": made.to_json(), "epochs": epochs})
    _limit(line, None)
    for side in sides.values():
        side.close()
    return found


def _tried(found: Sequence[Prediction], job: Job) -> list[Prediction]:
    """Ways that should not take much longer than the best; of every strategy the best, unless it should take far longer."""
    order = sorted((each for each in found if each.strategy != "serverless"), key=lambda each: each.epoch_s)
    least, seen, tried = order[0].epoch_s, set[str](), list[Prediction]()
    for each in order:
        most = job.most_s if each.strategy in seen else job.most_of_first_s
        seen.add(each.strategy)
        tried += [each] if each.epoch_s <= most * least else []
    return tried


def _planned(held: SharedGraph, line: Collective, job: Job) -> Plan:
    trainer = _trainer(job, "auto", {})
    options = PlanOptions(Limits(allows_approximate=True), trains_here=True)
    return plan_together(job.case.built(held), held, trainer, line, options)  # type: ignore[arg-type]


def _trainer(job: Job, strategy: str, options: Mapping[str, Any]) -> Trainer:
    fan_outs = job.case.fan_outs
    size = None if fan_outs is None else job.case.batch_size
    return Trainer(strategy, num_neighbors=fan_outs, batch_size=size, seed=SEED, **options)


def _epochs(sides: Mapping[str, _Running], turns: int) -> dict[str, list[dict[str, Any]]]:
    """Timed ones of every side. A side may be slowed by the one before it, so turns have other orders."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(turns):
        shift = (turn // 2) * len(names) // 2
        order = names[shift:] + names[:shift]
        for name in order if turn % 2 == 0 else reversed(order):
            found[name].append(sides[name].measured())
    return found


def _limit(line: Collective, mbit: float | None) -> None:
    line.barrier()
    relimit(mbit)
    line.barrier()


class _Running:
    """One way at work: a model of its own, trained by the project's loop without evaluation."""

    def __init__(self, held: SharedGraph, line: Collective, job: Job, prediction: Prediction) -> None:
        self._line, self._epochs = line, 1
        self._warm_up = _SETTLED if prediction.options.get("bits") == "adaptive" else 1
        strategy = find(prediction.strategy)
        trainer = _trainer(job, prediction.strategy, prediction.options)
        config = strategy.Config(**{f.name: getattr(trainer, f.name) for f in fields(strategy.Config)})
        self._own_line = line.fork()
        team, placement = Team(self._own_line), place("cpu", "32-true")
        net = job.case.built(held)  # type: ignore[arg-type]
        step = strategy.build(
            net,
            held,
            config,
            train_ids=labelled(held),
            whole=strategy.hold(held, placement, team, config),
            loss=cross_entropy_sum,
            team=team,
        )
        self._session = Session(net, build_optimizer("adam", net, lr=LR), step)
        self._tools = loop.Tools(
            set_lr=lambda _: LR,
            evaluate=dict,
            save=lambda: None,
            on_step=lambda *_: None,
            on_epoch=lambda record: False,
            stop=lambda: None,
            trace=Trace(),
        )

    def warm_up(self) -> None:
        """The first epochs, which no figure counts; they say how many make a turn, on all ranks alike."""
        start = time.perf_counter()
        self.train(self._warm_up)
        own = torch.tensor([(time.perf_counter() - start) / self._warm_up], dtype=torch.float64)
        slowest = float(
            torch.cat(self._line.all_gather(own, kind="sizes", counts=[1] * self._line.num_ranks)).max()
        )
        self._epochs = max(1, min(_MOST_EPOCHS, round(_LEAST_S / slowest)))

    def train(self, epochs: int = 1) -> None:
        loop.train(self._session, loop.Options(self._session.state.epoch + epochs, SEED), self._tools)

    def measured(self) -> dict[str, Any]:
        """Seconds and CPU-seconds of an epoch, and what this rank sent in it: means of several that follow one another."""
        self._line.barrier()
        before, wall, cpu = self._line.traffic.now(), time.perf_counter(), time.process_time()
        self.train(self._epochs)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        sent = (self._line.traffic.now() - before) * (1 / self._epochs)
        return {"s": wall / self._epochs, "cpu_s": cpu / self._epochs, **sent.to_json()}

    def close(self) -> None:
        """Let go of the lines, with the other ranks."""
        getattr(self._session.step, "close", lambda: None)()
        self._own_line.close()


if __name__ == "__main__":
    from benchmarks.plan.rank import measure as found_by_name

    launch.run(found_by_name, (sys.argv[1],), launch.Launch(threads=1, pin=False))
