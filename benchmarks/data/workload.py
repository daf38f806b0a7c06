"""What every side of the bench trains: one graph, one model, the same global batches; and what tells the sides apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyhop.nn import GraphSAGE
from polyhop.strategies import data

__all__ = ["FAN_OUTS", "HIDDEN", "SEED", "SIDES", "Size", "config_of", "model_of", "size_of"]

FAN_OUTS = [15, 10, 5]  # from the seeds outward
HIDDEN = 128
SEED = 0
CACHED = 0.1  # of a part's rows

# side -> options of the strategy; "cache" is a share of a part's rows
SIDES: dict[str, dict[str, Any]] = {
    "data": {},
    "cache": {"cache": CACHED},
    "bf16": {"feature_dtype": "bfloat16"},
    "both": {"cache": CACHED, "feature_dtype": "bfloat16"},
    "rpc": {"per_minibatch_rpc": True},
}


@dataclass(frozen=True)
class Size:
    """How much of it: a generator's name, steps of an epoch, epochs of each side that count, ranks."""

    graph: str
    num_steps: int
    repeats: int
    ranks: tuple[int, ...] = (2, 4)

    def batch_size(self, num_train: int) -> int:
        """Seeds of all ranks in a step, so that all steps of an epoch are nearly alike."""
        return -(-num_train // self.num_steps)


def size_of(*, is_quick: bool) -> Size:
    if is_quick:
        return Size("synth:products?scale=0.01", num_steps=4, repeats=1)
    return Size("synth:products?scale=0.05", num_steps=10, repeats=3)


def config_of(side: str, batch_size: int, part_rows: float, num_features: int) -> data.Config:
    """The strategy's options; ``part_rows``: nodes of an average part."""
    options = dict(SIDES[side])
    row_bytes = 8 + 4 * num_features  # as the cache counts them
    cache_bytes = int(options.pop("cache", 0) * part_rows) * row_bytes
    return data.Config(
        num_neighbors=FAN_OUTS, batch_size=batch_size, seed=SEED, cache_bytes=cache_bytes, **options
    )


def model_of(num_features: int, num_classes: int) -> GraphSAGE:
    """The same weights on every rank and every side."""
    torch.manual_seed(SEED)
    return GraphSAGE(num_features, HIDDEN, num_layers=len(FAN_OUTS), out_channels=num_classes, dropout=0.5)
