"""Layers computed again in the backward pass: of each layer only its input is kept, and what arrived from other ranks.

Nothing is exchanged twice: the second time a channel hands out what it got the first time (few-bit messages are kept as they
came, and decoded again), BatchNorm uses the statistics that were found. Dropout is keyed by ids, so the second pass has the
same bits as the first, and so have the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from polyhop.exchange.batch_norm import KeptStatistics
from polyhop.exchange.crossing import Crossing
from polyhop.graph import Block

__all__ = ["recomputed"]


@contextmanager
def recomputed(
    model: nn.Module, channels: Mapping[int, Crossing], statistics: KeptStatistics
) -> Iterator[None]:
    """Inside, a forward pass of the model keeps nothing of what happens in its layers. ``channels``: by layer.

    The model gets a ``layer`` of its own as an attribute, which is deleted on leaving, so it must call ``self.layer``.
    """
    plain: Any = model.layer

    def layer(index: int, block: Block, state: dict[str, Any], **given: Any) -> Any:
        def contexts() -> tuple[Any, Any]:
            return statistics.first(index), _again(index, channels.get(index), statistics)

        return checkpoint(plain, index, block, state, use_reentrant=False, context_fn=contexts, **given)

    vars(model)["layer"] = layer
    try:
        yield
    finally:
        del vars(model)["layer"]


@contextmanager
def _again(index: int, channel: Crossing | None, statistics: KeptStatistics) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(statistics.again(index))
        if channel is not None:
            stack.enter_context(channel.replayed())
        yield
