"""Section ``rows``: rows and messages of windows on the fixed graphs, against brute force, prediction and one at a time.

Graph A (and B, the same graph with other fan-outs) runs on 4 ranks: mini-batches are loaded, and not trained, since neither
rows nor messages depend on what is done with them. Features are 4 columns wide, for the same reason; bytes are told for 128
columns, of which a row has 4 * 128 + 8. C and D are counted by brute force alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.macro.drawn import Drawn, Ids, Rows, draw, fetched, two_windows, union, windows
from benchmarks.macro.graphs import SHAPES, Fixed, Shape, make
from benchmarks.macro.launches import Ran, save, start
from benchmarks.macro.workload import Job, Side
from polyhop.partition import quality

__all__ = ["run"]

WIDTH, TOLD_WIDTH = 4, 128  # columns that are sent, and that bytes are told for
FACT_BYTES = 8  # of a row on the wire, beside its values
AIMS = {"k8": 1.9, "k16": 2.9, "k32": 4.9, "delta_k8": 5.5}
PLAIN = {"k1": 1, "k8": 8, "k16": 16, "k32": 32}
B_FAN_OUTS = SHAPES["B"].fan_outs


def _shape(name: str, *, is_quick: bool) -> Shape:
    """The test graph, or a 32nd of it: fewer communities, each as it was, and mini-batches smaller by as much."""
    shape = SHAPES[name]
    return shape if not is_quick else replace(shape, log_nodes=15, batch=max(1, shape.batch // 32))


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Ratios of rows, exactness of rows and messages, bytes with stored sums."""
    fixed = _made("A", is_quick=is_quick)
    drawn = draw(fixed, fixed.shape.fan_outs, (0, 1))
    other = draw(fixed, B_FAN_OUTS, (1,))
    room = two_windows(drawn.inputs, 8)
    sides = {name: Side(k, epochs=(1,)) for name, k in PLAIN.items()}
    sides |= {
        "delta_k8": Side(8, delta=True, room=room, epochs=(0, 1)),
        "delta_k1": Side(1, delta=True, room=room, epochs=(0, 1)),
        "agg_k1": Side(1, aggregated=True, epochs=(1,)),
        "agg_k8": Side(8, aggregated=True, epochs=(1,)),
        "b_k1": Side(1, fan_outs=B_FAN_OUTS, epochs=(1,)),
        "b_agg_k1": Side(1, fan_outs=B_FAN_OUTS, aggregated=True, epochs=(1,)),
    }
    with tempfile.TemporaryDirectory(prefix="polyhop-macro-") as name:
        job = Job(
            str(save(fixed, Path(name))),
            str(Path(name) / "answers"),
            fixed.shape.batch_size,
            fixed.shape.fan_outs,
            sides,
            hidden=8,
            trains=False,
            predicts=(*PLAIN, "delta_k8", "delta_k1"),
        )
        ran = start(job, fixed.shape.num_parts, "rows")
    counted = _Counted(fixed, sides, ran)
    for side in sides:
        print(f"    {side:9}{counted.told(side)}", flush=True)
    yield from _ratios(counted, drawn, room)
    yield _exact_rows(counted, drawn, other)
    yield _exact_messages(counted)
    yield _predicted(counted)
    yield from _stored(counted)
    for name, graph in (("b", other), ("c", None), ("d", None)):
        yield from _by_brute_force(name, graph, fixed, is_quick=is_quick)


def _made(name: str, *, is_quick: bool) -> Fixed:
    fixed = make(_shape(name, is_quick=is_quick), WIDTH)
    cut = quality(fixed.graph, fixed.partition).cut
    print(
        f"  {name}: {describe(fixed.graph)}; {fixed.shape.num_parts} parts, cut {cut:.3f}; {fixed.num_steps} steps of "
        f"{fixed.shape.batch} seeds a rank",
        flush=True,
    )
    return fixed


