"""Strategy ``data``, its options and the baseline of plain calls, at 2 and 4 ranks, on unlimited and on 1 Gbit/s links.

The sides share their processes and alternate epoch by epoch. Bytes and messages are what the ranks counted; they are held
against ``account`` and ``estimate``, and against the interfaces of the lab's hosts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import rank as one_rank
from benchmarks.data.expected import Expected, apart
from benchmarks.data.workload import SIDES, Size, size_of
from benchmarks.graphs import describe, synth
from benchmarks.harness import ROOT, Figure
from polyhop import launch
from polyhop.comm import Cost
from polyhop.graph import Graph
from polyhop.partition import Partition, open_parts, partition, quality, save_parts

__all__ = ["run"]

LAB = ROOT / "scripts" / "lab"
RATE = "1gbit"
LIMIT_S = 600  # of one lab run
JUDGED_BYTES = 10_000_000  # per link: below, the interfaces' own talk is too large a share


@dataclass(frozen=True)
class _Ran:
    """What all ranks told of one launch. ``epochs[side][turn][rank]``; turn 0 warmed up."""

    epochs: dict[str, list[list[dict[str, Any]]]]
    bytes_per_s: float  # of the slowest rank
    cached: list[torch.Tensor]
    hosts: list[dict[str, Any]]  # of the lab
    load: float  # of the machine, in the minute before

    def seconds(self, side: str) -> list[float]:
        """Of every epoch that counts, until the last rank was done."""
        return [max(one["s"] for one in ranks) for ranks in self.epochs[side][1:]]

    def median(self, side: str) -> float:
        return statistics.median(self.seconds(side))

    def sent(self, side: str, turn: int) -> list[Cost]:
        """What each rank counted in one epoch."""
        return [Cost(one["bytes"], one["messages"], one["rounds"]) for one in self.epochs[side][turn]]

    def mean_sent(self, side: str) -> Cost:
        """Per epoch and rank."""
        costs = [cost for turn in range(1, len(self.epochs[side])) for cost in self.sent(side, turn)]
        return sum(costs, Cost()) * (1 / len(costs))

    def link_seconds(self, side: str) -> float:
        """The limit: the bytes of the busiest sender over the measured bandwidth."""
        turns = range(1, len(self.epochs[side]))
        return (
            statistics.median(max(c.total_bytes for c in self.sent(side, t)) for t in turns)
            / self.bytes_per_s
        )

    def cpu_seconds(self, side: str) -> float:
        """The other limit: CPU-seconds of all ranks over the cores."""
        total = self.per_rank(side, lambda one: one["cpu_s"]) * len(self.epochs[side][0])
        return total / len(os.sched_getaffinity(0))

    def per_rank(self, side: str, of: Callable[[dict[str, Any]], float]) -> float:
        """Mean over ranks and the epochs that count."""
        return statistics.mean(of(one) for ranks in self.epochs[side][1:] for one in ranks)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Per side: bytes, messages, epoch seconds; and the ratios between sides."""
    size = size_of(is_quick=is_quick)
    graph = synth(size.graph)
    assert graph.split is not None
    batch_size = size.batch_size(graph.split.train.numel())
    print(f"  {describe(graph)}; {size.num_steps} steps of {batch_size} seeds of all ranks", flush=True)
    no_lab = _why_no_lab()
    if no_lab:
        print(f"  the {RATE} part is skipped: {no_lab}", flush=True)
    by_rate: dict[str, dict[int, _Ran]] = {"unlimited": {}} | ({} if no_lab else {RATE: {}})
    judged: dict[int, _Judged] = {}
    with tempfile.TemporaryDirectory(prefix="polyhop-data-") as name:
        for num_ranks in size.ranks:
            made, parts = _cut(graph, num_ranks, Path(name))
            for rate, runs in by_rate.items():
                runs[num_ranks] = _start(rate, num_ranks, parts, Path(name), size)
                _show(rate, num_ranks, runs[num_ranks])
            ran = by_rate["unlimited"][num_ranks]
            part = open_parts(parts).share(0, num_ranks).part
            judged[num_ranks] = _judge(Expected(graph, made, part, batch_size, ran.cached), ran)
    for num_ranks, ran in by_rate["unlimited"].items():
        yield from _sent_figures(num_ranks, ran)
    for rate, runs in by_rate.items():
        for num_ranks, ran in runs.items():
            yield from _time_figures(rate, num_ranks, ran)
    yield from _ratios(by_rate, judged)


