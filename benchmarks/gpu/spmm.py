"""Sum, weighted sum and mean over in-edges, forward and backward, against torch's CSR product on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.graphs import graph_of, on_device
from benchmarks.gpu.timing import Times, alternate, copy_bandwidth, versions
from benchmarks.graphs import describe
from benchmarks.harness import Figure
from polyhop.graph import Block
from polyhop.kernels import aggregate

__all__ = ["run"]

Product = Callable[[Tensor], Tensor]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``spmm_bandwidth_share`` at widths 128 and 256 and ``spmm_vs_torch`` over sum, weighted and mean."""
    graph = graph_of("products?scale=0.1" if is_quick else "products")
    print("  " + describe(graph), flush=True)
    block, repeats = on_device(graph), 5 if is_quick else 11
    bandwidth = copy_bandwidth()
    yield Figure("copy_bandwidth", bandwidth / 1e9, "GB/s", versions())
    weight = torch.rand(graph.num_edges, device="cuda") + 0.5
    mean = block.drawn.clamp(min=1).float().reciprocal()
    kinds: dict[str, tuple[Product, Tensor]] = {
        "sum": (lambda h: aggregate(block, h), torch.ones_like(weight)),
        "weighted": (lambda h: aggregate(block, h, edge_weight=weight), weight),
        "mean": (lambda h: aggregate(block, h, dst_scale=mean), mean.repeat_interleave(block.drawn)),
    }
    ratios = []
    for width in (128, 256):
        h, grad = (torch.randn(graph.num_nodes, width, device="cuda") for _ in range(2))
        h.requires_grad_()
        for kind, (ours, values) in kinds.items():
            sides = {"polyhop": ours, "torch": _torch_product(block, values)}
            _check_equal(sides, h, grad)
            if kind == "sum":
                forward = alternate(
                    {name: _forward(side, h) for name, side in sides.items()}, repeats=repeats
                )
                yield from _shares(graph.num_nodes, graph.num_edges, width, forward, bandwidth)
            times = alternate({name: _both(side, h, grad) for name, side in sides.items()}, repeats=repeats)
            ratios.append(times["torch"].median / times["polyhop"].median)
            details = f"forward and backward: polyhop {times['polyhop']}, torch CSR {times['torch']}"
            yield Figure(f"spmm_vs_torch_{kind}_{width}", ratios[-1], "x", details)
    _print_other_widths(block, bandwidth, repeats)
    details = f"geometric mean of sum, weighted, mean at widths 128 and 256, least {min(ratios):.3f}"
    yield Figure("spmm_vs_torch", math.prod(ratios) ** (1 / len(ratios)), "x", details, at_least=1.1)


def _print_other_widths(block: Block, bandwidth: float, repeats: int) -> None:
    """What rows of other widths take, those of 47 columns unaligned, with 8 and 16 of them read at a time."""
    from polyhop.kernels.triton import spmm

    usual = spmm._EDGES
    for width in (47, 48, 64, 100):
        h, found = torch.randn(block.num_src, width, device="cuda"), []
        for at_a_time in (8, 16):
            spmm._EDGES = at_a_time
            times = alternate({"sum": lambda h=h: aggregate(block, h)}, repeats=repeats)["sum"]
            found.append(f"{at_a_time} at a time {times}")
        moved = block.num_edges * (4 * width + 4) + block.num_dst * (4 * width + 8)
        print(f"  width {width}, copied in {moved / bandwidth * 1e3:.2f} ms: {', '.join(found)}", flush=True)
    spmm._EDGES = usual


def _torch_product(block: Block, values: Tensor) -> Product:
    """torch's CSR product with 32-bit ids, the transposed matrix made ahead of time: its fastest way."""
    turned, size = block.transposed(), (block.num_dst, block.num_src)
    forward = torch.sparse_csr_tensor(block.indptr.int(), block.indices.int(), values, size)
    backward = torch.sparse_csr_tensor(
        turned.indptr.int(), turned.indices.int(), values[turned.edge.long()], size[::-1]
    )

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, h: Tensor) -> Tensor:
            return forward @ h

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return backward @ grad

    return Product.apply


def _forward(product: Product, h: Tensor) -> Callable[[], Tensor]:
    fixed = h.detach()
    return lambda: product(fixed)


def _both(product: Product, h: Tensor, grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        h.grad = None
        product(h).backward(grad)

    return step


def _check_equal(sides: dict[str, Product], h: Tensor, grad: Tensor) -> None:
    """Same work: outputs and gradients agree to float32 rounding of sums of thousands of terms."""
    found = []
    for product in sides.values():
        h.grad = None
        out = product(h)
        out.backward(grad)
        assert h.grad is not None
        found.append((out.detach(), h.grad))
    for ours, theirs in zip(*found, strict=True):
        error = float((ours - theirs).abs().max() / ours.abs().max())
        assert error < 1e-4, f"torch differs from polyhop by {error:.1e} of the largest value"


def _shares(
    num_nodes: int, num_edges: int, width: int, times: dict[str, Times], bandwidth: float
) -> Iterator[Figure]:
    """Bytes per second over copy bandwidth if every edge reads its row from memory; above 1: caches served many."""
    moved = num_edges * (4 * width + 4) + num_nodes * (4 * width + 8)
    for side, name in (
        ("polyhop", f"spmm_bandwidth_share_{width}"),
        ("torch", f"torch_bandwidth_share_{width}"),
    ):
        share = moved / times[side].median / bandwidth
        details = f"forward, {moved / 1e9:.1f} GB: {side} {times[side]}"
        yield Figure(name, share, "share", details, at_least=0.85 if side == "polyhop" else None)