@dataclass(frozen=True)
class _Counted:
    """What the ranks' counters said of the epoch that counts."""

    fixed: Fixed
    sides: dict[str, Side]
    ran: Ran

    def rows(self, side: str) -> list[float]:
        """That each rank sent."""
        width = WIDTH * (2 if self.sides[side].aggregated else 1)
        return [
            cost.bytes.get("features", 0) / (4 * width + FACT_BYTES) for cost in self.ran.sent("sage", side)
        ]

    def total(self, side: str) -> float:
        return sum(self.rows(side))

    def bytes(self, side: str) -> float:
        """Of all ranks' rows, if they had as many columns as are told."""
        width = TOLD_WIDTH * (2 if self.sides[side].aggregated else 1)
        return self.total(side) * (4 * width + FACT_BYTES)

    def ratio(self, side: str, to: str = "k1") -> float:
        return self.total(to) / self.total(side)

    def messages(self, side: str) -> list[float]:
        """Ids and features that each rank sent."""
        return [cost.only("ids", "features").total_messages for cost in self.ran.sent("sage", side)]

    def told(self, side: str) -> str:
        each = self.total(side) / self.fixed.num_steps / self.fixed.shape.num_parts
        one = self.ran.epochs["sage"][side][0][0]
        return (
            f"{each:9,.0f} rows a mini-batch, {self.messages(side)[0]:5,.0f} messages a rank; slots {one['used']:,} of "
            f"{one['room']:,}; {one['s']:.1f} s"
        )


def _ratios(counted: _Counted, drawn: Drawn, room: int) -> Iterator[Figure]:
    graph, shape = counted.fixed.graph, counted.fixed.shape
    steps = counted.fixed.num_steps
    for side in ("k8", "k16", "k32", "delta_k8", "delta_k1"):
        each = counted.total(side) / steps / shape.num_parts
        details = (
            f"{counted.total('k1') / steps / shape.num_parts:,.0f} rows a mini-batch at k=1 (of {drawn.num_inputs:,.0f} "
            f"inputs), {each:,.0f} here; {graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {steps} steps"
        )
        if side.startswith("delta"):
            remote = graph.num_nodes - graph.num_nodes // shape.num_parts
            details += (
                f"; pool of {room:,} rows (two windows of 8), of {remote:,} remote ones; in the second epoch, rows of the "
                "first still there"
            )
        if side == "delta_k8":
            fresh = counted.total("k1") / _not_in_the_last(drawn.inputs, 8)
            details += f"; keeping the window before alone would save {fresh:.2f}x"
        yield Figure(f"rows_ratio_{side}", counted.ratio(side), "x", details, at_least=AIMS.get(side))


def _not_in_the_last(rows: Rows, k: int) -> int:
    """Rows of the last epoch's windows, all ranks, that the window before each did not read."""
    found = 0
    for rank in range(len(rows[0])):
        each = [ids for epoch in rows for ids in windows(epoch[rank], k)]
        last = len(windows(rows[-1][rank], k))
        found += sum(union(both).size - both[0].size for both in pairwise(each[-last - 1 :]))
    return found


def _exact_rows(counted: _Counted, drawn: Drawn, other: Drawn) -> Figure:
    """Rows that each rank sent, against those that the others must have asked it for."""
    worst = []
    for name, side in counted.sides.items():
        of = other if side.fan_outs else drawn
        epochs = (of.before if side.aggregated else of.inputs)[0 if side.delta or side.fan_outs else 1 :]
        expected = _sent(epochs, side, counted.fixed)
        worst += [(_apart(a, b), name) for a, b in zip(expected, counted.rows(name), strict=True)]
    ratio, name = max(worst)
    details = f"{len(counted.sides)} sides, every rank; " + ("all equal" if ratio == 1 else f"worst: {name}")
    return Figure("rows_vs_brute_force", ratio, "x", details, at_most=1.0)


def _sent(epochs: Rows, side: Side, fixed: Fixed) -> list[int]:
    """Rows that leave each rank in the last epoch."""
    bounds, found = fixed.partition.bounds.numpy(), np.zeros(fixed.shape.num_parts, np.int64)
    for rank in range(fixed.shape.num_parts):
        mine: Sequence[Sequence[Ids]] = [epoch[rank] for epoch in epochs]
        for ids in fetched(mine, side.k, fixed.graph.num_nodes, side.room)[-1]:
            found += np.diff(np.searchsorted(ids, bounds))
    return found.tolist()


