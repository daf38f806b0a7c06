"""One rank of section ``epochs``: all sides live in it and take turns, epoch by epoch, at one rate after another.

Run as ``python -m benchmarks.split.rank JOB`` (a file) in each host of the lab, whose links the ranks limit themselves.

The rate is sought at which the first side waits for a share of its epoch: for mini-batches, and for the sum of gradients. An
epoch takes its busy seconds b and those of the busiest rank's bytes, so a trial that took T instead of b / (1 - share) says
how much longer, or less long, a byte should take. Where the side waits for more without a limit (rows that are wide cost the
cores, which all ranks share, more than computing on them), the rate is that at which bytes alone take as long.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.halo.running import Spent, timed_sums
from benchmarks.lab.relimit import relimit
from benchmarks.split.workload import FAN_OUTS, SEED, Job, Side, model_of
from polyhop import launch
from polyhop.comm import Collective
from polyhop.graph import SharedGraph
from polyhop.kernels import kept_memory
from polyhop.partition import open_parts
from polyhop.strategies import Team, find, place
from polyhop.strategies.split_auto import choose
from polyhop.train import loop
from polyhop.train.loss import cross_entropy_sum
from polyhop.train.optim import build_optimizer
from polyhop.train.state import Session

__all__ = ["WAITS", "arguments", "measure", "next_rate"]

WAITS = ("wait", "summed")  # spans: for mini-batches, for the sum of gradients
LR = 0.003
LEAST_MBIT, MOST_MBIT = 10.0, 20_000.0
CLOSE = 0.03  # of a share
PIECE_BYTES = 1 << 19  # what the link is measured with


def arguments(job_file: Path) -> list[str]:
    """The command that is one rank."""
    return [sys.executable, "-m", "benchmarks.split.rank", str(job_file)]


def measure(context: launch.RankContext, job_file: str) -> None:
    """Write what this rank saw to ANSWER/rank-<k>.json."""
    job, line = Job.from_json(json.loads(Path(job_file).read_text())), context.comm
    held = open_parts(Path(job.parts)).share(line.rank, line.num_ranks)
    with kept_memory():
        found = {str(hidden): _turned(held, line, job, hidden) for hidden in job.hidden}
    (Path(job.answer) / f"rank-{line.rank}.json").write_text(json.dumps(found))


def _turned(held: SharedGraph, line: Collective, job: Job, hidden: int) -> list[dict[str, Any]]:
    """Timed epochs of every side at the rate that is sought, and at the others."""
    _limit(line, None)
    sides = {name: _Running(held, line, job, hidden, side) for name, side in job.sides.items()}
    for side in sides.values():
        side.train()
    mbit = _seek(held, line, job, hidden)
    phases = []
    for rate in (mbit, *job.rates):
        _limit(line, rate)
        reached = _bandwidth(line)
        chosen, reason = _chosen(held, line, job, hidden)
        auto = _Running(held, line, job, hidden, chosen)
        for _ in range(2):  # the others are warm
            auto.train()
        epochs = _epochs({**sides, "auto": auto}, job.turns)
        phases.append({"mbit": rate, "bytes_per_s": reached, "epochs": epochs, "reason": reason})
        auto.close()
    _limit(line, None)
    for side in sides.values():
        side.close()
    return phases


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


def _chosen(held: SharedGraph, line: Collective, job: Job, hidden: int) -> tuple[Side, str]:
    """What is chosen by itself on the links as they are, and why."""
    assert held.split is not None
    choice = choose(
        model_of(held.num_features, hidden, held.num_classes),
        held,
        line,
        place("cpu", "32-true"),
        train_ids=held.split.train,
        num_neighbors=FAN_OUTS,
        batch_size=job.batch_size,
        cache_bytes=job.tenth_bytes,
    )
    return Side(choice.strategy, choice.options), choice.reason


def _limit(line: Collective, mbit: float | None) -> None:
    line.barrier()
    relimit(mbit)
    line.barrier()


# The rate


def next_rate(per_byte: float, num_bytes: float, seconds: float, busy: float, share: float) -> float:
    """Mbit/s, after a trial in which a byte took ``per_byte`` seconds, the busiest rank sent so many, and an epoch took
    ``seconds``, ``busy`` of them without waiting."""
    wanted = per_byte + (busy / (1 - share) - seconds) / num_bytes
    wanted = min(max(wanted, per_byte / 4), 4 * per_byte) if per_byte else wanted
    return min(max(8e-6 / max(wanted, 1e-12), LEAST_MBIT), MOST_MBIT)


def _seek(held: SharedGraph, line: Collective, job: Job, hidden: int) -> float:
    """Mbit/s at which the first side waits for the share; tried with a side of its own, so that the others stay in step."""
    probe = _Running(held, line, job, hidden, next(iter(job.sides.values())))
    probe.train()
    num_bytes, seconds, busy = _trial(probe, line)
    # Without a limit loading takes the cores too: by the bytes alone, and with less computing than it seems.
    is_slow = 1 - busy / seconds > job.share
    mbit = 8e-6 * num_bytes / seconds if is_slow else next_rate(0.0, num_bytes, 0.0, 0.7 * busy, job.share)
    for _ in range(0 if is_slow else job.tries):
        _limit(line, mbit)
        probe.train()
        num_bytes, seconds, busy = _trial(probe, line)
        if abs(1 - busy / seconds - job.share) <= CLOSE:
            break
        mbit = next_rate(8e-6 / mbit, num_bytes, seconds, busy, job.share)
    probe.close()
    return mbit


def _trial(probe: _Running, line: Collective) -> tuple[float, float, float]:
    """(bytes of the busiest rank, seconds, busy ones) of an epoch, the same on every rank: the latter are means of two."""
    seen = []
    for _ in range(2):
        one = probe.measured()
        waited = sum(one["spans"].get(name, 0.0) for name in WAITS)
        seen.append([float(sum(one["bytes"].values())), one["s"], one["s"] - waited])
    own = torch.tensor(seen, dtype=torch.float64).mean(0, keepdim=True)
    everyone = torch.cat(line.all_gather(own, kind="sizes", counts=[1] * line.num_ranks))
    _, seconds, busy = everyone.mean(0).tolist()
    return float(everyone[:, 0].max()), seconds, busy


def _bandwidth(line: Collective) -> float:
    """Bytes a second that every rank sends when all send to all; median of three after the first."""
    pieces = [torch.zeros(PIECE_BYTES, dtype=torch.uint8)] * line.num_ranks
    seconds = []
    for _ in range(4):
        line.barrier()
        start = time.perf_counter()
        line.all_to_all(pieces, kind="features", counts=[PIECE_BYTES] * line.num_ranks)
        seconds.append(time.perf_counter() - start)
    return PIECE_BYTES * (line.num_ranks - 1) / statistics.median(seconds[1:])


class _Running:
    """One side at work: a model of its own, trained by the project's loop without evaluation."""

    def __init__(self, held: SharedGraph, line: Collective, job: Job, hidden: int, side: Side) -> None:
        assert held.split is not None
        self._line, self._trace, self._losses = line, Spent(), [0.0]
        strategy = find(side.strategy)
        given = {"num_neighbors": list(FAN_OUTS), "batch_size": job.batch_size, "seed": SEED}
        config = strategy.Config(**given, **side.given(job.tenth_bytes))
        self._own_line = line.fork()
        team, placement = Team(timed_sums(self._own_line, self._trace, "summed")), place("cpu", "32-true")
        net = model_of(held.num_features, hidden, held.num_classes)
        step = strategy.build(
            net,
            held,
            config,
            train_ids=held.split.train,
            whole=strategy.hold(held, placement, team, config),
            loss=cross_entropy_sum,
            trace=self._trace,
            team=team,
        )
        self._session = Session(net, build_optimizer("adam", net, lr=LR), step)
        self._tools = loop.Tools(
            set_lr=lambda _: LR,
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

    def train(self) -> None:
        """One epoch."""
        loop.train(self._session, loop.Options(self._session.state.epoch + 1, SEED), self._tools)

    def measured(self) -> dict[str, Any]:
        """Seconds, CPU-seconds and spans of an epoch, and what this rank sent in it."""
        self._line.barrier()
        self._trace.take()
        before, wall = self._line.traffic.now(), time.perf_counter()
        cpu, main = time.process_time(), time.thread_time()
        self.train()
        wall, cpu, main = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - main
        sent = (self._line.traffic.now() - before).to_json()
        told = {
            "s": wall,
            "cpu_s": cpu,
            "main_cpu_s": main,
            "spans": self._trace.take(),
            "epoch": self._session.state.epoch,
            "loss": self._losses[-1],
        }
        return {**told, **sent}

    def close(self) -> None:
        """Let go of the lines, with the other ranks."""
        self._session.step.close()
        self._own_line.close()


if __name__ == "__main__":
    from benchmarks.split.rank import measure as found_by_name

    launch.run(found_by_name, (sys.argv[1],), launch.Launch(threads=1, pin=False))
