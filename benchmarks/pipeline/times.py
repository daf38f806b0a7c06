"""Section ``times``: epochs of two ranks, one core each, where links set the pace; and what the simulator says of them.

Each rank has a host of the lab and a core of its own. For plain ``halo`` (graph parallel as published) the rate of the
links is sought at which it waits 2.9 times as long as it computes (as GNNPipe's authors' runs on Reddit do) and as long, on
a graph cut like Reddit; and 0.3 times as long, on one cut more thinly, because on the first it waits longer than that
without any limit (gloo moves its bytes on the core that computes). The sides live in the same ranks and take turns. The
simulator gets the tasks as they took without a
limit, what the first stage does before and after them, and the rate that the link was measured to have; it knows nothing
else of a phase."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.halo.graphs import Cut, cut
from benchmarks.halo.launches import Phase, phases, save, why_no_lab
from benchmarks.harness import ROOT, Figure, busy_cores
from benchmarks.pipeline import rank as one_rank
from benchmarks.pipeline.rank import Job
from benchmarks.pipeline.workload import NAIVE, OPTIMISED, OURS, SIDES, SWEPT, reddit_like
from polyhop.strategies.pipeline_schedule import Layout, Task, chunk_order, fill_drain
from polyhop.strategies.pipeline_shape import Links, Work, choose_shape
from polyhop.strategies.pipeline_simulate import simulate

__all__ = ["run"]

NUM_RANKS, CHUNKS = 2, 8
RATIOS = {0.9965: (2.9, 1.0), 0.9993: (0.3,)}
"""Share of edges inside a class -> seconds that plain halo waits over those that it computes."""
FIRST_RATE = "40mbit"  # see lab.relimit; ranks change it at once
LIMIT_S = 900  # of one launch
LATENCY_S = 2e-4  # of a message between two processes of this machine
QUIET = 0.3  # cores that others may use before a launch without being told
CLOSE = 0.1  # of a share, to be told as the ratio that was sought


@dataclass(frozen=True)
class _Size:
    num_nodes: int
    degree: int
    num_layers: int
    hidden: int
    turns: int
    tries: int


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Of each model and ratio: the rate, epochs of halo over the pipeline's; and how far the simulator is off."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    size = _Size(2048, 80, 8, 32, 3, 2) if is_quick else _Size(8192, 160, 32, 64, 7, 5)
    errors: dict[str, float] = {}
    chosen: dict[str, tuple[str, float]] = {}
    for inside, ratios in RATIOS.items():
        graph = reddit_like(size.num_nodes, size.hidden, degree=size.degree, inside=inside)
        made = cut("like-reddit", graph, NUM_RANKS)
        print(f"  {made}", flush=True)
        for model in ("gcn",) if is_quick else ("gcn", "gcnii"):
            found, load = _launched(made, model, size, ratios)
            free, *limited = phases(found, load)
            for phase, ratio in zip([free, *limited], (0.0, *ratios), strict=True):
                simulated = _simulated(found, free, phase)
                _tell(model, phase, simulated)
                name = f"{model}_{ratio:g}" if ratio else f"{model}_free_{made.halo:.1f}"
                errors[name] = simulated / phase.median(OURS) - 1
                chosen[name] = _chosen(found, free, phase, size, made.halo)
                if ratio:
                    yield from _ratios(name, phase, ratio, made.halo)
    details = ", ".join(f"{name} {100 * error:+.1f} %" for name, error in errors.items())
    yield Figure(
        "simulator_error",
        max(map(abs, errors.values())),
        "off",
        f"of the measured epoch, the largest (model, ratio): {details}",
        at_most=0.15,
    )
    details = ", ".join(f"{name}: {side} {value:.2f}" for name, (side, value) in chosen.items())
    yield Figure(
        "auto_vs_best_shape_2ranks",
        max(value for _, value in chosen.values()),
        "x",
        f"epoch of the side that choose_shape names over the faster of plain halo and pipeline, the worst: {details}",
    )


def _launched(
    made: Cut, model: str, size: _Size, ratios: tuple[float, ...]
) -> tuple[list[dict[str, Any]], float]:
    """What both ranks answered, and how many cores others used just before."""
    load = busy_cores()
    with tempfile.TemporaryDirectory(prefix="polyhop-pipeline-") as name:
        folder = Path(name)
        shares = tuple(ratio / (1 + ratio) for ratio in ratios)
        job = Job(
            str(save(made, folder)), name, model, size.num_layers, size.hidden, CHUNKS, shares, size.turns, size.tries
        )  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job.to_json()))
        lab = [str(ROOT / "scripts" / "lab"), str(NUM_RANKS), "--rate", FIRST_RATE, "--timeout", str(LIMIT_S)]
        command = [*lab, "--", *one_rank.arguments(folder / "job.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{NUM_RANKS} ranks in the lab failed:\n{done.stdout}{done.stderr}")
        return [json.loads((folder / f"rank-{k}.json").read_text()) for k in range(NUM_RANKS)], load


def _simulated(found: list[dict[str, Any]], free: Phase, phase: Phase) -> float:
    """Seconds of the pipeline's epoch at a phase's rate: median over the epochs that were timed in it."""
    seconds: dict[tuple[int, str, int], list[float]] = {}
    outside = []
    for ranks in free.epochs[OURS]:
        for stage, one in enumerate(ranks):
            for direction, chunk, took in one["tasks"]:
                seconds.setdefault((stage, direction, chunk), []).append(took)
        # Backward ends on the first stage, so all that it does beside its tasks and waits is before them or after.
        first = ranks[0]
        outside.append(
            first["s"] - sum(took for _, _, took in first["tasks"]) - first["spans"].get("wait", 0.0)
        )
    typical = {at: statistics.median(each) for at, each in seconds.items()}
    rows, row_bytes = found[0]["chunk_rows"], found[0]["row_bytes"][0]

    def task_s(stage: int, task: Task) -> float:
        assert task.chunk is not None
        return typical[stage, task.direction, task.chunk]

    def message_s(stage: int, task: Task) -> float:
        assert task.chunk is not None
        return LATENCY_S + rows[task.chunk] * row_bytes / phase.bytes_per_s

    made = []
    for ranks in phase.epochs[OURS]:
        order = chunk_order(range(len(rows)), one_rank.SEED, ranks[0]["epoch"])
        schedule = fill_drain(Layout(NUM_RANKS), found[0]["bounds"], [order])
        made.append(simulate(schedule, task_s, message_s).seconds)
    return statistics.median(made) + statistics.median(outside)


def _chosen(
    found: list[dict[str, Any]], free: Phase, phase: Phase, size: _Size, replicas: float
) -> tuple[str, float]:
    """The side that should be faster, and its epoch over that of the one that is. Known: computing, sizes, the rate."""
    computing = NUM_RANKS * free.mean_seconds(NAIVE) * (1 - free.waiting(NAIVE))
    in_chunks = statistics.median(
        sum(took for one in ranks for _, _, took in one["tasks"]) for ranks in free.epochs[OURS]
    )
    work = Work(
        sum(found[0]["chunk_rows"]),
        [size.hidden] * size.num_layers,
        found[0]["row_bytes"][0] // 4,
        computing,
        {NUM_RANKS: replicas},
        num_chunks=CHUNKS,
        chunked=in_chunks / computing,
    )
    shapes = choose_shape(NUM_RANKS, work, Links(phase.bytes_per_s, phase.bytes_per_s))
    side = {"halo": NAIVE, "pipeline": OURS}[shapes[0].name]
    return side, phase.median(side) / min(phase.median(each) for each in (NAIVE, OURS))


def _tell(model: str, phase: Phase, simulated: float) -> None:
    where = f"{phase.mbit:.1f} Mbit/s" if phase.mbit else "no limit"
    print(
        f"  {model}, {where} ({8e-6 * phase.bytes_per_s:.0f} measured), plain halo waits "
        f"{100 * phase.waiting(NAIVE):.0f} % of its epoch; {phase.load:.1f} cores busy before; pipeline simulated: "
        f"{1000 * simulated:.0f} ms",
        flush=True,
    )
    for side in SIDES:
        print(f"    {side:10} {phase.told(side)}", flush=True)


def _ratios(name: str, phase: Phase, ratio: float, halo: float) -> Iterator[Figure]:
    share = phase.waiting(NAIVE)
    reached = share / (1 - share)
    off = "" if abs(share - ratio / (1 + ratio)) <= CLOSE else "; NOT the ratio that was sought"
    busy = f"; other work on {phase.load:.1f} cores before" if phase.load > QUIET else ""
    yield Figure(
        f"rate_mbit_{name}",
        phase.mbit,
        "Mbit/s",
        f"plain halo waits {reached:.2f} times as long as it computes, {ratio:g} was sought; {halo:.2f} rows a node cross "
        f"the cut{off}{busy}",
    )
    for side, end in ((NAIVE, ""), (OPTIMISED, "_vs_optimised")):
        details = (
            f"{side} {1000 * phase.median(side):.0f} ms over pipeline {1000 * phase.median(OURS):.0f} ms, waiting over "
            f"computing {reached:.2f} of plain halo, {phase.mbit:.1f} Mbit/s{off}{busy}"
        )
        yield Figure(f"epoch_halo_vs_pipeline_{name}{end}", phase.speedup(side, OURS), "x", details)
        details = (
            f"the same over the pipeline with a sweep before every epoch, {1000 * phase.median(SWEPT):.0f} ms"
        )
        yield Figure(
            f"epoch_halo_vs_pipeline_{name}{end}_swept",
            phase.speedup(side, SWEPT),
            "x",
            f"{details}{off}{busy}",
        )
