"""What every layer must satisfy, written once and run over all of them; and edges given as PyG gives them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import GraphError, InputError
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
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
    assert cheaper_to_map_first(_sizes(*sizes), width_in, width_out, input_grad) is expected


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
