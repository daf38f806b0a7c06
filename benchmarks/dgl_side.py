"""DGL's side of every comparison, at its best: fused sampler, built formats, its own choice of map and aggregate order."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import dgl
import dgl.nn as dgl_nn
import torch
from dgl import DGLGraph
from dgl.utils import set_num_threads
from torch import Tensor, nn

from polyhop.graph import Graph

__all__ = ["Gcn", "Sage", "batches", "copy_sum", "gat", "graph", "load_gat", "loader", "sampler"]

set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def graph(
    data: Graph, *, dtype: torch.dtype = torch.int64, loops: bool = False, formats: bool = True
) -> DGLGraph:
    """The same edges as a DGL graph; ``loops`` adds every node's own; ``formats`` builds all layouts ahead of any timing."""
    if loops:
        ids = torch.arange(data.num_nodes)
        made = dgl.graph(
            (torch.cat([data.indices.long(), ids]), torch.cat([data.destinations, ids])),
            num_nodes=data.num_nodes,
        )
        made = made.int() if dtype == torch.int32 else made
    else:
        parts = (data.indptr.to(dtype), data.indices.to(dtype), torch.tensor([], dtype=dtype))
        made = dgl.graph(("csc", parts), num_nodes=data.num_nodes)
    if formats:
        made.create_formats_()
        return made
    return made.formats("csc")


def copy_sum(made: DGLGraph) -> Callable[[Tensor], Tensor]:
    """h [N, F] -> sum over in-edges [N, F]."""
    return lambda h: dgl.ops.copy_u_sum(made, h)


def sampler(num_neighbors: list[int], *, is_fused: bool = True) -> dgl.dataloading.NeighborSampler:
    """``num_neighbors`` from the seeds outward, as everywhere here; DGL lists them from the input inward."""
    return dgl.dataloading.NeighborSampler(num_neighbors[::-1], fused=is_fused)


def loader(
    made: DGLGraph, seeds: Tensor, num_neighbors: list[int], batch_size: int
) -> dgl.dataloading.DataLoader:
    """DGL's own loader in this process (no workers: their memory and CPU would not be counted)."""
    return dgl.dataloading.DataLoader(
        made, seeds, sampler(num_neighbors), batch_size=batch_size, shuffle=True, num_workers=0
    )


class Sage(nn.Module):
    """GraphSAGE-mean with ReLU between layers."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = nn.ModuleList([dgl_nn.SAGEConv(a, b, "mean") for a, b in pairs])

    def forward(self, blocks: list[DGLGraph], h: Tensor) -> Tensor:
        for i, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            h = conv(block, h)
            if i + 1 < len(self.convs):
                h = h.relu()
        return h

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take weights under PyG's names (``convs.0.lin_l.weight``, ...)."""
        for i, conv in enumerate(self.convs):
            conv.fc_neigh.weight.copy_(state[f"convs.{i}.lin_l.weight"])
            conv.fc_self.weight.copy_(state[f"convs.{i}.lin_r.weight"])
            conv.fc_self.bias.copy_(state[f"convs.{i}.lin_l.bias"])


class Gcn(nn.Module):
    """GCN with symmetric normalisation and ReLU between layers; the graph must have its loops."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = nn.ModuleList([dgl_nn.GraphConv(a, b, norm="both") for a, b in pairs])

    def forward(self, made: DGLGraph, h: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            h = conv(made, h)
            if i + 1 < len(self.convs):
                h = h.relu()
        return h

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Take weights under PyG's names; DGL stores them transposed."""
        for i, conv in enumerate(self.convs):
            conv.weight.copy_(state[f"convs.{i}.lin.weight"].T)
            conv.bias.copy_(state[f"convs.{i}.bias"])


def gat(in_channels: int, out_channels: int, heads: int) -> nn.Module:
    """One attention layer, heads concatenated."""
    return dgl_nn.GATConv(in_channels, out_channels, heads)


@torch.no_grad()
def load_gat(conv: nn.Module, state: dict[str, Tensor]) -> None:
    """Take one PyG GATConv's weights."""
    conv.fc.weight.copy_(state["lin.weight"])
    conv.attn_l.copy_(state["att_src"])
    conv.attn_r.copy_(state["att_dst"])
    conv.bias.copy_(state["bias"])


def batches(
    dataloader: dgl.dataloading.DataLoader, x: Tensor, y: Tensor
) -> Iterator[tuple[list[DGLGraph], Tensor, Tensor]]:
    """Blocks, gathered input rows and labels of each mini-batch of one epoch."""
    for input_nodes, seeds, blocks in dataloader:
        yield blocks, x[input_nodes], y[seeds]
