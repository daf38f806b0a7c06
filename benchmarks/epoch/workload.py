"""The mini-batch epoch all sides run: one graph, one model, six steps of 1,024 seeds; and polyhop's side of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.graphs import skewed
from polyhop.graph import Graph
from polyhop.kernels import Key
from polyhop.nn import GraphSAGE
from polyhop.sample import Loaded, NeighborLoader

__all__ = [
    "BATCH",
    "NUM_NEIGHBORS",
    "WIDTHS",
    "Outcome",
    "loader",
    "make_graph",
    "our_epoch",
    "our_model",
    "step",
]

WIDTHS = [100, 256, 256, 47]
NUM_NEIGHBORS = [15, 10, 5]  # from the seeds outward
BATCH = 1024


@dataclass
class Outcome:
    """What an epoch did, printed for each side so that it is visible that the work is the same."""

    edges: int = 0
    losses: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.edges:,} edges, losses " + " ".join(f"{loss:.3f}" for loss in self.losses)


def make_graph(*, is_quick: bool) -> Graph:
    """300,000 nodes, 5 M edges, 100 features, 6,144 train nodes (quick: a tenth, two steps)."""
    if is_quick:
        return skewed(30_000, 500_000, num_features=WIDTHS[0], num_train=2 * BATCH)
    return skewed(300_000, 5_000_000, num_features=WIDTHS[0], num_train=6 * BATCH)


def our_model() -> GraphSAGE:
    """GraphSAGE, 3 layers, hidden 256, mean aggregation, no dropout: losses of all sides can then be compared."""
    torch.manual_seed(1)
    return GraphSAGE(WIDTHS[0], WIDTHS[1], num_layers=3, out_channels=WIDTHS[-1])


def loader(graph: Graph, *, in_place: bool = False) -> NeighborLoader:
    """polyhop's loader: one thread works ahead (its CPU time counts). ``in_place`` as ``Trainer`` does it."""
    assert graph.split is not None
    return NeighborLoader(
        graph, NUM_NEIGHBORS, graph.split.train, batch_size=BATCH, shuffle=True, seed=0, in_place=in_place
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, logits: Tensor, y: Tensor) -> float:
    """Loss, backward and update, the same for every side."""
    loss = functional.cross_entropy(logits, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def our_epoch(model: GraphSAGE, batches: Iterable[Loaded]) -> Outcome:
    """Train on every batch in turn."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    done = Outcome()
    for loaded in batches:
        blocks = loaded.batch.blocks
        logits = model(loaded.x, blocks, key=Key(0, 0, loaded.batch.step))
        done.losses.append(step(model, optimizer, logits, loaded.y))
        done.edges += sum(block.num_edges for block in blocks)
    return done
