"""What strategy ``pipeline`` holds on one rank, from sizes: known before the first step.

    edges         blocks of all chunks, what layers derive from them, and where their rows lie
    inputs        input rows, and what the model makes of all of them at once
    tables        rows of this epoch
    history       what they were: with a period above 1, and for layers that are computed again
    gradients     of rows, from chunk to chunk; with ``history_gradients`` those of the epoch before too
    activations   what is kept for the way back at the end of the forward pass; with ``recompute`` what is carried beside the
                  rows of all chunks, and of one chunk all else
    weights       parameters and buffers of all layers; gradients and what the optimiser keeps of those of this stage

Of several ways a stage a rank has the chunks of one: its tables and input rows are of its own rows and of its halo's, edges
count the lists of rows that it lends, and layers are computed again one by one.

What a chunk's layers keep is a line in its sizes, found by running the stage on chunks of a few rows in the same proportions
(``pipeline_probe``). Not counted: messages on their way, what lives for a moment inside an operation, and the libraries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from polyhop.comm import Collective
from polyhop.strategies.pipeline_history import History
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_probe import Laws, begun_of, bytes_of, laws_of, sizes_of
from polyhop.strategies.pipeline_stage import Stage

__all__ = ["Ledger", "ledger_of", "note", "table_bytes"]


@dataclass(frozen=True)
class Ledger:
    """Bytes on one rank."""

    edges: int
    inputs: int
    tables: int
    history: int
    gradients: int
    activations: int
    weights: int

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


def table_bytes(pieces: Pieces, span: tuple[int, int], num_rows: int) -> int:
    """Of one table for each layer of a stage that reads rows of other chunks."""
    specs = [pieces.states[layer]["h"] for layer in range(max(span[0], 1), span[1])]
    return num_rows * sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)


def ledger_of(
    stage: Stage,
    pieces: Pieces,
    model: nn.Module,
    own: Sequence[str],
    *,
    layer_by_layer: bool,
    states: int = 2,
) -> Ledger:
    """Of a stage that has not run. ``own``: names of its weights; ``states``: values that the optimiser keeps of each."""
    span, chunks, history = (stage.first, stage.stop), stage.chunks, stage.history
    held = stage.parts
    sizes = [sizes_of(stage, chunk) for chunk in chunks.numbers]
    laws: dict[object, Laws] = {}
    for size in sizes:
        if size.kind(pieces) not in laws:
            laws[size.kind(pieces)] = laws_of(stage, pieces, size, layer_by_layer=layer_by_layer)
    each = [laws[size.kind(pieces)].of(size) for size in sizes]
    made, made_grads = begun_of(stage, pieces)
    tables = table_bytes(pieces, span, chunks.num_rows)
    given = 0 if history.given is None else table_bytes(pieces, span, sum(size.num_others for size in sizes))
    again = [again for _, again, _ in each]
    return Ledger(
        edges=bytes_of(held["structure"]) + sum(derived for _, _, derived in each),
        inputs=bytes_of(held["x"]) + made,
        tables=tables,
        history=_history_bytes(history, pieces, span, tables),
        gradients=tables + given + made_grads,
        activations=sum(kept for kept, _, _ in each) + max(again, default=0),
        weights=_weight_bytes(model, own, states),
    )


def _history_bytes(history: History, pieces: Pieces, span: tuple[int, int], tables: int) -> int:
    if history.period > 1:
        return tables
    return (
        0
        if history.past is None
        else table_bytes(pieces, span, history.past.num_rows) + history.past.index_bytes
    )


def _weight_bytes(model: nn.Module, own: Sequence[str], states: int) -> int:
    named = dict(model.named_parameters())
    return bytes_of(model) + (1 + states) * sum(
        named[name].numel() * named[name].element_size() for name in own
    )


def note(found: Ledger, line: Collective) -> str:
    """The rank that needs most, in words. All ranks call it together."""
    names = [each.name for each in fields(Ledger)]
    own = torch.tensor([[getattr(found, name) for name in names]], dtype=torch.float64, device=line.device)
    every = torch.cat(line.all_gather(own, kind="sizes", counts=[1] * line.num_ranks))
    most = every[int(every.sum(1).argmax())].tolist()
    parts = ", ".join(f"{name} {value / 1e6:.1f}" for name, value in zip(names, most, strict=True))
    return f"needs up to {sum(most) / 1e6:.1f} MB a rank ({parts})"
