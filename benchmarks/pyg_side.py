"""PyG's side of every comparison, at its best on the same work.

Mini-batches: one bipartite sparse matrix per layer, so that a layer computes its destinations only; that is faster than
PyG's own ``trim_to_layer`` (which computes all remaining nodes) and than plain ``edge_index``; both are shown beside.
Full graphs: one normalised sparse matrix. The matrix layout is chosen per bench by timing all of LAYOUTS.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GCNConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import trim_to_layer

from polyhop.graph import Block, Graph

if TYPE_CHECKING:
    from polyhop.sample import MiniBatch

__all__ = ["LAYOUTS", "Gcn", "Sage", "SageTrimmed", "gat", "gat_edges", "normalised"]

LAYOUTS = ("csr", "csr32", "csc", "mean-csr", "mean-csr32", "edge-index", "plain")


def _rows(indptr: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())


def matrix(indptr: Tensor, indices: Tensor, values: Tensor, num_src: int, layout: str) -> Tensor:
    """[D, S] as a torch sparse tensor; ``csr32`` has 32-bit ids, ``csc`` makes the transpose in backward free."""
    kind = torch.int32 if layout.endswith("32") else torch.int64
    made = torch.sparse_csr_tensor(indptr.to(kind), indices.to(kind), values, (indptr.numel() - 1, num_src))
    return made.to_sparse_csc() if layout == "csc" else made


def block_matrix(block: Block, layout: str) -> Tensor | EdgeIndex:
    """One layer's edges in the given layout. csr*, csc: values 1/drawn, to be summed. mean-*: values 1, to be averaged."""
    indptr, indices = block.indptr, block.indices.long()
    if layout in ("plain", "edge-index"):
        edges = torch.stack([indices, _rows(indptr)])
        if layout == "plain":
            return edges
        made = EdgeIndex(edges, sparse_size=(block.num_src, block.num_dst), sort_order="col")
        return made.fill_cache_()
    values = torch.ones(indices.numel())
    if not layout.startswith("mean"):
        values = (1 / block.drawn.clamp(min=1).float()).repeat_interleave(block.drawn)
    return matrix(indptr, indices, values, block.num_src, layout)


class Sage(nn.Module):
    """GraphSAGE-mean on bipartite layers, ReLU between; the state dict has PyG's names."""

    def __init__(self, widths: list[int], layout: str) -> None:
        super().__init__()
        aggr = "sum" if layout in ("csr", "csr32", "csc") else "mean"
        pairs = itertools.pairwise(widths)
        self.convs = nn.ModuleList([SAGEConv(a, b, aggr=aggr) for a, b in pairs])
        self.layout = layout

    def prepare(self, batch: MiniBatch) -> list[tuple[Tensor | EdgeIndex, int]]:
        """The batch's layers in this model's layout, outside any timing."""
        return [(block_matrix(block, self.layout), block.num_dst) for block in batch.blocks]

    @staticmethod
    def num_edges(layers: list[tuple[Tensor | EdgeIndex, int]]) -> int:
        """Edges of all layers together."""
        return sum(edges.size(1) if edges.layout == torch.strided else edges._nnz() for edges, _ in layers)

    def forward(self, h: Tensor, layers: list[tuple[Tensor | EdgeIndex, int]]) -> Tensor:
        for i, (conv, (edges, num_dst)) in enumerate(zip(self.convs, layers, strict=True)):
            size = (h.size(0), num_dst) if self.layout == "plain" else None
            h = conv((h, h[:num_dst]), edges, size=size)
            if i + 1 < len(self.convs):
                h = h.relu()
        return h


class SageTrimmed(nn.Module):
    """GraphSAGE-mean through PyG's ``trim_to_layer``: what its NeighborLoader users are told to write."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(a, b) for a, b in itertools.pairwise(widths)])

    @staticmethod
    def prepare(batch: MiniBatch) -> tuple[Tensor, list[int], list[int]]:
        """All hops' edges in one edge_index, seeds' hop first, with the nodes and edges each hop brought (PyG draws a node's
        neighbours once, at the hop that reached it, so the rows already drawn by an outer hop are left out)."""
        edges, num_edges, num_nodes, done = [], [], [batch.blocks[-1].num_dst], 0
        for block in reversed(batch.blocks):
            begin = int(block.indptr[done])
            edges.append(torch.stack([block.indices.long(), _rows(block.indptr)])[:, begin:])
            num_edges.append(edges[-1].size(1))
            num_nodes.append(block.num_src - block.num_dst)
            done = block.num_dst
        return torch.cat(edges, dim=1), num_nodes, num_edges

    @staticmethod
    def num_edges(layers: tuple[Tensor, list[int], list[int]]) -> int:
        """Edges of all hops together; the first hops' are used by several layers."""
        return sum(layers[2])

    def forward(self, h: Tensor, layers: tuple[Tensor, list[int], list[int]]) -> Tensor:
        edges, num_nodes, num_edges = layers
        for i, conv in enumerate(self.convs):
            h, edges, _ = trim_to_layer(i, num_nodes, num_edges, h, edges)
            h = conv(h, edges)
            if i + 1 < len(self.convs):
                h = h.relu()
        return h[: num_nodes[0]]


def normalised(graph: Graph, layout: str) -> tuple[Tensor | EdgeIndex, Tensor | None]:
    """GCN's normalised matrix with loops (and edge weights apart, for the layouts that want them apart)."""
    edges, weight = gcn_norm(
        graph.edge_index, None, graph.num_nodes, add_self_loops=True, flow="source_to_target"
    )
    order = torch.argsort(edges[1], stable=True)
    edges, weight = edges[:, order], weight[order]
    if layout == "plain":
        return edges, weight
    if layout == "edge-index":
        made = EdgeIndex(edges, sparse_size=(graph.num_nodes, graph.num_nodes), sort_order="col")
        return made.fill_cache_(), weight
    indptr = torch.zeros(graph.num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(edges[1], minlength=graph.num_nodes), 0, out=indptr[1:])
    return matrix(indptr, edges[0], weight, graph.num_nodes, layout), None


class Gcn(nn.Module):
    """GCN on a matrix normalised ahead of time; ReLU between layers."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = nn.ModuleList([GCNConv(a, b, normalize=False) for a, b in pairs])

    def forward(self, h: Tensor, edges: Tensor | EdgeIndex, weight: Tensor | None) -> Tensor:
        for i, conv in enumerate(self.convs):
            h = conv(h, edges, weight)
            if i + 1 < len(self.convs):
                h = h.relu()
        return h


def gat(in_channels: int, out_channels: int, heads: int) -> nn.Module:
    """One attention layer, heads concatenated; the loops are in the edges already."""
    return GATConv(in_channels, out_channels, heads=heads, add_self_loops=False)


def gat_edges(graph: Graph, *, is_cached: bool) -> Tensor | EdgeIndex:
    """Edges with every node's loop, grouped by destination; as an EdgeIndex PyG knows that they are."""
    ids = torch.arange(graph.num_nodes)
    edges = torch.cat([graph.edge_index, torch.stack([ids, ids])], dim=1)
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    if not is_cached:
        return edges
    return EdgeIndex(edges, sparse_size=(graph.num_nodes, graph.num_nodes), sort_order="col").fill_cache_()
