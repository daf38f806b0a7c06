"""Section ``times``: epochs of windows against one mini-batch at a time and plain calls, where links set the pace.

A sixteenth of graph A: 16 communities instead of 256, each as it was, and mini-batches of 62 seeds instead of 1,000, so that
as many seeds fall into a community, the same share of a mini-batch is remote, and windows repeat as many rows; bytes to
computing are as on the whole graph. 4 ranks share this machine's cores; each has a host of the lab.

The rate of the links is sought at which ranks that load one mini-batch at a time (k=1, a pool that forgets) wait for 70 % of
an epoch, on average over the models.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, mean

from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.macro.drawn import draw, two_windows
from benchmarks.macro.graphs import SHAPES, make
from benchmarks.macro.launches import Ran, save, start, why_no_lab
from benchmarks.macro.workload import MODELS, Job, Side

__all__ = ["run"]

WIDTH, HIDDEN = 128, 64
STEPS = 32
WAITING, LEAST_MBIT = 0.7, 80.0  # of an epoch of k=1; the slowest link
OURS = "delta_k16"
BESIDE = ("k1", "k16", OURS, "rpc")  # at every rate, for every model


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Ratios of epochs at the rate that is sought, at 1 Gbit/s and without a limit."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    shape = replace(SHAPES["A"], log_nodes=15 if is_quick else 16, batch=31 if is_quick else 62)
    fixed = make(shape, WIDTH, most_steps=STEPS // 2 if is_quick else STEPS)
    room = two_windows(draw(fixed, shape.fan_outs, (0, 1)).inputs, 16)
    print(f"  {describe(fixed.graph)}; {fixed.num_steps} steps of {shape.batch} seeds a rank", flush=True)
    models = MODELS[:1] if is_quick else MODELS
    with tempfile.TemporaryDirectory(prefix="polyhop-macro-") as name:
        parts = save(fixed, Path(name))
        answers = str(Path(name) / "answers")
        job = Job(str(parts), answers, shape.batch_size, shape.fan_outs, _sides(room), models, HIDDEN)
        told = _Told(job, shape.num_parts)
        free = told.start("unlimited", None, BESIDE, turns=1)
        rate = _guess(free, models, fixed_bytes=_busiest(free))
        if not is_quick:
            tried = told.start("search", rate, ("k1",), turns=1)
            rate = _better(rate, tried, models)
        sides = BESIDE if is_quick else tuple(job.sides)
        sought = told.start("sought", rate, sides, turns=1 if is_quick else 2)
        runs = {"unlimited": free, "sought": sought}
        if not is_quick:
            runs["1gbit"] = told.start("1gbit", 1000, BESIDE, turns=1)
    yield from _sought(rate, sought, free, models)
    for name, ran in runs.items():
        yield from _against(name, ran, models, shape.num_parts)


def _sides(room: int) -> dict[str, Side]:
    first = MODELS[:1]
    return {
        "k1": Side(1),
        "k8": Side(8, models=first),
        "k16": Side(16),
        "k32": Side(32, models=first),
        "delta_k1": Side(1, delta=True, room=room, models=first),
        "delta_k8": Side(8, delta=True, room=room, models=first),
        "delta_k16": Side(16, delta=True, room=room),
        "rpc": Side(rpc=True),
    }


@dataclass(frozen=True)
class _Told:
    """Launches of one job, each told when it is done."""

    job: Job
    num_ranks: int

    def start(self, name: str, mbit: float | None, sides: Sequence[str], *, turns: int) -> Ran:
        chosen = {side: self.job.sides[side] for side in sides}
        job = replace(self.job, sides=chosen, turns=turns)
        ran = start(job, self.num_ranks, name, rate=None if mbit is None else f"{mbit:.0f}mbit")
        rate = "unlimited" if mbit is None else f"{mbit:.0f} Mbit/s"
        print(
            f"  {name}: {rate}, {8 * ran.bytes_per_s / 1e6:.0f} Mbit/s measured, load {ran.load:.1f} before:",
            flush=True,
        )
        for model, found in ran.epochs.items():
            for side in found:
                share = f"waits {100 * ran.waiting(model, side):.0f} %"
                print(
                    f"    {model:5}{side:11}{ran.told(model, side)}; {share}; {_more(ran, model, side)}",
                    flush=True,
                )
        return ran


def _more(ran: Ran, model: str, side: str) -> str:
    ranks = ran.epochs[model][side][-1]
    return (
        f"k={ranks[0]['k']}, slots {ranks[0]['used']:,} of {ranks[0]['room']:,}"
        if "k" in ranks[0]
        else "no pool"
    )


# The rate


def _busiest(ran: Ran) -> float:
    """Bytes that the busiest rank sends in an epoch of k=1."""
    return max(cost.total_bytes for model in ran.epochs for cost in ran.sent(model, "k1"))


def _busy(ran: Ran, model: str) -> float:
    """Seconds of an epoch of k=1 in which ranks did not wait for their mini-batches."""
    return ran.per_rank(model, "k1", lambda one: one["s"] - one["spans"].get("wait", 0.0))


def _rate(num_bytes: float, busy_s: float) -> float:
    """Mbit/s at which so many bytes take as long as makes ``busy_s`` the share that is not waited for.

    Other work on the machine makes computing slow and the rate low: down to one that still lets the bench end.
    """
    return max(LEAST_MBIT, 8 * num_bytes / (busy_s / (1 - WAITING)) / 1e6)


def _guess(free: Ran, models: Sequence[str], *, fixed_bytes: float) -> float:
    """From epochs without a limit, where loading takes the cores too: computing takes half of what it seems."""
    return _rate(fixed_bytes, mean(_busy(free, model) for model in models) / 2)


def _better(rate: float, tried: Ran, models: Sequence[str]) -> float:
    """The rate after a trial: the same where the trial waited about as long as is sought, else in proportion to the bytes.

    Ranks wait for more than bytes (rounds, each other), and that part stays.
    """
    if abs(mean(tried.waiting(model, "k1") for model in models) - WAITING) <= 0.05:
        return rate
    busy = mean(_busy(tried, model) for model in models)
    waited = mean(tried.per_rank(model, "k1", lambda one: one["spans"].get("wait", 0.0)) for model in models)
    bytes_s = 8 * _busiest(tried) / rate / 1e6
    others = min(max(waited - bytes_s, 0.0), 0.9 * waited)
    wanted = max(busy * WAITING / (1 - WAITING) - others, 0.2 * bytes_s)
    return max(LEAST_MBIT, rate * bytes_s / wanted)


# Figures


def _sought(rate: float, ran: Ran, free: Ran, models: Sequence[str]) -> Iterator[Figure]:
    share = {model: ran.waiting(model, "k1") for model in models}
    details = "Mbit/s at which k=1 waits for its mini-batches " + ", ".join(
        f"{100 * value:.0f} % ({model})" for model, value in share.items()
    )
    details += " of an epoch; without a limit " + ", ".join(
        f"{100 * free.waiting(model, 'k1'):.0f} %" for model in models
    )
    yield Figure("rate_where_k1_waits_mbit", rate, "Mbit/s", details)
    yield Figure("k1_waits", mean(share.values()), "share", f"of an epoch at {rate:.0f} Mbit/s")


def _against(name: str, ran: Ran, models: Sequence[str], num_ranks: int) -> Iterator[Figure]:
    end, is_aimed = ("", True) if name == "sought" else (f"_{name}", False)
    yield _ratio(f"epoch_vs_k1{end}", ran, models, "k1", 2.0 if is_aimed else None, num_ranks)
    yield _ratio(f"epoch_vs_distdgl_mode{end}", ran, models, "rpc", 3.0 if is_aimed else None, num_ranks)
    yield _ratio(f"epoch_plain_vs_k1{end}", ran, models, "k1", None, num_ranks, ours="k16")
    if "delta_k1" in ran.epochs[models[0]]:
        yield _ratio(f"epoch_vs_delta_k1{end}", ran, models[:1], "delta_k1", None, num_ranks)


def _ratio(
    name: str, ran: Ran, models: Sequence[str], peer: str, aim: float | None, num_ranks: int, ours: str = OURS
) -> Figure:
    """Geometric mean over the models of the peer's epoch over ours."""
    found = {model: ran.median(model, peer) / ran.median(model, ours) for model in models}
    each = ", ".join(
        f"{model} {ratio:.2f} ({ran.median(model, peer):.2f} s over {ran.median(model, ours):.2f} s)"
        for model, ratio in found.items()
    )
    cores = len(os.sched_getaffinity(0))
    crowd = f"; {num_ranks} ranks on {cores} cores" if num_ranks > cores else ""
    crowd += f"; other work on the machine, load {ran.load:.1f}" if ran.load > cores else ""
    return Figure(
        name, geometric_mean(found.values()), "x", f"{peer} over {ours}: {each}{crowd}", at_least=aim
    )
