"""The graphs of the bench, made once per machine: sections are processes of their own, and making one takes a while."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.graphs import synth
from polyhop.graph import Block, Graph

__all__ = ["graph_of", "on_device"]


def graph_of(name: str) -> Graph:
    """The edges of a generator's graph, without features; kept in the folder of temporary files."""
    file = Path(tempfile.gettempdir()) / f"polyhop-gpu-{name.replace('?', '-').replace('=', '-')}.npz"
    if not file.exists():
        joint = "&" if "?" in name else "?"
        made = synth(f"synth:{name}{joint}features=0")
        assert made.y is not None
        part = file.with_suffix(".part.npz")
        np.savez(part, indptr=made.indptr.numpy(), indices=made.indices.numpy(), y=made.y.numpy())
        part.rename(file)
    with np.load(file) as held:
        indptr, indices, y = (torch.from_numpy(held[key]) for key in ("indptr", "indices", "y"))
    return Graph(indptr, indices, None, y, num_classes=int(y.max()) + 1, name=name)


def on_device(graph: Graph) -> Block:
    """The whole graph as one layer on the device, its edges also grouped by source."""
    block = Block(graph.indptr.cuda(), graph.indices.cuda(), graph.num_nodes)
    block.transposed()
    return block
