"""Section ``memory``: what a rank is foreseen to hold against what it had resident at most, over real runs in processes of
their own, one way to train at a time (``memory_rank``). Links do not matter to memory: ranks talk over the loopback.

Resident pages count whole, those of shared libraries too (some 100 MB): a limit on one rank alone would count them, and the
system keeps the most of no other figure. Errors are relative to all that is resident, of the rank that had most.

    memory_error         of training and of the whole run, evaluation included: the median; ``_p90``: nine of ten are below
    memory_error_held    the same of the run, of what is held beside the bare process
    memory_unfit         plans that would be said to fit a limit just below what their run had
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure
from benchmarks.plan import memory_rank
from benchmarks.plan.cases import SEED, Case
from benchmarks.plan.memory_rank import MemoryJob
from polyhop.forecast import Question, labelled, look_at, of_given, predictions
from polyhop.partition import default_method, partition
from polyhop.plan import Law, Link, Machine, Memory
from polyhop.planner import PlanOptions, inputs_of, measured_machine, training_of
from polyhop.trainer import Trainer

__all__ = ["RUNS", "Held", "figures", "run"]

PRODUCTS, ARXIV, DEBIAN, PHYSICS = (
    "synth:products?scale=0.05",
    "ogbn-arxiv-struct",
    "debian-packages",
    "coauthor-physics",
)
TINY = Case("synth:products?scale=0.0005", "gcn", 2, 16)
FULL = {
    "gcn": Case(PRODUCTS, "gcn", 2, 128),
    "sage": Case(DEBIAN, "sage", 2, 256),
    "gat": Case(ARXIV, "gat", 2, 64, more={"heads": 2}),
    "gcnii": Case(PHYSICS, "gcnii", 8, 128),
}
DRAWN = {
    "sage": Case(PRODUCTS, "sage", 3, 128, (10, 10, 5)),
    "gcn": Case(ARXIV, "gcn", 2, 256, (15, 10), 4096),
    "gat": Case(DEBIAN, "gat", 2, 128, (10, 10), 2048, {"heads": 2}),
}
NARROW = Case(DEBIAN, "sage", 2, 16, (15, 10))  # what is held beside layers and their sums is most of it
RUNS: tuple[tuple[Case, int, str, dict[str, Any]], ...] = (
    *((case, 1, "single", {}) for case in (*FULL.values(), *DRAWN.values())),
    *((case, 2, "halo", {}) for case in FULL.values()),
    *((FULL[name], 4, "halo", {}) for name in ("gcn", "sage", "gat")),
    *((FULL[name], 2, "halo", {"recompute": True}) for name in ("gcn", "gcnii")),
    (FULL["gcn"], 2, "halo", {"bits": 8}),
    *((FULL[name], 2, "halo", {"halo": "stale"}) for name in ("gcn", "sage")),
    *((FULL[name], 2, "pipeline", {"stages": 2, "chunks": 1}) for name in ("gcn", "sage")),
    *((FULL[name], 2, "pipeline", {"stages": 2, "chunks": 8}) for name in ("gcn", "gat", "gcnii")),
    (FULL["gcn"], 4, "pipeline", {"stages": 2, "chunks": 16}),
    (FULL["gcnii"], 4, "pipeline", {"stages": 4, "chunks": 16}),
    (FULL["gcn"], 2, "serverless", {"functions": 2, "intervals": 16}),
    *((case, 2, way, {}) for case in DRAWN.values() for way in ("data", "macro", "split")),
    *((DRAWN[name], 2, "pushpull", {}) for name in ("sage", "gcn")),
    *((DRAWN["sage"], 4, way, {}) for way in ("data", "macro", "split")),
    *((NARROW, 2, way, {}) for way in ("data", "macro")),
    (NARROW, 2, "macro", {"macro": 16}),
)
QUICK = (0, 4, 7, 30)  # of these
LIMIT_S = 1800


@dataclass(frozen=True)
class Held:
    """One run, and what was foreseen of it."""

    name: str
    strategy: str
    process: float  # bare
    start: float
    training: float
    whole: float  # of the run, but for its start
    foreseen: Memory

    @property
    def errors(self) -> tuple[float, float]:
        """(of training, of the whole run)."""
        foreseen = max(self.foreseen.training, self.foreseen.evaluation)
        return abs(self.foreseen.training / self.training - 1), abs(foreseen / self.whole - 1)

    @property
    def most(self) -> float:
        return max(self.start, self.whole)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Errors, and plans that did not fit."""
    os.environ.setdefault("POLYHOP_DATA", str(ROOT.parent / "shared" / "data"))
    process = _measured(MemoryJob(TINY, "", 1, "single"))[0]["run"]
    print(f"  a process that has trained next to nothing: {process / 1e6:.0f} MB", flush=True)
    machine = replace(measured_machine(PlanOptions(tell=print)), process_bytes=process)
    found = []
    for at in QUICK if is_quick else range(len(RUNS)):
        case, ranks, strategy, options = RUNS[at]
        job = MemoryJob(case, "", ranks, strategy, options)
        foreseen = _foreseen(job, machine)
        seen = _measured(job)
        most = {name: max(float(one[name]) for one in seen) for name in ("start", "training", "run")}
        told = f"{case.name}, {ranks} ranks, {strategy} {options or ''}".rstrip()
        found.append(Held(told, strategy, process, most["start"], most["training"], most["run"], foreseen))
        _tell(found[-1])
    yield from figures(found)


