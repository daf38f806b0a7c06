"""GATConv against PyG, and its keyed attention dropout."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg

from polyhop.errors import UnsupportedError
from polyhop.kernels import Key
from polyhop.nn import GATConv, as_block

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 3},
        {"heads": 3, "concat": False},
        {"heads": 2, "residual": True},
        {"heads": 2, "residual": True, "bias": False},
        {"heads": 2, "residual": True, "bias": False, "concat": False},
        {"heads": 2, "add_self_loops": False},
        {"heads": 9, "negative_slope": 0.05, "bias": False},
    ],
)
def test_equals_pyg(sample, same_as_pyg, options) -> None:
    ours, theirs = GATConv(7, 5, **options), pyg.GATConv(7, 5, **options)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, sample.edge_index), lambda x: theirs(x, sample.edge_index), [sample.x]
    )


@pytest.mark.parametrize("first", [0, 2])
def test_sampled_block_is_pyg_on_its_edges(sample, cut_block, some_edges, same_as_pyg, first) -> None:
    """Softmax over the drawn edges: PyG given (source rows, destination rows) and the block's edges, loops apart."""
    ours, theirs = GATConv(7, 5, heads=2), pyg.GATConv(7, 5, heads=2, add_self_loops=False)
    keep = some_edges(sample)
    block = cut_block(sample, torch.tensor([6, 1, 9, 0]), keep=keep, first=first)
    at = torch.repeat_interleave(torch.arange(4), block.drawn)
    edges = torch.stack([block.indices.long(), at])
    edges = edges[:, edges[0] != edges[1] + first]
    edges = torch.cat([edges, torch.stack([torch.arange(4) + first, torch.arange(4)])], 1)
    same_as_pyg(
        ours,
        theirs,
        lambda h: ours(h, block),
        lambda h: theirs((h, h[first : first + 4]), edges),
        [sample.x[block.src_ids]],
    )


def test_attention_dropout_is_keyed(plain, tiny_weights) -> None:
    conv = tiny_weights(GATConv(7, 5, heads=3, dropout=0.5)).train()
    block = as_block(plain.edge_index, plain.num_nodes)
    one, again = conv(plain.x, block, key=Key(1)), conv(plain.x, block, key=Key(1))
    torch.testing.assert_close(one, again, rtol=0, atol=0)
    assert not torch.allclose(one, conv(plain.x, block, key=Key(2)))
    assert not torch.allclose(one, conv(plain.x, block, key=Key(1), site=1))
    torch.manual_seed(7)
    drawn = conv(plain.x, block)
    torch.manual_seed(7)
    torch.testing.assert_close(drawn, conv(plain.x, block), rtol=0, atol=0)
    conv.eval()
    torch.testing.assert_close(conv(plain.x, block, key=Key(1)), conv(plain.x, block), rtol=0, atol=0)


def test_attention_dropout_keeps_the_mean(plain, tiny_weights) -> None:
    conv = tiny_weights(GATConv(7, 2, dropout=0.4)).train()
    block = as_block(plain.edge_index, plain.num_nodes)
    outs = torch.stack([conv(plain.x, block, key=Key(1, 0, step)).detach() for step in range(400)])
    expected = conv.eval()(plain.x, block).detach()
    error = (outs.mean(0) - expected).abs() / (outs.std(0) / 400**0.5 + 1e-12)
    assert float(error.max()) < 5  # 48 means, each within 5 standard errors


def test_refused() -> None:
    with pytest.raises(UnsupportedError, match="edge_dim=4"):
        GATConv(7, 5, edge_dim=4)
    with pytest.raises(UnsupportedError, match="flow"):
        GATConv(7, 5, flow="target_to_source")


def test_initialisation_has_pyg_distribution() -> None:
    torch.manual_seed(0)
    ours, theirs = GATConv(50, 100, heads=8, residual=True), pyg.GATConv(50, 100, heads=8, residual=True)
    for name, p in ours.named_parameters():
        other = theirs.get_parameter(name)
        if name == "bias":
            assert not p.any()
        else:
            assert abs(float((p.std() / other.std()).detach()) - 1) < 0.1, name
    assert "heads=8" in repr(ours)
