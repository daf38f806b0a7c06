"""Quality: what a partition costs, in the numbers that decide traffic and waiting, and whether they are normal.

Legend: N nodes, E edges, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.graph import Graph
from polyhop.partition.record import Partition

__all__ = ["Quality", "quality", "quality_of_counts"]


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
    num_empty: int = 0  # parts without nodes

    def rows(self) -> list[tuple[str, str]]:
        """For people: names and values, with what is normal; what is not is marked."""
        is_chance = self.cut > 0.9 * self.chance_cut and self.cut > 0
        return [
            (
                "cut",
                f"{100 * self.cut:.1f} % of edges (at random: {100 * self.chance_cut:.1f} %; usual for metis and fennel: "
                f"1 to 35 %{'; HIGH: no better than chance' if is_chance else ''})",
            ),
            (
                "balance",
                f"nodes {_marked(self.node_balance, 1.1)}, edges {_marked(self.edge_balance, 2.0)}, "
                f"train nodes {_marked(self.train_balance, 1.1)} (largest part over the mean; usual: nodes and train nodes "
                f"up to 1.1, edges up to 2 where a few nodes have most){self._empty()}",
            ),
            (
                "halo",
                f"{self.halo:.2f} rows read from other parts for each node of the graph, in one full layer; "
                f"replication {self.replication:.2f} (usual: halo below 1 with up to 10 edges a node, 2 to 4 with 50)",
            ),
        ]

    def _empty(self) -> str:
        if self.num_empty == 0:
            return ""
        return f"; {self.num_empty} {'part is' if self.num_empty == 1 else 'parts are'} EMPTY: their ranks own nothing"


def quality(graph: Graph, partition: Partition) -> Quality:
    """Measured over all edges."""
    if partition.num_nodes != graph.num_nodes:
        raise PartitionError(
            f"the partition is of {partition.num_nodes} nodes, the graph {graph.name!r} has {graph.num_nodes}"
        )
    owner, parts = partition.owner.long(), partition.num_parts
    source, destination = owner[graph.indices.long()], owner[graph.destinations]
    is_cut = source != destination
    train = None if graph.split is None else torch.bincount(owner[graph.split.train], minlength=parts)
    return quality_of_counts(
        partition.sizes,
        torch.bincount(destination, minlength=parts),
        train,
        num_cut=int(is_cut.sum()),
        num_halo=torch.unique((destination * graph.num_nodes + graph.indices.long())[is_cut]).numel(),
    )


def quality_of_counts(
    nodes: Tensor, edges: Tensor, train: Tensor | None, *, num_cut: int, num_halo: int
) -> Quality:
    """From the nodes, in-edges and training nodes of each part (int64 [P] each), the edges cut and all parts' halo rows."""
    num_nodes, num_edges = int(nodes.sum()), int(edges.sum())
    sizes = nodes.double() / max(num_nodes, 1)
    halo = num_halo / max(num_nodes, 1)
    return Quality(
        cut=num_cut / num_edges if num_edges else 0.0,
        node_balance=_balance(nodes),
        edge_balance=_balance(edges),
        train_balance=_balance(torch.zeros_like(nodes) if train is None else train),
        halo=halo,
        replication=1.0 + halo,
        chance_cut=float(1.0 - sizes.square().sum()),
        num_empty=int((nodes == 0).sum()),
    )


def _balance(counts: Tensor) -> float:
    mean = float(counts.double().mean())
    return float(counts.max()) / mean if mean > 0 else 1.0


def _marked(balance: float, usual: float) -> str:
    return f"{balance:.2f}" + (" HIGH" if balance > usual else "")