def _measured(job: MemoryJob) -> list[dict[str, int]]:
    """What every rank of a run had."""
    with tempfile.TemporaryDirectory(prefix="polyhop-memory-") as name:
        job_file = Path(name) / "job.json"
        job_file.write_text(json.dumps(replace(job, answer=name).to_json()))
        done = subprocess.run(
            memory_rank.arguments(job_file), capture_output=True, text=True, check=False, timeout=LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{job.case.name}, {job.strategy} failed:\n{done.stdout}{done.stderr}")
        return [json.loads((Path(name) / f"rank-{k}.json").read_text()) for k in range(job.num_ranks)]


def _foreseen(job: MemoryJob, machine: Machine) -> Memory:
    """From a graph whose features are not looked at; times do not matter."""
    asked = replace(_question(json.dumps(job.to_json()["case"]), job.num_ranks), machine=machine)
    if job.num_ranks == 1:
        return next(iter(predictions(asked))).memory
    return of_given(asked, job.strategy, job.options).memory


@lru_cache(maxsize=2)
def _question(case_json: str, num_ranks: int) -> Question:
    case = Case(**json.loads(case_json))
    graph = case.recipe().load()
    size = None if case.fan_outs is None else case.batch_size
    epochs = memory_rank.num_epochs(case)
    trainer = Trainer("auto", num_neighbors=case.fan_outs, batch_size=size, max_epochs=epochs, seed=SEED)
    training = training_of(case.built(graph), graph, trainer, inputs_of(graph), labelled(graph).numel())
    sight = look_at(graph, partition(graph, num_ranks, default_method(), seed=SEED), training)
    law = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6)
    return Question(
        training, sight, num_ranks, measured_machine(PlanOptions(tell=print)), Link(1e9, 1e-4), law, 1.0
    )


def _tell(each: Held) -> None:
    foreseen = each.foreseen
    pairs = (
        ("start", each.start, foreseen.start),
        ("training", each.training, foreseen.training),
        ("run", each.whole, max(foreseen.training, foreseen.evaluation)),
    )
    told = ", ".join(f"{name} {was / 1e6:.0f} MB, foreseen {said / 1e6:.0f}" for name, was, said in pairs)
    print(f"  {each.name:62} {told}", flush=True)


def figures(found: Sequence[Held]) -> Iterator[Figure]:
    """Of all that was run."""
    errors = sorted(error for each in found for error in each.errors)
    told = f"{len(found)} runs; {_by_strategy(found)}"
    yield Figure("memory_error", statistics.median(errors), "relative", told, at_most=0.15)
    yield Figure("memory_error_p90", errors[round(0.9 * (len(errors) - 1))], "relative", told)
    starts = [abs(each.foreseen.start / each.start - 1) for each in found]
    yield Figure("memory_error_start", statistics.median(starts), "relative", f"worst {max(starts):.2f}")
    held = [
        abs(max(each.foreseen.training, each.foreseen.evaluation) - each.whole)
        / max(each.whole - each.process, 1.0)
        for each in found
    ]
    yield Figure("memory_error_held", statistics.median(held), "relative", "beside the bare process")
    unfit = [each.name for each in found if each.foreseen.needed < each.most]
    spare = statistics.median(each.foreseen.needed / each.most for each in found)
    told = "; ".join(unfit) or f"what is asked for is {spare:.2f} times what runs had, in the median"
    yield Figure("memory_unfit", float(len(unfit)), "plans", told, at_most=0.0)


def _by_strategy(found: Sequence[Held]) -> str:
    told = []
    for strategy in dict.fromkeys(each.strategy for each in found):
        ratios = [
            max(each.foreseen.training, each.foreseen.evaluation) / each.whole
            for each in found
            if each.strategy == strategy
        ]
        told.append(f"{strategy} {statistics.median(ratios):.2f} [{min(ratios):.2f} .. {max(ratios):.2f}]")
    return "foreseen over measured, median and range: " + ", ".join(told)
