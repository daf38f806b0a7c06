"""What every layer must satisfy, written once and run over all of them; and edges given as PyG gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import GraphError, InputError, KernelError
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.pooled import PooledRows
from polyhop.kernels import Key, native
from polyhop.nn import MLP, GATConv, GCN2Conv, GCNConv, GINConv, SAGEConv, as_block, wrap
from polyhop.nn.layer import Layer, cheaper_to_map_first, draw_key

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

NATIVE = {
    "gcn": lambda: GCNConv(7, 5),
    "gcn without loops": lambda: GCNConv(7, 5, add_self_loops=False),
    "gcn plain": lambda: GCNConv(7, 5, normalize=False),
    "sage mean": lambda: SAGEConv(7, 5),
    "sage sum": lambda: SAGEConv(7, 5, aggr="sum", normalize=True),
    "sage max": lambda: SAGEConv(7, 5, aggr="max"),
    "sage project": lambda: SAGEConv(7, 5, project=True),
    "sage no root": lambda: SAGEConv(7, 5, root_weight=False),
    "gat": lambda: GATConv(7, 5, heads=2, residual=True),
    "gat without loops": lambda: GATConv(7, 5, add_self_loops=False),
    "gin": lambda: GINConv(MLP([7, 3, 5], norm=None), eps=0.2),
    "gin trained eps": lambda: GINConv(nn.Sequential(nn.Linear(7, 5), nn.Tanh()), eps=0.2, train_eps=True),
    "gcn2": lambda: GCN2Conv(7, 0.3, 0.5, 2),
    "gcn2 two weights": lambda: GCN2Conv(7, 0.3, 0.5, 2, shared_weights=False),
}
WRAPPED = {
    "pyg sage": lambda: wrap(pyg.SAGEConv(7, 5)),
    "pyg gatv2": lambda: wrap(pyg.GATv2Conv(7, 5, heads=2)),
    "pyg transformer": lambda: wrap(pyg.TransformerConv(7, 5)),
    "pyg square": lambda: wrap(pyg.SAGEConv(7, 5), bipartite=False),
}
SPARSE = [name for name in NATIVE if name not in ("sage max", "gcn2", "gcn2 two weights")]


def call(layer: Layer, x, edges: Block | torch.Tensor, x_0: torch.Tensor, **kwargs):
    return layer(x, edges, carried=x_0, **kwargs) if layer.takes_carried else layer(x, edges, **kwargs)


@pytest.mark.parametrize("name", [*NATIVE, *WRAPPED])
def test_permutation_equivariant(name, loops, tiny_weights) -> None:
    layer = tiny_weights({**NATIVE, **WRAPPED}[name]())
    order = torch.randperm(loops.num_nodes, generator=torch.Generator().manual_seed(2))
    place = torch.argsort(order)
    x_0 = loops.x.flip(0)
    out = call(layer, loops.x, loops.edge_index, x_0)
    moved = call(layer, loops.x[order], place[loops.edge_index], x_0[order])
    torch.testing.assert_close(moved, out[order], **CLOSE)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", [*NATIVE, *WRAPPED])
def test_part_with_all_edges_equals_the_slice_of_the_whole(
    name, first, sample, cut_block, tiny_weights, assert_same
) -> None:
    layer = tiny_weights({**NATIVE, **WRAPPED}[name]())
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(sample, wanted, first=first)
    assert block.dst_start == first
    x_0 = sample.x.flip(0)
    assert_same(
        layer,
        layer,
        lambda x: call(layer, x[block.src_ids], block, x_0[wanted]),
        lambda x: call(layer, x, sample.edge_index, x_0)[wanted],
        [sample.x],
    )


@pytest.mark.parametrize("name", [*NATIVE, *WRAPPED])
def test_pool_equals_gathered_rows(name, loops, cut_block, some_edges, tiny_weights, assert_same) -> None:
    layer = tiny_weights({**NATIVE, **WRAPPED}[name]())
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(loops, wanted, keep=some_edges(loops), first=2)
    in_pool = replace(block, rows=block.src_ids)
    x_0 = loops.x.flip(0)[wanted]
    assert_same(
        layer,
        layer,
        lambda pool: call(layer, pool, in_pool, x_0),
        lambda pool: call(layer, pool[block.src_ids], block, x_0),
        [loops.x],
    )


def _value_and_gradients(layer: nn.Module, out: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (out * probe.to(out.dtype)).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def _assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """To the bit."""
    assert len(ours) == len(theirs) > 1
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("order", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", [*NATIVE, *WRAPPED])
def test_rows_in_two_places_give_the_bits_of_gathered_rows(
    name, dtype, order, loops, cut_block, some_edges, tiny_weights, monkeypatch
) -> None:
    layer = tiny_weights({**NATIVE, **WRAPPED}[name]()).to(dtype)
    if order is not None and layer.has_pieces and not name.startswith(("gat", "gcn2", "sage project")):
        monkeypatch.setattr(layer, "map_first", lambda *_: order)
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(loops, wanted, keep=some_edges(loops))
    in_pool, x = replace(block, rows=block.src_ids), loops.x.to(dtype)
    x_0 = x.flip(0)[wanted]
    expected = _value_and_gradients(layer, call(layer, x[block.src_ids], block, x_0))
    _assert_equal(_value_and_gradients(layer, call(layer, x, in_pool, x_0)), expected)
    for cut in (0, 9, loops.num_nodes):
        pooled = PooledRows(x[:cut].clone(), x[cut:].clone())
        _assert_equal(_value_and_gradients(layer, call(layer, pooled, in_pool, x_0)), expected)


@pytest.mark.parametrize("name", [*NATIVE, *WRAPPED])
def test_rows_in_two_places_under_autocast(name, loops, cut_block, some_edges, tiny_weights) -> None:
    layer = tiny_weights({**NATIVE, **WRAPPED}[name]()).float()
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(loops, wanted, keep=some_edges(loops))
    x = loops.x.float()
    pooled, x_0 = PooledRows(x[:9], x[9:]), x.flip(0)[wanted]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = call(layer, x[block.src_ids], block, x_0)
        out = call(layer, pooled, replace(block, rows=block.src_ids), x_0)
    _assert_equal(_value_and_gradients(layer, out), _value_and_gradients(layer, expected))


@pytest.mark.parametrize("name", [name for name in NATIVE if not name.startswith(("gin", "gcn2"))])
def test_bfloat16_rows_in_two_places(name, loops, cut_block, some_edges, tiny_weights) -> None:
    """As a pool of one matrix: gathered as float32, aggregated as they are (GIN and GCN2 want the weights' dtype)."""
    layer = tiny_weights(NATIVE[name]()).float()
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(loops, wanted, keep=some_edges(loops))
    in_pool, x = replace(block, rows=block.src_ids), loops.x.to(torch.bfloat16)
    x_0 = loops.x.float().flip(0)[wanted]
    expected = _value_and_gradients(layer, call(layer, x, in_pool, x_0))
    pooled = PooledRows(x[:9], x[9:])
    _assert_equal(_value_and_gradients(layer, call(layer, pooled, in_pool, x_0)), expected)


@pytest.mark.parametrize("name", [*NATIVE, "pyg sage"])
def test_a_block_of_nothing_from_two_places(name, loops, tiny_weights) -> None:
    layer = tiny_weights({**NATIVE, **WRAPPED}[name]())
    none = torch.empty(0, dtype=torch.int64)
    empty = {"in_degree": none.int(), "src_ids": none, "rows": none}
    block = Block(torch.zeros(1, dtype=torch.int64), none.int(), 0, is_sampled=True, **empty)
    for cut in (0, 9, 24):
        pooled = PooledRows(loops.x[:cut], loops.x[cut:])
        out = call(layer, pooled, block, loops.x[:0])
        assert out.shape[0] == 0
        out.sum().backward()


@pytest.mark.parametrize("name", NATIVE)
def test_aggregating_first_gathers_no_more_than_own_rows(
    name, loops, cut_block, tiny_weights, monkeypatch
) -> None:
    layer = tiny_weights(NATIVE[name]())
    wanted = torch.tensor([6, 1, 9, 0])
    block = cut_block(loops, wanted)
    gather, counts = PooledRows.gather, []
    monkeypatch.setattr(
        PooledRows, "gather", lambda self, ids: counts.append(ids.numel()) or gather(self, ids)
    )
    monkeypatch.setattr(PooledRows, "all", lambda _: pytest.fail("all rows were copied"))
    if not name.startswith(("gat", "gcn2", "sage project")):
        monkeypatch.setattr(layer, "map_first", lambda *_: False)
    pooled = PooledRows(loops.x[:9], loops.x[9:])
    call(layer, pooled, replace(block, rows=block.src_ids), loops.x.flip(0)[wanted])
    if name.startswith(("gat", "sage project")):  # every source is mapped
        assert counts == [block.num_src]
    elif name == "sage max":  # a row per edge
        assert counts == [4, block.num_edges]
    else:
        assert counts in ([], [4])


def test_a_layer_that_does_not_know_two_places_gets_gathered_rows(loops, cut_block) -> None:
    class Doubled(GCNConv):
        reads_pooled = False

        def transform(self, h, map_first):
            return super().transform(h * 2, map_first)

    conv = Doubled(7, 5).double()
    block = cut_block(loops, torch.tensor([6, 1, 9]))
    pooled = PooledRows(loops.x[:9], loops.x[9:])
    out = conv(pooled, replace(block, rows=block.src_ids))
    assert torch.equal(out, conv(loops.x[block.src_ids], block))


def test_rows_out_of_range_of_two_places(loops, cut_block, monkeypatch) -> None:
    block = cut_block(loops, torch.tensor([6, 1, 9]))
    wrong = replace(block, rows=block.src_ids + 20)
    pooled = PooledRows(loops.x[:9], loops.x[9:])
    conv = GATConv(7, 5).double()  # gathers, which is always checked
    with pytest.raises(InputError, match="outside the 24 stored rows"):
        conv(pooled, wrong)
    monkeypatch.setenv("POLYHOP_DEBUG", "1")  # what is read in place is checked when asked to
    in_place = GCNConv(7, 5, add_self_loops=False).double()
    monkeypatch.setattr(in_place, "map_first", lambda *_: False)
    with pytest.raises(KernelError, match=r"spmm: rows\[0\] = 26, outside 0 \.\. 23"):
        in_place(pooled, wrong)


@pytest.mark.parametrize("name", NATIVE)
def test_both_orders_are_equal(
    name, loops, cut_block, some_edges, tiny_weights, assert_same, monkeypatch
) -> None:
    layer = tiny_weights(NATIVE[name]())
    block = cut_block(loops, torch.tensor([6, 1, 9, 0]), keep=some_edges(loops), first=2)
    x_0 = loops.x.flip(0)[:4]
    asked = []

    def run(first: bool):
        def ordered(x: torch.Tensor) -> torch.Tensor:
            if not name.startswith(("gat", "gcn2")):  # one order only
                monkeypatch.setattr(layer, "map_first", lambda *_: asked.append(first) or first)
            return call(layer, x, block, x_0)

        return ordered

    assert_same(layer, layer, run(True), run(False), [loops.x[block.src_ids]])
    assert asked in ([True, False], [])


@pytest.mark.parametrize("name", NATIVE)
def test_pieces_compose_to_forward(name, loops, cut_block, tiny_weights) -> None:
    layer = tiny_weights(NATIVE[name]())
    block = cut_block(loops, torch.tensor([6, 1, 9, 0]), first=2)
    h, x_0 = loops.x[block.src_ids], loops.x.flip(0)[:4]
    first = layer.map_first(block, input_grad=True)
    m = layer.transform(h, first)
    z = layer.aggregate(block, m, layer.edge(block, m))
    kept = z.clone()
    out = layer.update(z, block.dst_rows(h), x_0, first)
    torch.testing.assert_close(z, kept, rtol=0, atol=0)  # pure: what was aggregated may be reused
    torch.testing.assert_close(out, call(layer, h.requires_grad_(), block, x_0), rtol=0, atol=0)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_rows_equal_dense_rows(name, loops, cut_block, tiny_weights, assert_same) -> None:
    layer = tiny_weights(NATIVE[name]())
    block = cut_block(loops, torch.tensor([6, 1, 9, 0]), first=2)
    dense = torch.where(loops.x > 0.5, loops.x, 0.0)[block.src_ids]
    csr = dense.to_sparse_csr()
    rows = SparseRows(csr.crow_indices(), csr.col_indices().int(), csr.values(), 7)
    assert_same(layer, layer, lambda: layer(rows, block), lambda: layer(dense, block), [])


def test_sparse_rows_are_never_made_dense(loops, monkeypatch) -> None:
    uses_native = native.status()["cpu"] == "native"
    rows = loops.x.to_sparse_csr()
    sparse = SparseRows(rows.crow_indices(), rows.col_indices(), rows.values(), 7)
    monkeypatch.setattr(SparseRows, "dense", lambda _: pytest.fail("made dense"))
    for name in SPARSE:
        NATIVE[name]().double()(sparse, loops.edge_index).sum().backward()
    assert ("t" in sparse._cache) == uses_native  # the transposed rows are kept for the next step


@pytest.mark.parametrize("name", NATIVE)
def test_autocast_gives_bfloat16_close_to_float32(name, loops) -> None:
    torch.manual_seed(0)
    layer = NATIVE[name]().float()
    x = loops.x.float().requires_grad_()
    x_0 = loops.x.float().flip(0)
    full = call(layer, x, loops.edge_index, x_0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = call(layer, x, loops.edge_index, x_0)
        for order in (True, False):
            if hasattr(layer, "lin_l") or isinstance(layer, GCNConv):
                layer.map_first = lambda *_, order=order: order
                torch.testing.assert_close(
                    call(layer, x, loops.edge_index, x_0).float(), full, rtol=0.1, atol=0.1
                )
    assert half.dtype in (torch.bfloat16, torch.float32)
    half.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    torch.testing.assert_close(half.float(), full, rtol=0.1, atol=0.1)  # bfloat16 has 8 bits


def test_bfloat16_pool_under_float32_weights(loops) -> None:
    conv = SAGEConv(7, 5)
    out = conv(loops.x.to(torch.bfloat16), loops.edge_index)
    torch.testing.assert_close(out, conv(loops.x.float(), loops.edge_index), rtol=0.05, atol=0.05)


def test_first_layer_without_input_gradient_runs_no_backward_aggregation(loops, monkeypatch) -> None:
    """The transposed edges are asked for by a backward aggregation and by nothing else."""
    conv = SAGEConv(7, 5).double()
    block = as_block(loops.edge_index, loops.num_nodes)
    monkeypatch.setattr(type(block), "transposed", lambda _: pytest.fail("backward aggregation"))
    conv(loops.x, block).sum().backward()
    assert conv.lin_l.weight.grad is not None


def _sizes(num_src: int, num_dst: int, num_edges: int) -> Block:
    counts = torch.full((num_dst,), num_edges // num_dst)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Block(indptr, torch.zeros(int(indptr[-1]), dtype=torch.int32), num_src)


@pytest.mark.parametrize(
    ("sizes", "width_in", "width_out", "input_grad", "expected"),
    [
        ((1000, 1000, 20000), 256, 47, True, True),  # full graph, narrowing: aggregate the narrow side
        ((1000, 1000, 20000), 47, 256, True, False),  # widening
        ((1000, 1000, 20000), 256, 256, True, False),  # equal: aggregate first, fewer rows to keep
        ((1000, 1000, 20000), 256, 160, False, False),  # no input gradient: one aggregation instead of two
        ((1000, 1000, 20000), 256, 100, False, True),  # unless the output is less than half as wide
        (
            (10000, 1000, 15000),
            256,
            47,
            True,
            False,
        ),  # sampled: multiplying all sources costs more than it saves
    ],
)
def test_cheaper_order(sizes, width_in, width_out, input_grad, expected) -> None:
    block = _sizes(*sizes)
    assert cheaper_to_map_first(block, width_in, width_out, input_grad) is expected
    pooled = replace(
        block, rows=torch.zeros(block.num_src, dtype=torch.int64)
    )  # where rows lie changes nothing
    assert cheaper_to_map_first(pooled, width_in, width_out, input_grad) is expected


def test_edges_keep_the_users_order_within_a_destination() -> None:
    edges = torch.tensor([[3, 1, 2, 0, 2], [1, 0, 1, 1, 2]])
    weight = torch.tensor([0.3, 0.1, 0.2, 0.0, 0.7])
    block = as_block(edges, 4, weight)
    assert block.indptr.tolist() == [0, 1, 4, 5, 5]
    assert block.indices.tolist() == [1, 3, 2, 0, 2]
    assert block.edge_weight is not None
    torch.testing.assert_close(block.edge_weight, torch.tensor([0.1, 0.3, 0.2, 0.0, 0.7]))
    assert block.loop_weight is not None
    torch.testing.assert_close(block.loop_weight, torch.tensor([0.0, 0.0, 0.7, 0.0]))
    assert as_block(block, 4) is block


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), r"\[2, E\], got \[3, 4\]"),
        (torch.zeros(2, 4), "integer tensor"),
        ([[0], [1]], "got list"),
        (torch.tensor([[0], [9]]), r"span 0\.\.9, x has rows 0\.\.3"),
        (torch.tensor([[-1], [1]]), r"span -1\.\.1"),
    ],
)
def test_bad_edges(edges, message) -> None:
    with pytest.raises(GraphError, match=message):
        SAGEConv(7, 5)(torch.zeros(4, 7), edges)