def _why_no_lab() -> str:
    """Why hosts with limited links cannot be had here; empty if they can."""
    tried = subprocess.run(
        [str(LAB), "1", "--rate", RATE, "--", "true"], capture_output=True, text=True, check=False
    )
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["scripts/lab failed"])[-1]


def _cut(graph: Graph, num_ranks: int, folder: Path) -> tuple[Partition, Path]:
    made = partition(graph, num_ranks, "metis")
    parts = folder / f"parts-{num_ranks}"
    save_parts(graph, made, parts)
    found = quality(graph, made)
    print(
        f"  metis, {num_ranks} parts: cut {found.cut:.3f}, halo {found.halo:.3f} of the nodes, balance of nodes "
        f"{found.node_balance:.3f}, of train nodes {found.train_balance:.3f}",
        flush=True,
    )
    return made, parts


def _start(rate: str, num_ranks: int, parts: Path, folder: Path, size: Size) -> _Ran:
    """All sides in one launch: local processes, or a host of the lab for each rank."""
    answer = folder / f"answer-{num_ranks}-{rate}"
    answer.mkdir()
    hosts: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    if rate == "unlimited":
        launch.run(one_rank.measure, (str(parts), str(answer), asdict(size)), one_rank.options(num_ranks))
    else:
        told = folder / f"lab-{num_ranks}.json"
        lab = [str(LAB), str(num_ranks), "--rate", rate, "--timeout", str(LIMIT_S), "--json", str(told)]
        command = [*lab, "--", *one_rank.arguments(parts, answer, size)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{num_ranks} ranks in the lab failed:\n{done.stdout}{done.stderr}")
        hosts = json.loads(told.read_text())["hosts"]
    found = [json.loads((answer / f"rank-{k}.json").read_text()) for k in range(num_ranks)]
    epochs = {
        side: [list(ranks) for ranks in zip(*(one["epochs"][side] for one in found), strict=True)]
        for side in SIDES
    }
    cached = [torch.from_numpy(np.load(answer / f"cached-{k}.npy")) for k in range(num_ranks)]
    return _Ran(epochs, min(one["bytes_per_s"] for one in found), cached, hosts, load)


def _show(rate: str, num_ranks: int, ran: _Ran) -> None:
    print(
        f"  {num_ranks} ranks, {rate}, {8 * ran.bytes_per_s / 1e9:.2f} Gbit/s measured, load {ran.load:.1f} before:",
        flush=True,
    )
    for side in SIDES:
        losses = " ".join(f"{ranks[0]['loss']:.4f}" for ranks in ran.epochs[side])
        print(f"    {side:6}{_times(ran, side)}; losses {losses}", flush=True)


def _times(ran: _Ran, side: str) -> str:
    seconds = ran.seconds(side)
    spans = [
        f"{name} {ran.per_rank(side, lambda one, name=name: one['spans'].get(name, 0.0)):.2f}"
        for name in ("compute", "wait", "sample", "load")
    ]
    return (
        f"{ran.median(side):.2f} s [{min(seconds):.2f} .. {max(seconds):.2f}]; {', '.join(spans)} s a rank; limits: bytes "
        f"over bandwidth {ran.link_seconds(side):.2f} s, CPU over cores {ran.cpu_seconds(side):.2f} s"
    )


@dataclass(frozen=True)
class _Judged:
    """How far account and estimate are from the counters at worst, and where."""

    account: tuple[float, str]
    estimate: tuple[float, str]


def _judge(expected: Expected, ran: _Ran) -> _Judged:
    """``account`` against the first epoch that counts; ``estimate`` against the mean of all that count."""
    accounted, estimated = expected.accounted(1), expected.estimated()
    exact, near = [], []
    for side in SIDES:
        turns = range(1, len(ran.epochs[side]))
        for rank in range(expected.made.num_parts):
            where = f"{side}, rank {rank}"
            exact.append(_worst(accounted[side][rank], ran.sent(side, 1)[rank], where))
            mean = sum((ran.sent(side, turn)[rank] for turn in turns), Cost()) * (1 / len(turns))
            near.append(_worst(estimated[side][rank], mean, where))
    return _Judged(max(exact), max(near))


def _worst(expected: Cost, counted: Cost, where: str) -> tuple[float, str]:
    found = [(*apart(expected.bytes, counted.bytes), "bytes")]
    found.append((*apart(expected.messages, counted.messages), "messages"))
    ratio, kind, unit = max(found)
    return ratio, f"{where}, {kind} {unit}" if ratio > 1 else "every side, rank and kind"


def _listed(values: Mapping[str, float], unit: float = 1.0, form: str = ",.0f") -> str:
    return ", ".join(f"{kind} {value / unit:{form}}" for kind, value in sorted(values.items()))


def _sent_figures(num_ranks: int, ran: _Ran) -> Iterator[Figure]:
    for side in SIDES:
        cost, where = ran.mean_sent(side), f"{side}_{num_ranks}ranks"
        details = "per epoch and rank: " + _listed(cost.bytes, 1e6, ".3f")
        yield Figure(f"data_mb_{where}", cost.total_bytes / 1e6, "MB", details)
        details = "per epoch and rank: " + _listed(cost.messages)
        yield Figure(f"data_messages_{where}", cost.total_messages, "messages", details)


def _time_figures(rate: str, num_ranks: int, ran: _Ran) -> Iterator[Figure]:
    cores = len(os.sched_getaffinity(0))
    crowd = f"; {num_ranks} ranks on {cores} cores" if num_ranks > cores else ""
    crowd += f"; other work on the machine, load {ran.load:.1f}" if ran.load > cores else ""
    for side in SIDES:
        yield Figure(
            f"data_epoch_s_{side}_{num_ranks}ranks_{rate}", ran.median(side), "s", _times(ran, side) + crowd
        )


def _ratios(by_rate: dict[str, dict[int, _Ran]], judged: dict[int, _Judged]) -> Iterator[Figure]:
    """Each is of the rank count where it is worst; the details have all."""
    free = by_rate["unlimited"]

    def features(ran: _Ran, side: str) -> float:
        return ran.mean_sent(side).bytes["features"]

    def total(ran: _Ran, side: str) -> float:
        return ran.mean_sent(side).total_bytes

    for side, name in (("cache", "cache"), ("bf16", "bf16"), ("both", "cache_bf16")):
        found = {n: features(ran, side) / features(ran, "data") for n, ran in free.items()}
        yield _over_ranks(f"{name}_bytes_ratio", found, "share", "feature bytes with it over without", max)
    found = {n: total(ran, "rpc") / total(ran, "data") for n, ran in free.items()}
    yield _over_ranks("data_vs_rpc_bytes", found, "x", "bytes of plain calls over ours, all kinds", min)
    for rate, runs in by_rate.items():
        for side in ("data", "both"):
            found = {n: ran.median("rpc") / ran.median(side) for n, ran in runs.items()}
            name = f"{side}_vs_rpc_time_{rate}"
            yield _over_ranks(name, found, "x", "epoch seconds of plain calls over ours", min)
        found = {n: ran.median("data") / ran.link_seconds("data") for n, ran in runs.items()}
        yield _over_ranks(f"data_epoch_vs_link_{rate}", found, "x", "epoch over bytes / bandwidth", max)
        found = {n: ran.median("data") / _limit(ran, "data") for n, ran in runs.items()}
        yield _over_ranks(
            f"data_epoch_vs_limit_{rate}", found, "x", "epoch over the larger of both limits", max
        )
    for name, limit in (("account", 1.0), ("estimate", 1.1)):
        worst = {n: getattr(one, name) for n, one in judged.items()}
        details = "; ".join(f"{n} ranks {ratio:.4f} ({where})" for n, (ratio, where) in worst.items())
        yield Figure(f"{name}_vs_counters", max(worst.values())[0], "x", details, at_most=limit)
    hosts = [host for ran in by_rate.get(RATE, {}).values() for host in ran.hosts]
    hosts = [host for host in hosts if host["counted_bytes"] >= JUDGED_BYTES]
    if hosts:
        ratios = [host["ratio"] for host in hosts]
        least = min(host["counted_bytes"] for host in hosts) / 1e6
        details = (
            f"interface bytes over counted, {len(ratios)} links of at least {least:.0f} MB, {min(ratios):.4f} .. "
            f"{max(ratios):.4f}; the farthest from 1, either way up"
        )
        farthest = max(max(ratio, 1 / ratio) for ratio in ratios)
        yield Figure("lab_vs_counters", farthest, "x", details, at_most=1.06)


def _limit(ran: _Ran, side: str) -> float:
    """No epoch is shorter: the link and the cores are each busy at least so long."""
    return max(ran.link_seconds(side), ran.cpu_seconds(side))


def _over_ranks(
    name: str, found: Mapping[int, float], unit: str, what: str, worst: Callable[..., float]
) -> Figure:
    listed = ", ".join(f"{n} ranks {value:.3f}" for n, value in found.items())
    return Figure(name, worst(found.values()), unit, f"{what}: {listed}")
