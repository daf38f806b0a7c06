"""Kernels over rows: gather, scatter, dropout, quantised messages and draws, as shares of the bandwidth of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.graphs import graph_of
from benchmarks.gpu.timing import alternate, copy_bandwidth
from benchmarks.harness import Figure
from polyhop.kernels import (
    Sampler,
    dequantise_rows,
    dropout,
    gather_rows,
    quantise_rows,
    quantised_bytes,
    scatter_add_rows,
)

__all__ = ["run"]

WIDTH = 128


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``quantise_share_*`` and ``dequantise_share_*`` for 2, 4, 8 bits; the others beside."""
    num = 200_000 if is_quick else 2_449_029
    repeats = 5 if is_quick else 11
    h = torch.randn(num, WIDTH, device="cuda")
    for width in (2, 4, 8):
        bits = torch.full((num,), width, dtype=torch.uint8, device="cuda")
        message = quantise_rows(h, bits, 1)
        moved = h.numel() * 4 + quantised_bytes(bits, WIDTH)
        yield _share(f"quantise_share_{width}", lambda b=bits: quantise_rows(h, b, 1), moved, repeats, 0.6)
        yield _share(
            f"dequantise_share_{width}",
            lambda b=bits, m=message: dequantise_rows(m, b, WIDTH),
            moved, repeats, 0.6,
        )  # fmt: skip
    yield _share("dropout_share", lambda: dropout(h, None, 0.5, 7), 8 * h.numel(), repeats)
    ids = torch.randint(num, (num // 2,), device="cuda")
    moved = ids.numel() * 8 * (WIDTH + 1)
    yield _share("gather_share", lambda: gather_rows(h, ids), moved, repeats)
    rows, out = h[: ids.numel()], torch.zeros_like(h)
    moved = 4 * WIDTH * (ids.numel() + 2 * num)
    yield _share("scatter_share", lambda: scatter_add_rows(out, ids, rows), moved, repeats)
    yield from _pinned(num, repeats)
    yield from _sampler(is_quick, repeats)


def _share(
    name: str, work: Callable[[], object], moved: int, repeats: int, at_least: float | None = None
) -> Figure:
    times = alternate({"polyhop": work}, repeats=repeats)["polyhop"]
    share = moved / times.median / copy_bandwidth()
    return Figure(name, share, "share", f"{moved / 1e9:.2f} GB: {times}", at_least=at_least)


def _pinned(num: int, repeats: int) -> Iterator[Figure]:
    """Rows of the host that the device reads itself, beside a plain copy of as many bytes over the same bus."""
    host = torch.randn(num, WIDTH).pin_memory()
    ids = torch.randint(num, (num // 4,), device="cuda")
    plain = host[: ids.numel()]
    target = torch.empty(plain.shape, device="cuda")
    sides = {"polyhop": lambda: gather_rows(host, ids), "copy": lambda: target.copy_(plain)}
    times = alternate(sides, repeats=repeats)
    moved = ids.numel() * 4 * WIDTH
    details = f"{moved / times['polyhop'].median / 1e9:.1f} GB/s: {times['polyhop']}, copy {times['copy']}"
    yield Figure("pinned_gather_vs_copy", times["copy"].median / times["polyhop"].median, "x", details)


def _sampler(is_quick: bool, repeats: int) -> Iterator[Figure]:
    graph = graph_of("products?scale=0.1" if is_quick else "products")
    sampler = Sampler(graph.indptr.cuda(), graph.indices.cuda())
    seeds = torch.randperm(graph.num_nodes, device="cuda")[:1024]

    def batch() -> int:
        drawn = sampler.sample(seeds, [15, 10, 5], [1, 2, 3])
        return sum(layer.indices.numel() for layer in drawn.layers)

    edges, times = batch(), alternate({"polyhop": batch}, repeats=repeats)["polyhop"]
    details = f"1,024 seeds, fan-outs 15,10,5: {edges:,} edges, {times}"
    yield Figure("sampler_edges_per_s", edges / times.median, "1/s", details)
