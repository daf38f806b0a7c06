"""What a graph server of strategy ``serverless`` sends and gets in an epoch, from its chain and its intervals alone.

    tasks     rows (and labels) of every dense piece, forward and backward; gradients of what it gave; what forward saved,
              where it is not computed again. Where functions compute attention weights: edges and scores of an interval,
              each time, and gradients of the weights
    results   what dense pieces give; gradients of their rows and of their weights. Attention weights, gradients of scores
    rows      rows that other servers read (SC)
    sums      gradients of rows of other servers

Weights go to a function once for each piece and version; how often depends on who asks, so they are counted, not accounted.
With faults tasks are sent again: counters are then above these figures, never below. Large tasks go in several messages,
of the same bytes (``stream``).

Legend: n rows of an interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyhop.comm import Cost
from polyhop.serverless.edge_tasks import EdgeAttention
from polyhop.serverless.graph_ops import GraphOp
from polyhop.serverless.intervals import Interval
from polyhop.serverless.segments import Dense, Graph, Segment
from polyhop.serverless.stream import num_messages
from polyhop.serverless.tasks import flat

__all__ = ["Mode", "account"]


@dataclass(frozen=True)
class Mode:
    """Options of a server that decide what travels."""

    fuses: bool = True
    remakes: bool = True
    streams: bool = True
    value_bytes: int = 4


def account(
    chain: Sequence[Segment],
    ops: Mapping[int, GraphOp],
    intervals: Sequence[Interval],
    fixed: Mapping[int, Mapping[str, Any]],
    mode: Mode,
) -> Cost:
    """Bytes and messages of one epoch without faults. ``fixed``: rows that no epoch changes, of each interval."""
    total = Cost()
    for interval in intervals:
        for place, segment in enumerate(chain):
            if isinstance(segment, Graph):
                total += _crossing(segment, ops[place], chain[place - 1], interval, mode)
            elif not segment.stays:
                total += _dense(
                    segment, interval.num_rows, fixed[interval.number], mode, place == len(chain) - 1
                )
    return total


def _crossing(segment: Graph, op: GraphOp, before: Segment, interval: Interval, mode: Mode) -> Cost:
    if not segment.has_gradient:
        return Cost()
    assert isinstance(before, Dense)
    row = mode.value_bytes * sum(math.prod(before.program.shapes[name]) for name in op.of_sources)
    lent, back = (sum(rows.numel() for rows in each.values()) for each in (interval.lent, interval.back))
    found = {"rows": row * lent, "sums": row * back}
    messages = {"rows": len(interval.lent), "sums": len(interval.back)}
    if isinstance(op, EdgeAttention):
        sent, got = op.task_bytes(interval, mode.value_bytes, mode.remakes)
        found |= {"tasks": sum(sent), "results": sum(got)}
        messages |= {"tasks": len(sent), "results": len(got)}
    return Cost(
        {kind: size for kind, size in found.items() if size},
        {kind: count for kind, count in messages.items() if count},
    )


def _dense(segment: Dense, n: int, fixed: Mapping[str, Any], mode: Mode, is_last: bool) -> Cost:
    program, size = segment.program, mode.value_bytes

    def of(name: str) -> int:
        if name in fixed:
            value = fixed[name]
            return sum(np.asarray(each).nbytes for each in flat({name: value}).values())
        return size * n * math.prod(program.shapes[name])

    rows = sum(map(of, program.rows))
    gradients = size * (
        sum(math.prod(shape) for shape in program.weights.values())
        + n * sum(math.prod(row.shape) for row in program.rows.values() if row.has_gradient)
    )
    saved = 0 if mode.remakes else size * n * sum(map(math.prod, program.saved_widths.values()))
    if is_last and mode.fuses:
        return _tasks(n, mode, [rows], [gradients])
    given = sum(
        size * n * math.prod(program.shapes[name]) for name in program.outputs if name not in program.sums
    )
    moving = sum(
        size * n * math.prod(program.shapes[name])
        for name in program.outputs
        if name in program.moving and name not in program.sums
    )
    return _tasks(n, mode, [rows, rows + saved + moving], [given + saved, gradients])


def _tasks(n: int, mode: Mode, sent: Sequence[int], got: Sequence[int]) -> Cost:
    """Of tasks of n rows, by the bytes of each and of its result."""
    messages = sum(num_messages(n, size) if mode.streams else 1 for size in sent)
    return Cost({"tasks": sum(sent), "results": sum(got)}, {"tasks": messages, "results": len(got)})
