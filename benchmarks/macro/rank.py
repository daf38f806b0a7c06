"""One rank of the bench: all sides live in it and take turns, epoch by epoch, measured alike.

Run as ``python -m benchmarks.macro.rank JOB`` (a file) in each host of the lab; the local launcher calls ``measure``.

Windows load ahead across epochs, so an epoch is timed in the middle of a run: before it, as much is trained as fills the
pipeline (one window, and the whole epoch where a pool that keeps rows is still empty); at its end the next epoch's first
window is under way, as it was at its beginning.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.macro.workload import SEED, Job, Side, model_of
from polyhop import launch
from polyhop.comm import Collective
from polyhop.exchange import Pool, Seeds
from polyhop.graph import SharedGraph
from polyhop.kernels import kept_memory
from polyhop.partition import open_parts
from polyhop.sample.reuse import reuse_of_ranks
from polyhop.strategies import HeldPart, Team, data, macro, part_step, place
from polyhop.trace import Trace
from polyhop.train import loop
from polyhop.train.loss import cross_entropy_sum
from polyhop.train.optim import build_optimizer
from polyhop.train.state import Session

__all__ = ["arguments", "measure", "options"]

PIECE_BYTES = 1 << 20  # what the link is measured with
WARM_STEPS = 2  # of a side whose loading leaves nothing behind
RUN_EPOCHS = 40  # of the run that the strategy plans for


def options(num_ranks: int | None = None) -> launch.Launch:
    """One thread a rank, on any core: the lab's hosts share the machine's, and both ways should be alike."""
    return launch.Launch(num_ranks=num_ranks, threads=1, pin=False)


def measure(context: launch.RankContext, job_file: str) -> None:
    """Write what this rank saw of every timed epoch of every side to ANSWER/rank-<k>.json."""
    job, line = Job.from_json(json.loads(Path(job_file).read_text())), context.comm
    held = open_parts(Path(job.parts)).share(line.rank, line.num_ranks)
    found: dict[str, Any] = {"bytes_per_s": _bandwidth(line), "epochs": {}}
    if job.predicts:
        found["predicted"] = _predicted(held, line, job)
    with kept_memory():
        whole = data.hold(held, place("cpu", "32-true"), Team(line), data.Config())
        for model in job.models:
            found["epochs"][model] = _take_turns(model, held, whole, line, job)
    (Path(job.answer) / f"rank-{line.rank}.json").write_text(json.dumps(found))


def _take_turns(
    model: str, held: SharedGraph, whole: HeldPart, line: Collective, job: Job
) -> dict[str, list[dict[str, Any]]]:
    """Side -> its timed epochs."""
    chosen = {name: side for name, side in job.sides.items() if model in side.models}
    sides = {name: _Running(model, held, whole, line, job, side) for name, side in chosen.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(job.turns):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            line.barrier()
            found[name] += sides[name].turn() if job.trains else sides[name].load()
    return found


def _bandwidth(line: Collective) -> float:
    """Bytes a second that every rank sends when all send to all; median of five."""
    pieces = [torch.zeros(PIECE_BYTES, dtype=torch.uint8)] * line.num_ranks
    seconds = []
    for _ in range(6):
        line.barrier()
        start = time.perf_counter()
        line.all_to_all(pieces, kind="features", counts=[PIECE_BYTES] * line.num_ranks)
        seconds.append(time.perf_counter() - start)
    return PIECE_BYTES * (line.num_ranks - 1) / statistics.median(seconds[1:])


def _predicted(held: SharedGraph, line: Collective, job: Job) -> dict[str, float]:
    """Side -> rows of a window, all ranks together, as the strategy predicts them: distinct, minus what the pool holds."""
    assert held.split is not None
    part, train = held.part, held.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=job.batch_size)
    likely = part_step.part_inclusion(held, train, seeds, job.fan_outs, line)
    reuse, found = reuse_of_ranks(likely, line), {}
    for name in job.predicts:
        k, room = job.sides[name].k, job.sides[name].room
        held_for = [0.0 if room is None else each.horizon(room) for each in reuse]
        found[name] = sum(each.fresh(k, after) for each, after in zip(reuse, held_for, strict=True))
    return found


class _Running:
    """One side at work: a model of its own, trained by the project's loop without evaluation."""

    def __init__(
        self, model: str, held: SharedGraph, whole: HeldPart, line: Collective, job: Job, side: Side
    ) -> None:
        assert held.split is not None
        self._line, self._job, self._side = line, job, side
        self._trace, self._losses = Trace(), [0.0]
        fan_outs = side.fan_outs or job.fan_outs
        net = model_of(model, held.num_features, held.num_classes, job, len(fan_outs))
        strategy, config = _config(job, side, fan_outs)
        step = strategy.build(
            net,
            held,
            config,
            train_ids=held.split.train,
            whole=whole,
            loss=cross_entropy_sum,
            trace=self._trace,
            team=Team(line),
        )
        self._loader = step._loader
        if side.room is not None:
            self._loader.pool = Pool(self._loader.pool.fetch, side.room, keeps=side.delta)
        self._session = Session(net, build_optimizer("adam", net, lr=0.003), step)
        self._is_cold = True
        self._tools = loop.Tools(
            set_lr=lambda _: 0.003,
            evaluate=dict,
            save=lambda: None,
            on_step=lambda *_: None,
            on_epoch=self._keep_loss,
            stop=lambda: None,
            trace=self._trace,
        )

    def _keep_loss(self, record: dict[str, Any]) -> bool:
        self._losses.append(record["loss"])
        return False

    def turn(self) -> list[dict[str, Any]]:
        """Fill the pipeline, then time some epochs."""
        state, num_steps = self._session.state, self._session.step.num_steps
        is_full = self._is_cold and (self._side.delta or self._side.k == 0)
        if is_full and self._side.k == 0:
            self._settle()
        self._loader.num_epochs = state.epoch + 1 + self._job.timed + 1
        k = self._side.k or getattr(self._loader, "size", 1)
        warm = num_steps if is_full else max(k, WARM_STEPS)
        state.step, self._is_cold = max(0, num_steps - warm) // k * k, False
        self._train()
        found = [self._measured(self._train) for _ in range(self._job.timed)]
        self._session.step.close()
        return found

    def _settle(self) -> None:
        """Train until the strategy has found its k, as it would in a run that is not timed."""
        self._loader.num_epochs = RUN_EPOCHS
        for _ in range(RUN_EPOCHS // 2):
            self._train()
            if (
                self._line.all_reduce(
                    torch.tensor([float(not self._loader.after_window.is_settled)]), kind="sizes"
                )
                == 0
            ):
                break
        self._session.step.close()  # what was loaded beyond is dropped

    def load(self) -> list[dict[str, Any]]:
        """Load epochs and train none; the last is counted."""
        self._loader.num_epochs = 0  # nothing of the next epoch is loaded with one
        *before, last = self._side.epochs or (0,)
        for epoch in before:
            self._drop(epoch)
        return [self._measured(lambda: self._drop(last))]

    def _drop(self, epoch: int) -> None:
        for _ in self._session.step.batches(epoch):
            pass
        self._session.step.close()

    def _train(self) -> None:
        loop.train(self._session, loop.Options(self._session.state.epoch + 1, SEED), self._tools)

    def _measured(self, work: Any) -> dict[str, Any]:
        """Seconds, CPU-seconds and spans of an epoch, and what this rank sent in it."""
        self._line.barrier()
        before, spans = self._line.traffic.now(), self._trace.totals()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        cost = self._line.traffic.now() - before
        spent = {name: total - spans.get(name, 0.0) for name, total in self._trace.totals().items()}
        found = {"s": wall, "cpu_s": cpu, "spans": spent, "loss": self._losses[-1], **cost.to_json()}
        pool = getattr(self._loader, "pool", None)
        if pool is not None:
            notes = list(getattr(self._session.step, "notes", []))
            found |= {"k": self._loader.size, "room": pool.capacity, "used": pool.most_used, "notes": notes}
        return found


def _config(job: Job, side: Side, fan_outs: tuple[int, ...]) -> tuple[Any, Any]:
    """The strategy's module and its options."""
    given: dict[str, Any] = {"num_neighbors": list(fan_outs), "batch_size": job.batch_size, "seed": SEED}
    if side.aggregated:
        given["aggregate_inputs"] = True
    if side.rpc:
        return data, data.Config(**given, per_minibatch_rpc=True)
    more = {"memory_bytes": side.memory, "max_epochs": RUN_EPOCHS}
    return macro, macro.Config(**given, **more, macro=side.k or "auto", delta=side.delta)


def arguments(job_file: Path) -> list[str]:
    """The command that is one rank, for whoever starts ranks from outside."""
    return [sys.executable, "-m", "benchmarks.macro.rank", str(job_file)]


if __name__ == "__main__":
    from benchmarks.macro.rank import measure as found_by_name

    launch.run(found_by_name, (sys.argv[1],), options())
