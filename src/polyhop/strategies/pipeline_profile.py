"""What each layer of a model costs, measured: seconds forward and backward on one chunk, before the stages are cut.

One rank measures while the others wait, and tells all, so all cut alike. Layers of the same widths and weights are measured
once. The chunk is the one of median edges; its input rows are rows of the graph (sparse ones, where they are), others random
numbers; nothing is dropped, no gradient is left behind.

Where nothing is to be gained from it costs are counted instead (``Pieces.costs``): chunks so small that calls cost more than
what they compute; and runs whose result depends on where stages are cut (to the bit), which are to be repeatable.

Legend: n rows of a chunk, o rows of others that it reads, L layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import ConfigError, unknown
from polyhop.graph import Block
from polyhop.nn.counts import quiet
from polyhop.nn.model import Model
from polyhop.nn.rows import Rows
from polyhop.strategies.pipeline_chunks import Chunks
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.step import Placement

__all__ = ["LAYER_COSTS", "cut_matters", "is_measured", "measured_costs"]

LAYER_COSTS = ("auto", "counted", "measured")
"""What stages are balanced by."""

_LEAST_PRODUCTS = 1e7  # multiply-adds of a layer on one chunk, forward and backward: about a millisecond
_REPEATS = 3
_LONG_S = 0.5  # a layer that takes so long is not measured again

Clock = Callable[[], float]
Inputs = Callable[[int], Rows]
"""So many input rows like those of the graph."""


def is_measured(wish: str, costs: Sequence[float], num_chunks: int, *, cut_matters: bool) -> bool:
    """Whether to measure. ``costs``: counted, of all chunks; ``cut_matters``: results depend on where stages are cut."""
    if wish not in LAYER_COSTS:
        raise ConfigError(unknown("layer costs", wish, LAYER_COSTS))
    if wish != "auto":
        return wish == "measured"
    return not cut_matters and sum(costs) >= _LEAST_PRODUCTS * len(costs) * num_chunks


def cut_matters(pieces: Pieces, bits: int) -> bool:
    """Whether results depend on where stages are cut: rows rounded there, sums over stages, or in another order."""
    carried = {name for state in pieces.states[:-1] for name in state} - {"h"}
    return bits != 32 or bool(pieces.local) or not carried <= set(pieces.begun)


def measured_costs(
    model: Model,
    pieces: Pieces,
    inputs: Inputs,
    chunks: Chunks,
    placement: Placement,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Seconds of each layer; the first with what begins a model, the last with what ends it."""
    chunk = sorted(chunks.chunks, key=lambda each: each.block.num_edges)[len(chunks.chunks) // 2]
    block = placement.block(chunk.block)
    found: dict[Any, float] = {}
    costs = []
    with torch.enable_grad(), quiet(model):
        for layer in range(model.num_layers):
            alike = _alike(model, pieces, layer)
            if alike not in found:
                rows = _rows(pieces.states[layer], block.num_src, block.num_dst, placement)
                if layer == 0 and not pieces.used[0]:
                    rows = {"h": placement.rows(inputs(block.num_src))}
                found[alike] = _layer_s(model, layer, block, rows, placement, clock, bool(pieces.used[0]))
            costs.append(found[alike])
        ids = block.dst_ids()
        ends = _rows(pieces.states[-1], block.num_dst, block.num_dst, placement)
        if pieces.used[0]:
            x = placement.rows(inputs(block.num_dst))
            costs[0] += _least_s(model, placement, clock, lambda: dict(model.begin(x, ids=ids)), [])
        given = [value.requires_grad_() for value in ends.values() if value.is_floating_point()]

        def finish() -> dict[str, Any]:
            last = model.dropped(model.num_layers - 1, dict(ends), ids=ids)
            return {"h": model.finish(last, ids=ids)}

        costs[-1] += _least_s(model, placement, clock, finish, given)
    return costs


def _alike(model: Model, pieces: Pieces, layer: int) -> object:
    """The same for layers that cost the same."""
    named = dict(model.named_parameters())
    weights = sorted(tuple(named[name].shape) for name in pieces.used[layer + 1])
    before, after = (tuple(sorted(pieces.states[at].items(), key=str)) for at in (layer, layer + 1))
    return min(layer, 1), str(before), str(after), tuple(weights)


def _layer_s(
    model: Model,
    layer: int,
    block: Block,
    state: dict[str, Any],
    placement: Placement,
    clock: Clock,
    has_begun: bool,
) -> float:
    given = [value.requires_grad_() for value in state.values()] if layer or has_begun else []

    def forward() -> dict[str, Any]:
        rows: Any = dict(state)
        dropped = model.dropped(layer - 1, rows, ids=block.src_ids) if layer else rows
        return dict(model.undropped(layer, block, dropped))

    return _least_s(model, placement, clock, forward, given)


def _least_s(
    model: Model,
    placement: Placement,
    clock: Clock,
    forward: Callable[[], dict[str, Any]],
    given: Sequence[Tensor],
) -> float:
    """Seconds of something and of its gradients, the least of some times; the first time is not counted."""
    weights = [p for p in model.parameters() if p.requires_grad]
    least = float("inf")
    for repeat in range(1 + _REPEATS):
        start = _now(placement, clock)
        with placement.context():
            made = [
                value for value in forward().values() if isinstance(value, Tensor) and value.requires_grad
            ]
        if made:
            ones = [torch.ones_like(value) for value in made]
            torch.autograd.grad(made, [*given, *weights], ones, allow_unused=True)
        took = _now(placement, clock) - start
        if repeat:
            least = min(least, took)
        if took > _LONG_S:
            return min(least, took)
    return least


def _now(placement: Placement, clock: Clock) -> float:
    if placement.device.type == "cuda":
        torch.cuda.synchronize(placement.device)
    return clock()


def _rows(state: dict[str, Any], num_src: int, num_dst: int, placement: Placement) -> dict[str, Any]:
    rng = _drawn()
    return {
        name: torch.randn(num_src if name == "h" else num_dst, *shape, generator=rng).to(
            placement.device, dtype
        )
        for name, (shape, dtype) in state.items()
    }


def _drawn() -> torch.Generator:
    """Numbers of its own, so that a run draws the same with and without."""
    return torch.Generator().manual_seed(0)