def test_bad_rows_and_weights(loops) -> None:
    conv = GCNConv(7, 5).double()
    block = as_block(loops.edge_index, loops.num_nodes)
    with pytest.raises(InputError, match="expected rows of 7 columns, got 6"):
        conv(loops.x[:, :6], block)
    with pytest.raises(InputError, match="24 source rows, x has 23"):
        conv(loops.x[:-1], block)
    with pytest.raises(InputError, match="carries its own weights"):
        conv(loops.x, block, loops.weight)
    with pytest.raises(GraphError, match="edge_weight: expected"):
        conv(loops.x, loops.edge_index, loops.weight[:-1])


def test_base_layer_has_no_pieces(loops) -> None:
    layer, block = Layer(), as_block(loops.edge_index, loops.num_nodes)
    assert layer.edge(block, loops.x) is None
    for piece in (lambda: layer.transform(loops.x, True), lambda: layer.aggregate(block, loops.x, None)):
        with pytest.raises(NotImplementedError):
            piece()
    with pytest.raises(NotImplementedError):
        layer.update(loops.x, None, None, False)


def test_a_drawn_key_follows_torchs_seed() -> None:
    given = Key(3, 1, 2)
    assert draw_key(given) is given
    torch.manual_seed(1)
    one = draw_key(None)
    assert one != draw_key(None)
    torch.manual_seed(1)
    assert draw_key(None) == one
