"""Section ``grid``: what is foreseen against what is measured, and what the choice cost, over real runs in the lab.

For every case (a model on a graph, with mini-batches or without) on 2 and on 4 ranks all ways that are foreseen take turns,
five times one to three epochs each, at two rates of the links. At each rate the plan is made anew, on the links as they are.
``POLYHOP_GRID=full/4`` times some of them again, here the full graphs on 4 ranks; figures are then of these and of what was.

``choice_regret`` is the time of the way that was chosen over the best that was measured, of those that the choice was among:
exact ones, and for the full graph once more all of them. Figures are given twice: as foreseen, and with what the other cases
teach (of each strategy the median of measured over foreseen, the case itself left out), which is what a host that has run
some training knows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Figure
from benchmarks.macro.launches import LAB, why_no_lab
from benchmarks.plan import rank as one_rank
from benchmarks.plan import ways
from benchmarks.plan.cases import CASES, UNSEEN, Case, Job
from benchmarks.plan.ways import Timed
from polyhop.plan import Plan
from polyhop.plan.search import NEAR

__all__ = ["figures", "run"]

RANKS = (2, 4)
RATES: tuple[float | None, ...] = (None, 300.0)
FIRST_RATE = (
    "740mbit"  # see lab.relimit: segments are as large as the smallest bucket; ranks change it at once
)
MOST, MOST_OF_FIRST = 2.5, 6.0  # ways that should take so many times as long as the best are not timed
LIMIT_S = 900
ARENAS = {"MALLOC_ARENA_MAX": "4"}  # many sides have many threads, and memory is kept by arena


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Regret, errors of time and of bytes."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    os.environ.setdefault("POLYHOP_DATA", str(ROOT.parent / "shared" / "data"))
    found: list[Timed] = []
    for case, ranks in _wanted(is_quick):
        start = time.perf_counter()
        seen = _measured(case, ranks, 1 if is_quick else 5)
        print(f"  {case.name}, {ranks} ranks: {time.perf_counter() - start:.0f} s in all", flush=True)
        for each in seen:
            _tell(each)
        found += seen
    if not is_quick:
        found = found + _others(found)
        ways.write(found)
    yield from figures(found)


def _wanted(is_quick: bool) -> list[tuple[Case, int]]:
    """``$POLYHOP_GRID`` chooses: part of a case's name / ranks, such as ``full/4``; the rest is then what it was."""
    if is_quick:
        return [(case, RANKS[0]) for case in (CASES[0], CASES[4])]
    text, _, ranks = os.environ.get("POLYHOP_GRID", "").partition("/")
    every = [(case, each) for case in CASES + UNSEEN for each in RANKS]
    found = [(case, each) for case, each in every if text in case.name and ranks in ("", str(each))]
    if not found:
        raise ValueError(
            f"POLYHOP_GRID={text}/{ranks}: no case of {sorted({case.name for case, _ in every})}"
        )
    return found


def _others(found: Sequence[Timed]) -> list[Timed]:
    """Of the table, the groups that were not timed now, if only some were asked for."""
    if not os.environ.get("POLYHOP_GRID"):
        return []
    groups = {each.group for each in found}
    return [each for each in ways.read() if each.group not in groups]


def _measured(case: Case, ranks: int, turns: int) -> list[Timed]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="polyhop-plan-") as name:
        job_file = Path(name) / "job.json"
        job_file.write_text(json.dumps(Job(case, name, RATES, turns, MOST, MOST_OF_FIRST).to_json()))
        lab = [str(LAB), str(ranks), "--rate", FIRST_RATE, "--timeout", str(LIMIT_S)]
        done = subprocess.run(
            [*lab, "--", *one_rank.arguments(job_file)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **ARENAS},
        )
        if done.returncode != 0:
            raise RuntimeError(f"{case.name}: {ranks} ranks in the lab failed:\n{done.stdout}{done.stderr}")
        told = [json.loads((Path(name) / f"rank-{k}.json").read_text()) for k in range(ranks)]
    return [each for at in range(len(told[0])) for each in _phase(case, [one[at] for one in told], load)]


def _phase(case: Case, told: Sequence[dict[str, Any]], load: float) -> Iterator[Timed]:
    first = told[0]
    foreseen = {one.prediction.name: one.prediction for one in Plan.from_json(first["plan"]).ranked}
    for name, epochs in first["epochs"].items():
        turns = range(len(epochs))
        seconds = statistics.median(max(one["epochs"][name][turn]["s"] for one in told) for turn in turns)
        sent = max(statistics.mean(_sent(one["epochs"][name][turn]) for turn in turns) for one in told)
        given = foreseen[name]
        yield Timed(
            case.name,
            len(told),
            first["mbit"],
            name,
            given.strategy,
            given.is_exact,
            given.foreseen_s or given.epoch_s,
            seconds,
            sum(given.sent.values()),
            sent,
            given.memory.most,
            load,
        )


