"""What every model must satisfy: in one pass or layer by layer, on blocks, with keyed dropout and sparse input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import GraphError, InputError
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.pooled import PooledRows
from polyhop.kernels import Key
from polyhop.nn import GAT, GCN, GCNII, GIN, DeepGCN, GATConv, GraphSAGE, Model, SAGEConv, Stack, as_block
from polyhop.nn.model import act_and_drop, drop_rows, rows_of

CLOSE = {"rtol": 1e-10, "atol": 1e-10}

MODELS = {
    "GCN": lambda p: GCN(7, 8, 3, 4, dropout=p),
    "GraphSAGE": lambda p: GraphSAGE(7, 8, 3, 4, dropout=p),
    "GraphSAGE jk": lambda p: GraphSAGE(7, 8, 3, 4, dropout=p, jk="cat", act="elu"),
    "GAT": lambda p: GAT(7, 8, 3, 4, dropout=p, heads=2),
    "GIN": lambda p: GIN(7, 8, 3, 4, dropout=p),
    "GIN norm": lambda p: GIN(
        7, 8, 3, 4, dropout=p, norm="layer", norm_kwargs={"mode": "node"}, act_first=True
    ),
    "GCNII": lambda p: GCNII(7, 8, 3, 4, dropout=p),
    "DeepGCN": lambda p: DeepGCN(7, 8, 3, 4, dropout=p),
    "Stack": lambda p: Stack([SAGEConv(7, 8), GATConv(8, 4, heads=2, dropout=p), SAGEConv(8, 4)], dropout=p),
}


@pytest.fixture(params=MODELS)
def make(request: pytest.FixtureRequest, tiny_weights):
    return lambda p=0.0: tiny_weights(MODELS[request.param](p))


def ids_of(blocks: list[Block]) -> torch.Tensor:
    assert blocks[0].src_ids is not None
    return blocks[0].src_ids


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_blocks_with_all_edges_give_the_rows_of_the_whole_graph(
    make, p, loops, all_hops, assert_same
) -> None:
    """In training too: a node's rows drop the same units whoever else is in the block."""
    model = make(p).train()
    seeds = torch.tensor([9, 2, 17, 4])
    blocks = all_hops(loops, seeds, 3)
    key = Key(11, 2, 5)
    assert_same(
        model,
        model,
        lambda x: model(x[ids_of(blocks)], blocks, key=key),
        lambda x: model(x, loops.edge_index, key=key)[seeds],
        [loops.x],
    )


def test_dropout_follows_the_key(make, loops) -> None:
    model = make(0.5).train()
    one = model(loops.x, loops.edge_index, key=Key(1))
    torch.testing.assert_close(one, model(loops.x, loops.edge_index, key=Key(1)), rtol=0, atol=0)
    assert not torch.allclose(one, model(loops.x, loops.edge_index, key=Key(1, 1)))
    assert not torch.allclose(one, model(loops.x, loops.edge_index, key=Key(2)))
    torch.manual_seed(3)
    drawn = model(loops.x, loops.edge_index)
    torch.manual_seed(3)
    torch.testing.assert_close(drawn, model(loops.x, loops.edge_index), rtol=0, atol=0)
    assert not torch.allclose(drawn, model(loops.x, loops.edge_index))
    model.eval()
    torch.testing.assert_close(
        model(loops.x, loops.edge_index, key=Key(1)), model(loops.x, loops.edge_index), rtol=0, atol=0
    )
    assert not torch.allclose(one, model(loops.x, loops.edge_index))


def test_layer_by_layer_over_chunks_equals_forward(make, loops, cut_block) -> None:
    model = make(0.5).eval()
    n = loops.num_nodes
    chunks = [torch.arange(0, 10), torch.arange(10, 11), torch.arange(11, n)]
    state = _joined([model.begin(loops.x[c]) for c in chunks])
    for i in range(model.num_layers):
        parts = []
        for chunk in chunks:
            block = cut_block(loops, chunk)
            parts.append(model.layer(i, block, {name: value[block.src_ids] for name, value in state.items()}))
        state = _joined(parts)
    out = torch.cat([model.finish({name: value[c] for name, value in state.items()}) for c in chunks])
    torch.testing.assert_close(out, model(loops.x, loops.edge_index), **CLOSE)


