"""Inputs in slices of columns: how a first layer's product is made by several ranks, each of which has some columns of x.

A product of rows and weights is a sum over columns: x W = sum_k x[:, k] W[k]. Where a first layer begins with one, before or
after a sum over neighbours, each rank makes its part of it from its columns and the parts are added up. ``SlicedMap`` says
what a part is; ``MappedRows`` are the sums, in place of input rows, for a layer that goes on from there.

Legend: n rows, D destinations, S sources, F features, c columns of a slice, W columns of a mapped row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.graph.block import Block

__all__ = ["MappedRows", "SlicedMap"]


@dataclass(frozen=True, eq=False)
class MappedRows:
    """Inputs of a first layer whose product with its weights is made; biases and all that is not linear come after."""

    z: Tensor  # [n, W]: of destinations, or of sources where the layer weighs neighbours by what it learns

    @property
    def shape(self) -> tuple[int, int]:
        return self.z.shape[0], self.z.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.z.dtype

    @property
    def device(self) -> torch.device:
        return self.z.device


@dataclass(frozen=True, eq=False)
class SlicedMap:
    """The linear part of a first layer, as a sum over the columns of its inputs."""

    width: int  # W
    reads_edges: (
        bool  # a mapped row is of a destination, from its edges; else of a source, from nothing but its row
    )
    weights: tuple[Tensor, ...]  # parameters, each [out, F], of which a slice reads the same columns as of x
    apply: Callable[[Block, Tensor, tuple[Tensor, ...]], Tensor]
    """(block, columns [S, c] of its source rows, those columns [out, c] of each weight) -> a part of z [D or S, W]."""
    learnt: tuple[Tensor, ...] = ()  # what else a part depends on and may be learnt

    def num_rows(self, num_src: int, num_dst: int) -> int:
        """Mapped rows of a block."""
        return num_dst if self.reads_edges else num_src

    @property
    def returns(self) -> bool:
        """Whether parts have gradients."""
        return any(value.requires_grad for value in (*self.weights, *self.learnt))
