"""MiniBatch: what a sampler hands to a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhop.graph.block import Block

__all__ = ["MiniBatch"]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Seeds and the layers that reach them. Destinations of a block are its first sources, and the sources of the next."""

    step: int
    seeds: Tensor  # int64 [B], distinct: the destinations of the last block
    blocks: tuple[Block, ...]  # input layer first, seeds' layer last

    @property
    def input_ids(self) -> Tensor:
        """int64 [S]: nodes whose features the first layer reads; the seeds come first."""
        ids = self.blocks[0].src_ids
        assert ids is not None, "sampled blocks carry their ids"
        return ids

    @property
    def num_edges(self) -> int:
        """Edges of all layers together."""
        return sum(block.num_edges for block in self.blocks)

    def from_pool(self) -> MiniBatch:
        """The same, its input rows to be read from a pool of all nodes' rows instead of gathered ones."""
        first = replace(self.blocks[0], rows=self.input_ids)
        return replace(self, blocks=(first, *self.blocks[1:]))

    def to(self, device: torch.device | str) -> MiniBatch:
        """This mini-batch on another device."""
        return MiniBatch(self.step, self.seeds.to(device), tuple(block.to(device) for block in self.blocks))