def _joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_begin_layers_finish_compose_to_forward(make, loops) -> None:
    model, key = make(0.5).train(), Key(4)
    block = as_block(loops.edge_index, loops.num_nodes)
    state = model.begin(loops.x, key=key)
    for i in range(model.num_layers):
        state = model.layer(i, block, state, key=key)
    torch.testing.assert_close(model.finish(state, key=key), model(loops.x, block, key=key), rtol=0, atol=0)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_sparse_input_equals_dense_input(make, p, loops, all_hops, assert_same, monkeypatch) -> None:
    model, key = make(p).train(), Key(4)
    blocks = all_hops(loops, torch.tensor([9, 2, 17, 4]), 3)
    dense = torch.where(loops.x > 0.3, loops.x, 0.0)[ids_of(blocks)]
    csr = dense.to_sparse_csr()
    sparse = SparseRows(csr.crow_indices(), csr.col_indices().int(), csr.values(), 7, ids_of(blocks))
    monkeypatch.setattr(SparseRows, "dense", lambda _: pytest.fail("made dense"))
    assert_same(
        model, model, lambda: model(sparse, blocks, key=key), lambda: model(dense, blocks, key=key), []
    )


def test_pool_equals_gathered_rows(make, loops, all_hops, assert_same) -> None:
    model, key = make(0.5).train(), Key(4)
    blocks = all_hops(loops, torch.tensor([9, 2]), 3)
    ids = ids_of(blocks)
    in_pool = [replace(blocks[0], rows=ids), *blocks[1:]]
    assert_same(
        model,
        model,
        lambda pool: model(pool, in_pool, key=key),
        lambda pool: model(pool[ids], blocks, key=key),
        [loops.x],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_in_two_places_give_the_bits_of_gathered_rows(make, loops, all_hops, dtype) -> None:
    model, key = make(0.5).to(dtype).train(), Key(4)
    blocks = all_hops(loops, torch.tensor([9, 2]), 3)
    ids, x = ids_of(blocks), loops.x.to(dtype)
    in_pool = [replace(blocks[0], rows=ids), *blocks[1:]]
    results = []
    for given, listed in [
        (x[ids], blocks),
        *((PooledRows(x[:cut].clone(), x[cut:].clone()), in_pool) for cut in (0, 9, loops.num_nodes)),
    ]:
        model.zero_grad()
        out = model(given, listed, key=key)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    expected = results[0]
    assert len(expected) > 2
    for got in results[1:]:
        assert len(got) == len(expected)
        assert all(torch.equal(mine, other) for mine, other in zip(got, expected, strict=True))


def test_wrapped_layers_in_a_stack_get_gathered_rows(loops, all_hops) -> None:
    model = Stack([pyg.SAGEConv(7, 8), pyg.SAGEConv(8, 4)]).double()
    blocks = all_hops(loops, torch.tensor([9, 2]), 2)
    in_pool = [replace(blocks[0], rows=ids_of(blocks)), *blocks[1:]]
    out = model(PooledRows(loops.x[:9], loops.x[9:]), in_pool)
    assert torch.equal(out, model(loops.x[ids_of(blocks)], blocks))


def test_a_model_that_takes_no_pool_gets_gathered_rows(loops, all_hops) -> None:
    class Scaled(Model):
        num_layers = 1

        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(7, 4)

        def layer(self, i, block, state, *, key=None):
            return {"h": self.conv(2 * rows_of(state), block)}

    model = Scaled().double()
    (block,) = all_hops(loops, torch.tensor([9, 2]), 1)
    expected = model(loops.x[block.src_ids], [block])
    in_pool = [replace(block, rows=block.src_ids)]
    for pool in (loops.x, PooledRows(loops.x[:9], loops.x[9:])):
        assert torch.equal(model(pool, in_pool), expected)


def test_pool_of_the_whole_graph_is_read_by_the_first_layer_only(make, loops) -> None:
    model = make().eval()
    order = torch.randperm(loops.num_nodes, generator=torch.Generator().manual_seed(1))
    block = replace(as_block(loops.edge_index, loops.num_nodes), rows=torch.argsort(order))
    out = model(loops.x[order], block)
    torch.testing.assert_close(out, model(loops.x, loops.edge_index), **CLOSE)


def test_autocast_trains(make, loops) -> None:
    model = make(0.5).float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(loops.x.float(), loops.edge_index, key=Key(1))
        loss = nn.functional.cross_entropy(out, torch.arange(loops.num_nodes) % 4)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)


