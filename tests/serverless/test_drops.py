"""Which units are dropped: the same of a row wherever it is read, those of the reader's epoch, and once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("msgspec")

from polyhop import nn
from polyhop.graph import Block
from polyhop.serverless.drops import Drops
from polyhop.serverless.graph_ops import graph_op
from polyhop.serverless.intervals import Interval
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.segments import Dense, Graph, Segment

PROGRAM = Program({"x": Row((8,))}, {}, (Call("relu", ("x",), ("m1",)),), ("m1",))
DROPPED = Dense(PROGRAM, drops=0)
CHAIN: list[Segment] = [DROPPED, Graph(1, True, ("m1",), "z1"), Dense(PROGRAM)]
PLACE = 1
IDS = torch.tensor([40, 7, 12, 3, 99])


def interval() -> Interval:
    """Two rows of its own, and three that it reads of others."""
    indptr, indices = torch.tensor([0, 3, 5]), torch.tensor([1, 2, 3, 0, 4]).int()
    return Interval(
        0,
        0,
        2,
        Block(indptr, indices, 5, src_ids=IDS),
        torch.arange(5),
        torch.zeros(5).long(),
        (0,),
        (),
        {},
        {},
    )


def drops(rate: float = 0.5, may_be_old: bool = True, conv: type = nn.GCNConv) -> Drops:
    chain, layer = CHAIN, conv(8, 8)
    if conv is nn.GATConv:
        chain = [DROPPED, Graph(1, True, ("m1", "src1", "dst1"), "z1"), Dense(PROGRAM)]
    segment = chain[PLACE]
    assert isinstance(segment, Graph)
    return Drops(chain, {PLACE: graph_op(layer, segment)}, 3, rate, may_be_old)


def test_at_read_only_where_a_sum_may_read_old_rows() -> None:
    assert drops().at_read(PLACE)
    assert not drops(may_be_old=False).at_read(PLACE)
    assert not drops(rate=0.0).at_read(PLACE)
    assert not drops(conv=nn.GATConv).at_read(PLACE)
    assert not drops().at_read(len(CHAIN))  # no graph operation
    assert drops(may_be_old=False).of_sources(interval(), PLACE, 0) is None


def test_a_reader_drops_what_the_owner_would_have_dropped() -> None:
    made, where, rows = drops(), interval(), torch.ones(5, 8)
    for epoch in (0, 1):
        drop = made.of_sources(where, PLACE, epoch)
        assert drop is not None
        read = drop(rows)
        assert torch.equal(read[:2], made.after(DROPPED, where, epoch, rows[:2]))
        assert set(read.unique().tolist()) == {0.0, 2.0}
    first, second = (made.after(DROPPED, where, epoch, rows[:2]) for epoch in (0, 1))
    assert not torch.equal(first, second)


def test_nothing_is_dropped_where_nothing_is_to_be() -> None:
    rows = torch.ones(2, 8)
    assert drops().after(Dense(PROGRAM), interval(), 0, rows) is rows
    assert drops(rate=0.0).after(DROPPED, interval(), 0, rows) is rows
