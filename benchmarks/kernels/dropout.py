"""Keyed dropout against torch's, forward and backward, alone and with the ReLU that precedes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import Figure, alternate
from polyhop.kernels import dropout

__all__ = ["run"]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``dropout_vs_torch``: torch's time over ours, p = 0.5, [100 000, 256], one thread."""
    num_rows = 20_000 if is_quick else 100_000
    h = torch.randn(num_rows, 256, requires_grad=True)
    gradient = torch.randn(num_rows, 256)
    ids = torch.arange(num_rows)

    def both(op: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            h.grad = None
            op().backward(gradient)

        return step

    times = alternate(
        {
            "polyhop": both(lambda: dropout(h, ids, 0.5, 7)),
            "torch": both(lambda: functional.dropout(h, 0.5)),
            "polyhop relu": both(lambda: dropout(h, ids, 0.5, 7, relu=True)),
            "torch relu": both(lambda: functional.dropout(h.relu(), 0.5)),
        },
        repeats=9,
    )
    for kind in ("", " relu"):
        ours, theirs = times["polyhop" + kind], times["torch" + kind]
        name = "dropout_vs_torch" if not kind else "relu_dropout_vs_torch"
        yield Figure(
            name, theirs.median / ours.median, "x", f"polyhop {ours}, torch {theirs}; forward and backward"
        )
