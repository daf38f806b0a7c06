"""Timing a model before it is trained: whole steps on blocks of random edges, from which its law is fitted.

Rows and edges differ from probe to probe, so that the costs of aggregated values, of products, of what passes through
activations and of calls can be told apart. Times are of the processor, not of the clock, where one thread computes: other
processes then hardly matter. Nothing is left behind in the model, and torch's generator is not touched.

Legend: n rows, d edges of a row, F columns.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polyhop.graph import Block, Sizes, SparseRows
from polyhop.kernels.keys import Key
from polyhop.nn.counts import Counts, ModelCounts, count_model
from polyhop.plan.law import Law, fit_law

__all__ = ["PROBES", "Probe", "measure_law"]

_MOST_ROWS = 60_000  # of what a deep model's probes would grow to


@dataclass(frozen=True)
class Probe:
    """A step on ``num_layers`` blocks: each reads ``growth`` times as many rows as it gives."""

    num_outputs: int
    degree: int
    growth: float = 1.0

    def sizes(self, num_layers: int) -> list[Sizes]:
        """Input layer first."""
        found, rows = [], self.num_outputs
        for _ in range(num_layers):
            below = min(round(rows * self.growth), max(rows, _MOST_ROWS))
            found.append(Sizes(below, rows, rows * self.degree))
            rows = below
        return found[::-1]


PROBES = (
    Probe(256, 4),
    Probe(512, 6, 4.0),
    Probe(2048, 3, 1.5),
    Probe(2048, 30),
    Probe(2048, 10, 3.0),
    Probe(12_000, 4, 1.2),
    Probe(12_000, 24),
    Probe(60_000, 4),
    Probe(100_000, 12),
)
"""Tables from the cache's size to several times that; few and many edges to a row."""

_REPEATS = 3
_LONG_S = 0.7  # a step that takes so long is not repeated
_MOST_BYTES = 1.5e8  # of rows that a probe reads and gives
_MOST_VALUES = 1.2e9  # aggregated by a probe that is tried: a second or so


def measure_law(
    model: nn.Module,
    num_features: int,
    *,
    input_values: float | None = None,
    probes: Sequence[Probe] = PROBES,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    cache_bytes: float = math.inf,
    is_fresh: bool = False,
    is_any_size: bool = False,
) -> Law:
    """Of training steps of a model, on this thread's number of threads. ``input_values``: of a sparse input row.

    ``is_fresh``: every step has edges and rows of its own, as mini-batches do; else what is derived of them is kept.
    ``is_any_size``: all probes are timed, also those that would take a host long.
    """
    counted = count_model(model, num_features, input_values)
    tried = [each for each in probes if is_any_size or _is_light(counted, each, num_features)] or list(
        probes[:2]
    )
    model = copy.deepcopy(model).to(device, dtype).train()
    made = torch.Generator().manual_seed(0)
    seconds = []
    for each in tried:
        sizes = each.sizes(counted.num_layers)
        blocks = [_block(size, made).to(torch.device(device)) for size in sizes]
        x = _inputs(sizes[0].num_src, num_features, input_values, made)
        x = x.to(torch.device(device)) if isinstance(x, SparseRows) else x.to(device, dtype)
        labels = torch.zeros(each.num_outputs, dtype=torch.int64, device=device)
        seconds.append(_least_s(model, x, blocks, labels, is_fresh=is_fresh))
    return fit_law([_counts(counted, each) for each in tried], seconds, cache_bytes)


def _is_light(counted: ModelCounts, probe: Probe, num_features: int) -> bool:
    """Whether it takes about a second, and no memory that a host would feel."""
    sizes = probe.sizes(counted.num_layers)
    rows = sum(
        size.num_src * layer.mapped_columns + size.num_dst * layer.out_columns
        for size, layer in zip(sizes, counted.layers, strict=True)
    )
    inputs = sizes[0].num_src * (num_features if counted.input_values is None else 2 * counted.input_values)
    return _counts(counted, probe).values <= _MOST_VALUES and 4 * (rows + inputs) <= _MOST_BYTES


def _counts(counted: ModelCounts, probe: Probe) -> Counts:
    return counted.of(probe.sizes(counted.num_layers))


def _block(sizes: Sizes, made: torch.Generator) -> Block:
    degree = sizes.num_edges // max(1, sizes.num_dst)
    indptr = torch.arange(0, sizes.num_edges + 1, max(1, degree))
    indices = torch.randint(sizes.num_src, (sizes.num_edges,), generator=made).int()
    full = torch.full((sizes.num_src,), degree, dtype=torch.int32)
    return Block(
        indptr, indices, sizes.num_src, src_ids=torch.arange(sizes.num_src), in_degree=full, out_degree=full
    )


def _inputs(
    num_rows: int, num_features: int, input_values: float | None, made: torch.Generator
) -> Tensor | SparseRows:
    if input_values is None:
        return torch.rand(num_rows, num_features, generator=made)
    each = max(1, min(num_features, round(input_values)))
    columns = torch.randint(num_features, (num_rows, each), generator=made).sort(1).values
    return SparseRows(
        torch.arange(0, num_rows * each + 1, each),
        columns.flatten().int(),
        torch.ones(num_rows * each),
        num_features,
    )


def _least_s(
    model: nn.Module, x: Tensor | SparseRows, blocks: Sequence[Block], labels: Tensor, *, is_fresh: bool
) -> float:
    """Of a few steps; the first warms up and does not count."""
    least = float("inf")
    for repeat in range(1 + _REPEATS):
        for parameter in model.parameters():
            parameter.grad = None
        if is_fresh:  # without what was derived of them
            x = x if isinstance(x, Tensor) else replace(x, _cache={})
            blocks = [replace(block, _cache={}) for block in blocks]
        start = _now(labels.device)
        logits = model(x, tuple(blocks), key=Key(0, 0, repeat))
        nn.functional.cross_entropy(logits, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
        took = _now(labels.device) - start
        least = min(least, took) if repeat else least
        if repeat == 0 and took > _LONG_S and labels.device.type == "cpu":  # a device compiles kernels first
            return took
    return max(least, 1e-7)


def _now(device: torch.device) -> float:
    """Seconds of this thread on its processor where it computes alone, of the clock where several do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (
        time.thread_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()
    )
