"""What strategy ``halo`` needs of memory on one rank, from shapes: known before the first step.

    edges         of all layers' blocks, also grouped by source where the backward pass sums along them
    inputs        input rows, those of the halo with them; or sums of them
    halo          rows of other ranks that are here at a time; with ``recompute`` what is kept of all layers' messages;
                  with bits="delta" what both ends keep of them
    activations   what autograd keeps at the end of the forward pass
    weights       parameters, gradients and what the optimiser keeps
    buffers       messages that leave and arrive in one exchange, and gradients on their way

What autograd keeps follows from the model (``halo_probe``). Not counted: what lives for a moment inside an operation, the
loss, evaluation, and the libraries themselves.

Legend: n own rows, c central rows, H halo rows, S sources, E edges, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.exchange import Lists
from polyhop.graph import Block, HaloBlock, Sizes
from polyhop.graph.aggregated import AggregatedRows
from polyhop.nn.rows import Rows
from polyhop.strategies.halo_probe import Kept, LayerSizes, kept_by_layers, tensors_of

__all__ = [
    "Ledger",
    "Means",
    "edge_bytes",
    "ledger",
    "ledger_of",
    "note",
    "row_bytes",
]

_EDGE_BYTES = 4  # of an edge's place, in edges grouped by source
_HELD_BYTES = 4  # of a value that both ends keep


@dataclass(frozen=True)
class Means:
    """How the run goes about it."""

    bits: int = 32  # of a value that crosses; the widest, where they differ
    value_bytes: int = 4
    depth: int | None = None  # of a sequential halo: rounds ahead; None: all ranks' rows come at once
    recompute: bool = False
    holds: bool = False  # both ends keep every row as it crossed last, both ways
    num_parameters: int = 0
    states: int = 2  # values that the optimiser keeps of each parameter


@dataclass(frozen=True)
class Ledger:
    """Bytes on one rank."""

    edges: float
    inputs: float
    halo: float
    activations: float
    weights: float
    buffers: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, each.name) for each in fields(self)))


def ledger(
    layers: Sequence[LayerSizes],
    saved: Sequence[Kept],
    carried: Sequence[Kept],
    means: Means,
    *,
    edges: float,
    inputs: float,
) -> Ledger:
    """``saved``: what autograd keeps of each layer, and last of what is before and after them; ``carried``: of the rows that
    a layer is given, input rows left out.
    """
    whole = [sum(each.wanted) * each.columns * means.value_bytes for each in layers]
    messages = [_largest(each, means) for each in layers]
    halo = float(max(whole, default=0))
    if means.depth is not None:
        shards = (max(each.wanted, default=0) * each.columns for each in layers)
        halo = float((1 + means.depth) * means.value_bytes * max(shards, default=0))
    *each_saved, around = saved
    kept = [kept.of(sizes) for kept, sizes in zip(each_saved, layers, strict=True)]
    beside = around.of(layers[0])
    activations = beside + sum(kept)
    if means.recompute:
        given = sum(kept.of(sizes) for kept, sizes in zip(carried, layers, strict=True))
        activations = beside + given + max(kept, default=0.0)
        halo += sum(_replayed(each, means) for each in layers)
    if means.holds:
        crossing = (each.columns * (sum(each.wanted) + sum(each.leaving)) for each in layers)
        halo += 2 * _HELD_BYTES * sum(crossing)
    weights = means.num_parameters * means.value_bytes
    buffers = max(messages, default=0.0) + weights
    return Ledger(edges, inputs, halo, activations, weights * (2 + means.states), buffers)


def ledger_of(
    model: nn.Module,
    x: Rows | AggregatedRows,
    blocks: Sequence[Block],
    lists: Sequence[Lists],
    columns: Sequence[int],
    means: Means,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Ledger:
    """Of a step with these input rows, blocks and lists; ``columns`` cross at each layer, 0 at those that bring nothing."""
    plain = [not isinstance(block, HaloBlock) for block in blocks]
    through = next((block for block in blocks if isinstance(block, HaloBlock)), None)
    saved, carried, grouped = kept_by_layers(
        model,
        int(x.shape[1]),
        Sizes(0, 0, 0) if through is None else through.sizes,
        num_plain=sum(plain),
        has_sums=[_num_sums(block) > 0 for block in blocks],
        sends_narrow=through is None or through.sends_narrow,
        in_shards=means.depth is not None,
        kind=type(x),
        dtype=x.dtype,
        context=context,
    )
    layers = [
        LayerSizes(
            0 if is_plain else block.central.num_dst,  # type: ignore[attr-defined]
            block.num_dst if is_plain else block.marginal.num_dst,  # type: ignore[attr-defined]
            each.wanted,
            each.leaving("forward"),
            block.num_edges,
            width,
            _num_sums(block),
        )
        for is_plain, block, each, width in zip(plain, blocks, lists, columns, strict=True)
    ]
    return ledger(layers, saved, carried, means, edges=edge_bytes(blocks, grouped), inputs=_rows_bytes(x))


def _num_sums(block: Block) -> int:
    return block.sums.at.numel() if isinstance(block, HaloBlock) and block.sums is not None else 0


def row_bytes(columns: int, bits: int, value_bytes: int) -> int:
    """Of one row on its way."""
    if bits >= 32:
        return columns * value_bytes
    return -(-columns * bits // 8) + (4 if bits < 16 else 0)


def _largest(sizes: LayerSizes, means: Means) -> float:
    """Messages of one exchange: all ranks', or those of the rounds that are under way."""
    row = row_bytes(sizes.columns, means.bits, means.value_bytes) if sizes.columns else 0
    if means.depth is None:
        return float(row * (sum(sizes.wanted) + sum(sizes.leaving)))
    return float((1 + means.depth) * row * (max(sizes.wanted, default=0) + max(sizes.leaving, default=0)))