def _sent(epoch: dict[str, Any]) -> float:
    return float(sum(epoch["bytes"].values()))


def _tell(each: Timed) -> None:
    rate = "no limit" if each.mbit is None else f"{each.mbit:.0f} Mbit/s"
    print(
        f"  {each.case}, {each.num_ranks} ranks, {rate}: {each.name:45} {1000 * each.measured_s:7.0f} ms, foreseen "
        f"{1000 * each.foreseen_s:7.0f} ({each.ratio:.2f} x); {each.measured_bytes / 1e6:.2f} MB, foreseen "
        f"{each.foreseen_bytes / 1e6:.2f}; load {each.load:.1f}",
        flush=True,
    )


# Figures


def figures(found: Sequence[Timed]) -> Iterator[Figure]:
    """Of all that was timed; as foreseen, with what other cases teach, and of cases that nobody had looked at."""
    learnt = {id(each): each.foreseen_s * _taught(each, found) for each in found}
    plain = {id(each): each.foreseen_s for each in found}
    unseen = [each for each in found if each.case in {case.name for case in UNSEEN}]
    for end, times, these in (("", plain, found), ("_learnt", learnt, found), ("_unseen", plain, unseen)):
        regrets = _regrets(these, times)
        if not regrets:
            continue
        worst = max(regrets, key=lambda each: each[0])
        told = f"{len(regrets)} choices over {len(these)} ways that were run; worst {worst[1]}"
        yield Figure(
            f"choice_regret{end}", statistics.mean(each[0] for each in regrets), "x", told, at_most=1.05
        )
        yield Figure(f"choice_regret_worst{end}", worst[0], "x", worst[1], at_most=1.25)
        errors = [abs(times[id(each)] / each.measured_s - 1) for each in these]
        told = _by_strategy(these, times)
        yield Figure(f"time_error{end}", statistics.median(errors), "relative", told, at_most=0.25)
    yield from _bytes(found)


def _taught(given: Timed, found: Sequence[Timed]) -> float:
    """Of its strategy, what the other cases teach."""
    others = [each.ratio for each in found if each.strategy == given.strategy and each.case != given.case]
    return statistics.median(others) if others else 1.0


def _regrets(found: Sequence[Timed], times: dict[int, float]) -> list[tuple[float, str]]:
    regrets = []
    for group in dict.fromkeys(each.group for each in found):
        here = [each for each in found if each.group == group]
        exact = [each for each in here if each.is_exact]
        classes = [exact, here] if len(exact) < len(here) else [here]
        for among in filter(None, classes):
            chosen = _chosen(among, times)
            best = min(among, key=lambda each: each.measured_s)
            told = f"{group[0]}, {group[1]} ranks, {group[2] or 'no limit'}: {chosen.name}, best {best.name}"
            regrets.append((chosen.measured_s / best.measured_s, told))
    return regrets


def _chosen(among: Sequence[Timed], times: dict[int, float]) -> Timed:
    """As plans choose: of those that are as good as the fastest the exact one, then the one that needs least memory."""
    least = min(times[id(each)] for each in among)
    good = [each for each in among if times[id(each)] <= NEAR * least]
    return min(good, key=lambda each: (not each.is_exact, each.memory_bytes))


def _by_strategy(found: Sequence[Timed], times: dict[int, float]) -> str:
    told = []
    for strategy in dict.fromkeys(each.strategy for each in found):
        ratios = [times[id(each)] / each.measured_s for each in found if each.strategy == strategy]
        told.append(f"{strategy} {statistics.median(ratios):.2f} [{min(ratios):.2f} .. {max(ratios):.2f}]")
    return "foreseen over measured, median and range: " + ", ".join(told)


def _bytes(found: Sequence[Timed]) -> Iterator[Figure]:
    """Worst where they are known beforehand; medians where they follow from cuts that are made later, or from the run."""

    def kind_of(each: Timed) -> str:
        if each.strategy == "macro":
            return "windows"  # a pool that fills as the run goes on
        if "adaptive" in each.name:
            return "adaptive"  # widths follow from the rows
        if each.strategy == "pipeline":
            return "ways" if " ways" in each.name else "full"
        return "full" if each.strategy == "halo" else "drawn"

    for kind, is_worst in (
        ("full", True),
        ("drawn", True),
        ("ways", False),
        ("windows", False),
        ("adaptive", False),
    ):
        here = [each for each in found if kind_of(each) == kind]
        if here:
            errors = [abs(each.foreseen_bytes / max(each.measured_bytes, 1.0) - 1) for each in here]
            told = f"{len(here)} ways, worst {max(errors):.3f}, median {statistics.median(errors):.3f}"
            error = max(errors) if is_worst else statistics.median(errors)
            yield Figure(f"bytes_error_{kind}", error, "relative", told, at_most=0.1)