def _exact_messages(counted: _Counted) -> Figure:
    """2 L (P - 1) ceil(nb / k) of each rank; with stored sums L is one less."""
    shape, steps, worst, told = counted.fixed.shape, counted.fixed.num_steps, [], []
    for name, side in counted.sides.items():
        hops = len(side.fan_outs or shape.fan_outs) - side.aggregated
        expected = 2 * hops * (shape.num_parts - 1) * -(-steps // side.k)
        told.append(f"{name} {expected}")
        worst += [(_apart(expected, found), name) for found in counted.messages(name)]
    ratio, name = max(worst)
    details = f"2 L (P - 1) ceil(nb / k) a rank, kinds ids and features: {', '.join(told)}"
    details += "" if ratio == 1 else f"; worst: {name}"
    return Figure("messages_vs_formula", ratio, "x", details, at_most=1.0)


def _predicted(counted: _Counted) -> Figure:
    """Rows of an epoch from inclusion probabilities, over those that were sent."""
    found = {}
    for name, rows in counted.ran.predicted.items():
        num_windows = counted.fixed.num_steps / counted.sides[name].k
        found[name] = rows * num_windows / counted.total(name)
    details = "predicted over measured: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
    farthest = max(_apart(ratio, 1.0) for ratio in found.values())
    return Figure(
        "rows_predicted_over_measured", farthest, "x", details + "; the farthest, either way up", at_most=1.1
    )


def _apart(a: float, b: float) -> float:
    return max(a / b, b / a) if a and b else float("inf")


def _stored(counted: _Counted) -> Iterator[Figure]:
    """Feature bytes without stored sums over those with them, and all four combinations with windows."""
    sides = ("k1", "k8", "agg_k1", "agg_k8")
    each = {
        side: counted.bytes(side) / counted.fixed.num_steps / counted.fixed.shape.num_parts / 1e6
        for side in sides
    }
    details = f"SAGE, {TOLD_WIDTH} columns, MB a mini-batch: " + ", ".join(
        f"{s} {mb:.2f}" for s, mb in each.items()
    )
    without, within = each["k1"] / each["k8"], each["agg_k1"] / each["agg_k8"]
    details += f"; windows of 8 save {without:.2f}x without stored sums, {within:.2f}x with them"
    yield Figure("agg_bytes_ratio", each["k1"] / each["agg_k1"], "x", details, at_least=2.4)
    yield Figure(
        "agg_macro_bytes_ratio", each["k1"] / each["agg_k8"], "x", "both against neither: " + details
    )
    ratio = counted.bytes("b_k1") / counted.bytes("b_agg_k1")
    yield Figure(
        "agg_bytes_ratio_2layers", ratio, "x", f"graph B: fan-outs {B_FAN_OUTS}, {TOLD_WIDTH} columns"
    )


def _by_brute_force(name: str, drawn: Drawn | None, fixed: Fixed, *, is_quick: bool) -> Iterator[Figure]:
    """Rows of the other graphs, k against 1."""
    if drawn is None:
        fixed = _made(name.upper(), is_quick=is_quick)
        drawn = draw(fixed, fixed.shape.fan_outs, (1,))
    ranks, steps = drawn.inputs[-1], fixed.num_steps
    one = sum(ids.size for rank in ranks for ids in rank)
    sizes = [k for k in (2, 4, 8, 16, 32) if k < steps] + [steps]
    found = {k: one / sum(ids.size for rank in ranks for ids in windows(rank, k)) for k in sizes}
    details = (
        f"{one / steps / len(ranks):,.0f} rows a mini-batch at k=1, of {drawn.num_inputs:,.0f} inputs, {len(ranks)} ranks; "
        + ", ".join(f"k={k} {ratio:.2f}" for k, ratio in found.items())
    )
    yield Figure(f"rows_ratio_{name}_k8", found.get(8, found[steps]), "x", "by brute force: " + details)
