"""MiniBatch: a plain record."""

from __future__ import annotations

from collections.abc import Callable

import torch

from polyhop.graph import Graph
from polyhop.sample import NeighbourSampler


def test_to_moves_every_tensor(make_graph: Callable[..., Graph]) -> None:
    batch = NeighbourSampler(make_graph(60, weighted=True), [3, 2]).sample(torch.arange(30, 50), 0, 4)
    moved = batch.to("meta")
    assert moved.step == 4
    assert moved.seeds.device.type == "meta"
    tensors = [
        value for block in moved.blocks for value in vars(block).values() if isinstance(value, torch.Tensor)
    ]
    assert len(tensors) >= 2 * 5
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.input_ids.shape == batch.input_ids.shape
