"""Attention with its weights computed apart, as functions do: the numbers of the fused kernel, forward and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")

from polyhop.graph import Block
from polyhop.kernels.keys import Key
from polyhop.nn import GATConv
from polyhop.serverless.edge_tasks import EdgeAttention
from polyhop.serverless.graph_ops import Attention, Sum, graph_op
from polyhop.serverless.intervals import Interval
from polyhop.serverless.segments import Graph
from polyhop.serverless.tables import Reading
from polyhop.serverless.tasks import run_task

NUM_DST, NUM_SRC = 13, 20
SEGMENT = Graph(1, True, ("m1", "src1", "dst1"), "z1")


def interval() -> Interval:
    """Edges with repeats, stored loops, and destinations without any; rows of a table of 30 that it reads."""
    gen = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 7, (NUM_DST,), generator=gen)
    counts[3] = 0
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = torch.randint(0, NUM_SRC, (int(indptr[-1]),), generator=gen).int()
    indices[indptr[:-1][counts > 0]] = torch.arange(NUM_DST)[counts > 0].int()  # a loop each
    block = Block(indptr, indices, NUM_SRC, src_ids=torch.randperm(1000, generator=gen)[:NUM_SRC])
    sources = torch.randperm(30, generator=gen)[:NUM_SRC]
    return Interval(0, 0, NUM_DST, block, sources, torch.zeros(NUM_SRC, dtype=torch.int64), (0,), (), {}, {})


def both_ways(layer: GATConv, dtype: torch.dtype, remakes: bool = True) -> Any:
    """(what the fused kernel gives, what tasks give): rows, and gradients of all that was read."""
    where, gen = interval(), torch.Generator().manual_seed(1)
    widths = {"m1": layer.heads * layer.out_channels, "src1": layer.heads}
    table = {name: torch.randn(30, width, generator=gen).to(dtype) for name, width in widths.items()}
    own = {"dst1": torch.randn(NUM_DST, layer.heads, generator=gen).to(dtype)}
    grad = torch.randn(NUM_DST, widths["m1"], generator=gen).to(dtype)
    key = Key(3, 4)
    fused, apart = graph_op(layer, SEGMENT), graph_op(layer, SEGMENT, True)
    assert isinstance(fused, Attention)
    assert isinstance(apart, EdgeAttention)
    reading = Reading(table, where.sources)
    z, kept = fused.gather(where, reading, own, key)
    expected = z, *fused.give_back(where, kept, grad)
    edges = apart.read(reading, own)
    for rows in table.values():
        rows.fill_(7.0)  # the next epoch's, before the weights are there
    task = apart.task(where, edges)
    weights = run_task(apart.program, False, task, {})[0]["weights"]
    sizes = apart.task_bytes(where, dtype.itemsize, remakes)
    assert [sizes[0][0], sizes[1][0]] == [sum(each.nbytes for each in task.values()), weights.nbytes]
    edges.weights = torch.from_numpy(weights)
    found = apart.gather(where, edges, key)
    task = apart.back_task(where, edges, apart.give_back(where, edges, grad), remakes)
    scores = run_task(apart.program, True, task, {}, apart.wants)[0]
    assert sizes[0][1] == sum(each.nbytes for each in task.values())
    assert sizes[1][1] == sum(each.nbytes for each in scores.values())
    src, dst = (torch.from_numpy(scores[f"g:{name}"]) for name in apart.wants)
    return expected, (found, *apart.ended(edges, src, dst))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("self_loop", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 9])
def test_the_numbers_of_the_fused_kernel(heads: int, self_loop: bool, dropout: float) -> None:
    torch.manual_seed(0)
    layer = (
        GATConv(5, 4, heads, dropout=dropout, add_self_loops=self_loop, negative_slope=0.3).double().train()
    )
    for remakes in (True, False):
        expected, found = both_ways(layer, torch.float64, remakes)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_attention_dropout_is_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another key the weights differ: the test above can fail."""
    layer = GATConv(5, 4, 2, dropout=0.5).double().train()
    fused = both_ways(layer, torch.float64)[0]
    monkeypatch.setattr(EdgeAttention, "gather", _with_another_key(EdgeAttention.gather))
    assert not torch.allclose(both_ways(layer, torch.float64)[1][0], fused[0])


def _with_another_key(real: Any) -> Any:
    return lambda self, where, edges, key: real(self, where, edges, Key(3, 5))


def test_floats_and_many_edges_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyhop.serverless import edge_tasks

    layer = GATConv(5, 4, 2, dropout=0.2).train()
    _, whole = both_ways(layer, torch.float32)
    monkeypatch.setattr(edge_tasks, "_AT_ONCE", 1)
    expected, found = both_ways(layer, torch.float32)
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_other_layers_have_no_weights_to_compute() -> None:
    from polyhop.nn import GCNConv

    assert isinstance(graph_op(GCNConv(3, 3), Graph(0, True, ("m0",), "z0"), True), Sum)
