"""The two sides of the accuracy bench: polyhop's models on a Block, PyG's on a sparse matrix or its edge_index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg_nn
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCN2Conv

import polyhop.nn as our_nn
from benchmarks import pyg_side
from benchmarks.accuracy.recipes import Recipe
from polyhop.graph import Graph
from polyhop.graph.features import SparseRows
from polyhop.kernels import dropout, dropout_values
from polyhop.sample import full_block

__all__ = ["Side", "features", "make_sides"]

Side = tuple[
    nn.Module, Callable[[], Tensor]
]  # the module to train, and its logits [N, C] in its present mode


def features(graph: Graph, *, normalises_rows: bool) -> Tensor | SparseRows:
    """The graph's rows as stored, dense or sparse; each divided by its sum if asked."""
    assert graph.x is not None
    x = graph.x.all()
    if not normalises_rows:
        return x
    if isinstance(x, Tensor):
        return x / x.sum(1, keepdim=True).clamp(min=1e-12)
    sums = torch.zeros(x.shape[0]).index_add_(0, _rows(x), x.values).clamp(min=1e-12)
    return x.with_values(x.values / sums[_rows(x)])


def _rows(x: SparseRows) -> Tensor:
    return torch.repeat_interleave(torch.arange(x.shape[0]), x.indptr.diff())


def make_sides(graph: Graph, x: Tensor | SparseRows, name: str, recipe: Recipe) -> dict[str, Side]:
    """Both models, ours starting from PyG's initial weights."""
    theirs, edges = _theirs(graph, name, recipe)
    arguments: dict[str, Any] = {
        "num_layers": recipe.num_layers,
        "out_channels": graph.num_classes,
        "dropout": recipe.dropout,
    }
    ours = getattr(our_nn, name)(graph.num_features, recipe.hidden, **arguments, **recipe.options)
    ours.load_state_dict(theirs.state_dict())
    block = full_block(graph)
    p = recipe.dropout if name == "GCNII" else recipe.input_dropout  # our GCNII drops its input itself
    their_x = _their_rows(x, is_sparse=name != "GraphSAGE")
    return {
        "polyhop": (ours, lambda: ours(_dropped(x, recipe.input_dropout, ours.training), block)),
        "pyg": (theirs, lambda: theirs(their_x(p if theirs.training else 0.0), edges)),
    }


def _their_rows(x: Tensor | SparseRows, *, is_sparse: bool) -> Callable[[float], Tensor]:
    """PyG's input after torch's dropout of probability p. Layers that multiply first take sparse rows as a CSR tensor, of
    which only stored values need dropping; SAGEConv aggregates first and needs them dense."""
    if isinstance(x, Tensor) or not is_sparse:
        dense = x if isinstance(x, Tensor) else x.dense()
        return lambda p: functional.dropout(dense, p) if p else dense
    columns = x.indices.long()

    def rows(p: float) -> Tensor:
        values = functional.dropout(x.values, p) if p else x.values
        return torch.sparse_csr_tensor(x.indptr, columns, values, x.shape)

    return rows


def _dropped(x: Tensor | SparseRows, p: float, is_training: bool) -> Tensor | SparseRows:
    """Our own dropout of the input, which leaves sparse rows sparse."""
    if not is_training or p == 0:
        return x
    key = int(torch.randint(0, 2**62, ()))
    if isinstance(x, Tensor):
        return dropout(x, None, p, key)
    return x.with_values(dropout_values(x.values, x.indptr, x.indices, None, p, key))


def _theirs(graph: Graph, name: str, recipe: Recipe) -> tuple[nn.Module, Any]:
    """PyG's model and the form of the edges it is fastest on."""
    arguments: dict[str, Any] = {
        "num_layers": recipe.num_layers,
        "out_channels": graph.num_classes,
        "dropout": recipe.dropout,
    }
    if name == "GCNII":
        model = PygGcn2(graph.num_features, recipe.hidden, **arguments)
        return model, pyg_side.normalised(graph, "csr")[0]
    kind = getattr(pyg_nn, name)
    if name == "GCN":
        model = kind(graph.num_features, recipe.hidden, normalize=False, **arguments, **recipe.options)
        return model, pyg_side.normalised(graph, "csr")[0]
    model = kind(graph.num_features, recipe.hidden, **arguments, **recipe.options)
    if name == "GraphSAGE":
        ones = torch.ones(graph.num_edges)
        return model, pyg_side.matrix(graph.indptr, graph.indices, ones, graph.num_nodes, "csr")
    return model, graph.edge_index


class PygGcn2(nn.Module):
    """PyG's own example model for citation graphs, from its GCN2Conv; the caller drops the input."""

    def __init__(
        self, in_channels: int, hidden: int, *, num_layers: int, out_channels: int, dropout: float
    ) -> None:
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)])
        self.convs = nn.ModuleList(
            GCN2Conv(hidden, 0.1, 0.5, i + 1, shared_weights=True, normalize=False) for i in range(num_layers)
        )
        self.dropout = dropout

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = h0 = self.lins[0](x).relu()
        for conv in self.convs:
            h = conv(functional.dropout(h, self.dropout, self.training), h0, edges).relu()
        out: Tensor = self.lins[1](functional.dropout(h, self.dropout, self.training))
        return out
