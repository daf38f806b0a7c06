"""What a model's ``begin`` gives to all layers (GCNII's h0): sent from stage to stage, or made anew by every stage.

Sent, it crosses every boundary with the rows, and its gradients cross back. Made anew, every stage holds the input rows and
computes ``begin`` of all of them; the gradients of its weights are summed over stages in every step. Of several ways each
does so with its own rows. For each stage beyond the first, a step, with n nodes, F input columns, C columns of what is
shared, w bytes of these on the wire, W weights of ``begin``, D ways:

    sent         2 n w bytes
    made anew    2 n F C multiply-adds (forward, gradient of the weights) and 2 D b W bytes

``auto`` makes it anew where that saves a megabyte a step at least, and a byte for every MACS_PER_BYTE multiply-adds. Both
sides grow alike with the stages, so the choice does not depend on their number. Sparse input rows count as dense ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from polyhop.errors import ConfigError, unknown
from polyhop.strategies.pipeline_messages import row_bytes
from polyhop.strategies.pipeline_pieces import Pieces

__all__ = ["MACS_PER_BYTE", "SHARED_ROWS", "Sharing", "divided", "makes_anew"]

SHARED_ROWS = ("auto", "send", "recompute")
"""What is to be done."""

MACS_PER_BYTE = 200
"""A core that does 25 thousand million multiply-adds a second, and a link of 1 Gbit/s."""

_LEAST_BYTES = 1_000_000  # below that it is the number of messages that costs, and that stays


@dataclass(frozen=True)
class Sharing:
    """What the choice depends on."""

    num_nodes: int
    num_features: int
    columns: int  # of what is shared
    row_bytes: int  # of these in one message
    num_weights: int  # of begin
    value_bytes: int = 4
    num_ways: int = 1

    @property
    def saved_bytes(self) -> int:
        """A step and stage, where it is made anew."""
        return 2 * self.num_nodes * self.row_bytes - 2 * self.num_ways * self.value_bytes * self.num_weights

    @property
    def products(self) -> int:
        """Multiply-adds a step and stage that this costs."""
        return 2 * self.num_nodes * self.num_features * self.columns


def makes_anew(wish: str, sharing: Sharing) -> bool:
    """Whether every stage makes it anew."""
    if wish not in SHARED_ROWS:
        raise ConfigError(unknown("shared rows", wish, SHARED_ROWS))
    if wish != "auto":
        return wish == "recompute"
    saved = sharing.saved_bytes
    return saved >= _LEAST_BYTES and sharing.products <= MACS_PER_BYTE * saved


def divided(
    pieces: Pieces,
    model: nn.Module,
    num_nodes: int,
    num_features: int,
    wish: str,
    bits: int,
    num_ways: int = 1,
) -> Pieces:
    """The same with what every stage makes for itself, if that is wished or cheaper."""
    if not pieces.begun:
        return pieces
    specs = [pieces.states[0][name] for name in pieces.begun]
    names = frozenset().union(*pieces.begun.values())
    weights = [p for name, p in model.named_parameters() if name in names]
    sharing = Sharing(
        num_nodes,
        num_features,
        sum(math.prod(shape) for shape, _ in specs),
        sum(row_bytes(math.prod(shape), bits, dtype.itemsize) for shape, dtype in specs),
        sum(p.numel() for p in weights),
        max((p.element_size() for p in weights), default=4),
        num_ways,
    )
    return replace(pieces, local=frozenset(pieces.begun)) if makes_anew(wish, sharing) else pieces
