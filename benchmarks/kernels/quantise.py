"""Rows to few bits and back, in GB of float32 per second of CPU time, one thread."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Figure, alternate
from polyhop.kernels import dequantise_rows, quantise_rows

__all__ = ["run"]

WIDTHS = (64, 128, 256)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``quantise_gb_per_s_<bits>`` and ``dequantise_gb_per_s_<bits>``: the slowest of the widths; aim 2.

    The best of the repetitions, because the rate of a core is asked for and other work on a shared one only slows it.
    """
    size_bytes = (4 if is_quick else 32) << 20  # the larger is not in the cache
    for bits in (1, 2, 4, 8, 16, 32):
        packed, raised = {}, {}
        for width in WIDTHS:
            h = torch.randn(size_bytes // 4 // width, width)
            each = torch.full((len(h),), bits, dtype=torch.uint8)
            message, out = quantise_rows(h, each, 7), torch.empty_like(h)
            times = alternate(
                {
                    "quantise": lambda h=h, each=each: quantise_rows(h, each, 7),
                    "dequantise": lambda m=message, each=each, w=width, out=out: dequantise_rows(
                        m, each, w, out=out
                    ),
                },
                repeats=15,
                counts_cpu=True,
            )
            packed[width] = size_bytes / min(times["quantise"].seconds) / 1e9
            raised[width] = size_bytes / min(times["dequantise"].seconds) / 1e9
        aim = 2.0 if bits in (2, 4, 8) else None
        for name, rates in (("quantise", packed), ("dequantise", raised)):
            details = ", ".join(f"width {width} {rate:.2f}" for width, rate in rates.items())
            yield Figure(
                f"{name}_gb_per_s_{bits}bit",
                min(rates.values()),
                "GB/s",
                f"one thread; {details}",
                at_least=aim,
            )