def _replayed(sizes: LayerSizes, means: Means) -> float:
    """What a channel keeps of a layer for a second forward pass: messages, or, of a sequential halo, their sums."""
    if not sizes.columns:
        return 0.0
    if means.depth is not None:
        return float(sizes.num_marginal * sizes.columns * means.value_bytes)
    return float(sum(sizes.wanted) * row_bytes(sizes.columns, means.bits, means.value_bytes))


def edge_bytes(blocks: Iterable[Block], grouped: Sequence[bool]) -> int:
    """Of the blocks' tensors and of their edges grouped by source, where ``grouped`` says that a layer needs these."""
    seen: dict[int, int] = {}
    more = 0
    for block, is_grouped in zip(blocks, grouped, strict=True):
        pieces: list[Any] = [block]
        if isinstance(block, HaloBlock):
            pieces += [block.central, block.marginal, block.sums, block.own, *(block.shards or ())]
        for piece in pieces:
            tensors = [] if piece is None else [t for t in vars(piece).values() if isinstance(t, Tensor)]
            seen |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        more += sum(_grouped_bytes(piece) for piece in _summed(block)) if is_grouped else 0
    return sum(seen.values()) + more


def _summed(block: Block) -> list[tuple[int, Tensor]]:
    """(sources, edges' sources) of everything that a layer sums along."""
    if not isinstance(block, HaloBlock):
        return [(block.num_src, block.indices)]
    found = [(block.central.num_src, block.central.indices)]
    if block.shards is None or block.own is None:
        found.append((block.marginal.num_src, block.marginal.indices))
    else:
        found.append((block.own.num_src, block.own.indices))
        found += [(each.stop - each.start, each.indices) for each in block.shards]
    if block.sums is not None:
        found.append((block.sums.num_own, block.sums.indices))
    return found


def _grouped_bytes(summed: tuple[int, Tensor]) -> int:
    num_src, indices = summed
    return 8 * (num_src + 1) + indices.numel() * (indices.element_size() + _EDGE_BYTES)


def _rows_bytes(rows: Rows | AggregatedRows) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_of(rows))


def note(found: Ledger, line: Collective) -> str:
    """The rank that needs most, in words. All ranks call it together."""
    names = [each.name for each in fields(Ledger)]
    own = torch.tensor([[getattr(found, name) for name in names]], dtype=torch.float64, device=line.device)
    every = torch.cat(line.all_gather(own, kind="sizes", counts=[1] * line.num_ranks))
    most = every[int(every.sum(1).argmax())].tolist()
    parts = ", ".join(f"{name} {value / 1e6:.1f}" for name, value in zip(names, most, strict=True))
    return f"needs up to {sum(most) / 1e6:.1f} MB a rank ({parts})"
