"""Quality: what a partition costs, in the numbers that decide traffic and waiting, and whether they are normal.

Legend: N nodes, E edges, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.graph import Graph
from polyhop.partition.record import Partition

__all__ = ["Quality", "quality"]


@dataclass(frozen=True)
class Quality:
    """Balances are the largest part over the mean (1 = even). Shares are of all edges and of all nodes."""

    cut: float  # share of edges whose ends have different owners
    node_balance: float
    edge_balance: float  # in-edges, which live with their destination
    train_balance: float
    halo: float  # remote rows that all parts read for one full layer, over N
    replication: float  # 1 + halo: copies of an average node
    chance_cut: float  # the cut of parts of the same sizes filled at random

    def rows(self) -> list[tuple[str, str]]:
        """For people: names and values, with what is normal."""
        return [
            ("cut", f"{100 * self.cut:.1f} % of edges (at random: {100 * self.chance_cut:.1f} %)"),
            (
                "balance",
                f"nodes {self.node_balance:.2f}, edges {self.edge_balance:.2f}, train nodes {self.train_balance:.2f} "
                "(largest part over the mean; nodes up to 1.1 are usual)",
            ),
            (
                "halo",
                f"{self.halo:.2f} rows read from other parts for each node of the graph, in one full layer; "
                f"replication {self.replication:.2f}",
            ),
        ]


def quality(graph: Graph, partition: Partition) -> Quality:
    """Measured over all edges."""
    owner, parts = partition.owner.long(), partition.num_parts
    source, destination = owner[graph.indices.long()], owner[graph.destinations]
    is_cut = source != destination
    remote = torch.unique((destination * graph.num_nodes + graph.indices.long())[is_cut]).numel()
    sizes = partition.sizes.double() / max(graph.num_nodes, 1)
    halo = remote / max(graph.num_nodes, 1)
    return Quality(
        cut=float(is_cut.double().mean()) if is_cut.numel() else 0.0,
        node_balance=_balance(partition.sizes),
        edge_balance=_balance(torch.bincount(destination, minlength=parts)),
        train_balance=_balance(
            torch.bincount(owner[graph.split.train], minlength=parts)
            if graph.split is not None
            else torch.zeros(parts)
        ),
        halo=halo,
        replication=1.0 + halo,
        chance_cut=float(1.0 - sizes.square().sum()),
    )


def _balance(counts: Tensor) -> float:
    mean = float(counts.double().mean())
    return float(counts.max()) / mean if mean > 0 else 1.0