def test_loss_falls(make, plain) -> None:
    torch.manual_seed(0)
    model = make(0.1).train()
    model.reset_parameters() if hasattr(model, "reset_parameters") else None
    y = torch.arange(plain.num_nodes) % 2
    block = as_block(plain.edge_index, plain.num_nodes)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(80):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(plain.x, block, key=Key(0, 0, step)), y)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_relu_and_dropout_are_one_kernel(loops, monkeypatch) -> None:
    import polyhop.nn.model as module

    fused = []
    inner = module.dropout
    monkeypatch.setattr(module, "dropout", lambda *a, **k: fused.append(k["relu"]) or inner(*a, **k))
    GCN(7, 8, 3, 4, dropout=0.5).double()(loops.x, loops.edge_index)
    GCN(7, 8, 3, 4, dropout=0.5, act="elu").double()(loops.x, loops.edge_index)
    assert fused == [True, True, False, False]


def test_blocks_must_fit(loops, all_hops) -> None:
    model = GCN(7, 8, 3, 4).double()
    blocks = all_hops(loops, torch.tensor([9, 2]), 3)
    x = loops.x[ids_of(blocks)]
    with pytest.raises(GraphError, match="expected 3 blocks, one per layer, got 2"):
        model(x, blocks[:2])
    with pytest.raises(GraphError, match="gives 2 rows, block 1 takes"):
        model(x, [blocks[2], blocks[1], blocks[0]])
    with pytest.raises(GraphError, match="one block for 3 layers"):
        model(loops.x[blocks[2].src_ids], blocks[2])
    with pytest.raises(InputError, match="carry their own weights"):
        model(x, blocks, loops.weight)


def test_base_model(loops) -> None:
    model, block = Model(), as_block(loops.edge_index, loops.num_nodes)
    assert model.finish(model.begin(loops.x)) is loops.x
    with pytest.raises(NotImplementedError):
        model.layer(0, block, {"h": loops.x})
    rows = SparseRows(torch.tensor([0, 1]), torch.tensor([2]), torch.ones(1), 7)
    with pytest.raises(InputError, match="expected a dense tensor, got SparseRows"):
        rows_of({"h": rows})
    pooled = PooledRows(loops.x[:9], loops.x[9:])
    with pytest.raises(InputError, match="expected a dense tensor, got PooledRows"):
        rows_of({"h": pooled})
    with pytest.raises(InputError, match="gather them before units are dropped"):
        drop_rows(pooled, 0.5, Key(1), 0)


def test_act_without_dropout_is_the_act(loops) -> None:
    torch.testing.assert_close(act_and_drop(loops.x, torch.relu, 0.5, None, 0), loops.x.relu())
    torch.testing.assert_close(act_and_drop(loops.x, None, 0.5, None, 0), loops.x)
    torch.testing.assert_close(act_and_drop(loops.x, torch.tanh, 0.0, Key(1), 0), loops.x.tanh())


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_layer_is_undropped_then_dropped(make, p, loops, all_hops) -> None:
    """To the bit, also for some rows alone: dropping is row by row."""
    model = make(p).train()
    blocks = all_hops(loops, torch.tensor([9, 2, 17, 4]), 3)
    key = Key(11, 2, 5)
    state = model.begin(loops.x[ids_of(blocks)], ids=ids_of(blocks), key=key)
    for i, block in enumerate(blocks):
        half = model.undropped(i, block, dict(state), key=key)
        rest = model.dropped(i, half, ids=block.dst_ids(), key=key)
        state = model.layer(i, block, state, key=key)
        assert rest.keys() == state.keys()
        assert all(torch.equal(rest[name], value) for name, value in state.items()), i
        some = model.dropped(i, {k: v[1:3] for k, v in half.items()}, ids=block.dst_ids()[1:3], key=key)
        assert torch.equal(some["h"], state["h"][1:3])
