"""Row gather in GB/s, against torch's index_select and the copy bandwidth of the same memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.harness import Figure, alternate, copy_bandwidth
from polyhop.kernels import gather_rows

__all__ = ["run"]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``gather_gb_per_s`` (float32 rows of 100, bytes read and written), ``gather_vs_torch``; other dtypes beside."""
    num_rows, wanted = (200_000, 50_000) if is_quick else (2_000_000, 400_000)
    ids = torch.randint(num_rows, (wanted,), generator=torch.Generator().manual_seed(0))
    bandwidth = copy_bandwidth(1)
    for width in (100, 256):
        values = torch.randn(num_rows, width)
        small = {"bfloat16": values.bfloat16(), "int8": values.mul(20).clamp(-127, 127).to(torch.int8)}
        times = alternate(
            {
                "polyhop": lambda v=values: gather_rows(v, ids),
                "torch": lambda v=values: torch.index_select(v, 0, ids),
                **{kind: lambda v=stored: gather_rows(v, ids) for kind, stored in small.items()},
            },
            repeats=9,
        )
        moved = 2 * wanted * width * 4
        rate = moved / times["polyhop"].median
        suffix = "" if width == 100 else f"_{width}"
        others = ", ".join(f"{kind} rows {times[kind]}" for kind in small)
        details = f"width {width}, one thread, {rate / bandwidth:.2f} of copy's {bandwidth / 1e9:.1f} GB/s; {others}"
        yield Figure(f"gather_gb_per_s{suffix}", rate / 1e9, "GB/s", details)
        ratio = times["torch"].median / times["polyhop"].median
        yield Figure(
            f"gather_vs_torch{suffix}", ratio, "x", f"polyhop {times['polyhop']}, torch {times['torch']}"
        )
