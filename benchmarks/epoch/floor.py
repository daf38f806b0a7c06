"""The least a mini-batch epoch can cost on this machine: its matrix products, and the bytes that must move at copy speed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.harness import copy_bandwidth
from polyhop.nn import GraphSAGE
from polyhop.sample import MiniBatch

__all__ = ["Floor", "measure"]


@dataclass(frozen=True)
class Floor:
    products_s: float
    moved_bytes: int
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        return self.products_s + self.moved_bytes / self.bytes_per_s

    def __str__(self) -> str:
        return (
            f"products {self.products_s:.2f} s, {self.moved_bytes / 1e9:.2f} GB at {self.bytes_per_s / 1e9:.1f} GB/s "
            f"{self.moved_bytes / self.bytes_per_s:.2f} s"
        )


def measure(model: GraphSAGE, batches: list[MiniBatch]) -> Floor:
    """For these very blocks, with the order of map and aggregate that the model chooses; one thread."""
    products = 0.0
    moved = 0
    for batch in batches:
        for i, block in enumerate(batch.blocks):
            conv = model.convs[i]
            has_gradient = i > 0
            is_last = i + 1 == len(batch.blocks)
            rows_in, rows_out = block.num_src, block.num_dst
            width_in, width_out = conv.in_channels, conv.out_channels
            map_first = conv.map_first(block, has_gradient)
            count = (
                3 if has_gradient else 2
            )  # forward, weight gradient and, above the first layer, input gradient
            mapped_rows = rows_in if map_first else rows_out
            products += _products(mapped_rows, width_in, width_out, count) + _products(
                rows_out, width_in, width_out, count
            )
            width = width_out if map_first else width_in
            moved += _aggregation_bytes(block.num_edges, rows_in, rows_out, width, map_first or has_gradient)
            moved += (
                0 if is_last else 5 * rows_out * width_out * 4
            )  # relu: read, write; backward: read two, write
        inputs = batch.blocks[0].num_src
        moved += 2 * inputs * WIDTH_BYTES * model.convs[0].in_channels  # gather the input rows
        moved += sum(
            8 * block.num_edges + 16 * block.num_src for block in batch.blocks
        )  # sampling: ids read and written
    return Floor(products, moved, copy_bandwidth(1))


WIDTH_BYTES = 4


def _aggregation_bytes(edges: int, rows_in: int, rows_out: int, width: int, has_backward: bool) -> int:
    """Each edge reads its row and its id; each output row is written once."""
    forward = edges * (width * WIDTH_BYTES + 4) + rows_out * width * WIDTH_BYTES
    backward = edges * (width * WIDTH_BYTES + 8) + rows_in * width * WIDTH_BYTES
    return forward + (backward if has_backward else 0)


_cache: dict[tuple[int, int, int, int], float] = {}


def _products(rows: int, width_in: int, width_out: int, count: int) -> float:
    """CPU seconds of forward, weight-gradient and (count = 3) input-gradient products of one linear map; best of four."""
    rows = -(-rows // 256) * 256  # equal sizes of nearby steps share one measurement
    key = (rows, width_in, width_out, count)
    if key not in _cache:
        h, weight = torch.randn(rows, width_in), torch.randn(width_out, width_in)
        gradient = torch.randn(rows, width_out)
        seconds = []
        outs = (torch.empty(rows, width_out), torch.empty(width_out, width_in), torch.empty(rows, width_in))
        for _ in range(4):
            start = time.process_time()
            torch.mm(h, weight.t(), out=outs[0])
            torch.mm(gradient.t(), h, out=outs[1])
            if count == 3:
                torch.mm(gradient, weight, out=outs[2])
            seconds.append(time.process_time() - start)
        _cache[key] = min(seconds)
    return _cache[key]
