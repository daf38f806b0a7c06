"""Sum over in-edges, forward and backward, against torch's sparse matrices and DGL."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import dgl_side, torch_side
from benchmarks.graphs import describe, synth
from benchmarks.harness import Figure, Timing, alternate, copy_bandwidth
from polyhop.graph import Block, Graph
from polyhop.kernels import aggregate

__all__ = ["run"]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``spmm_vs_torch``, ``spmm_vs_dgl`` (geometric mean over widths 128 and 256), ``spmm_bandwidth_share``."""
    graph = synth(f"synth:products?scale={0.02 if is_quick else 0.2}&features=0")
    print("  " + describe(graph), flush=True)
    sides = _sides(graph)
    bandwidth = copy_bandwidth(int(os.environ["OMP_NUM_THREADS"]))
    ratios: dict[str, list[float]] = {"torch": [], "dgl": []}
    for width in (128, 256):
        times = _fastest_of_each(sides, graph.num_nodes, width, repeats=3 if is_quick else 5)
        for peer, collected in ratios.items():
            collected.append(times[peer].median / times["polyhop"].median)
            yield Figure(
                f"spmm_vs_{peer}_{width}",
                collected[-1],
                "x",
                f"polyhop {times['polyhop']}, {peer} {times[peer]}",
            )
        yield _share(graph, width, times["polyhop"].median, bandwidth)
    details = "forward and backward, geometric mean of widths 128 and 256"
    yield Figure("spmm_vs_torch", math.prod(ratios["torch"]) ** 0.5, "x", details, at_least=2.2)
    yield Figure("spmm_vs_dgl", math.prod(ratios["dgl"]) ** 0.5, "x", details, at_least=1.2)


def _sides(graph: Graph) -> dict[str, dict[str, Callable[[Tensor], Tensor]]]:
    block = Block(graph.indptr, graph.indices, graph.num_nodes)
    block.transposed()
    kinds = (torch.int32, torch.int64)
    return {
        "polyhop": {"native": lambda h: aggregate(block, h)},
        "torch": torch_side.torch_sums(graph),
        "dgl": {str(kind): dgl_side.copy_sum(dgl_side.graph(graph, dtype=kind)) for kind in kinds},
    }


def _fastest_of_each(
    sides: dict[str, dict[str, Callable[[Tensor], Tensor]]], num_nodes: int, width: int, *, repeats: int
) -> dict[str, Timing]:
    """Time every way of every side once or twice, then the fastest of each, alternating."""
    h = torch.randn(num_nodes, width, requires_grad=True)
    gradient = torch.randn(num_nodes, width)

    def both(op: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        def step() -> Tensor:
            h.grad = None
            out = op(h)
            out.backward(gradient)
            return out.detach()

        return step

    chosen: dict[str, Callable[[], Tensor]] = {}
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for side, ways in sides.items():
        seconds = {}
        for way, op in ways.items():
            out = both(op)()
            results[side] = (out, h.grad)
            start = time.perf_counter()
            both(op)()
            seconds[way] = time.perf_counter() - start
        best = min(seconds, key=seconds.__getitem__)
        chosen[side] = both(ways[best])
        print(
            f"  width {width} {side}: " + ", ".join(f"{way} {s:.3f} s" for way, s in seconds.items()),
            flush=True,
        )
    _check_equal(results)
    del results
    return alternate(chosen, repeats=repeats)


def _check_equal(results: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Same work: outputs and gradients of all sides agree to float32 rounding of sums of thousands of terms."""
    for side, (out, gradient) in results.items():
        for ours, theirs in zip(results["polyhop"], (out, gradient), strict=True):
            error = float((ours - theirs).abs().max() / ours.abs().max())
            assert error < 1e-4, f"{side} differs from polyhop by {error:.1e} of the largest value"


def _share(graph: Graph, width: int, seconds: float, bandwidth: float) -> Figure:
    """Bytes per second over copy bandwidth if every edge reads its row from memory; above 1: caches served many."""
    row = 4 * width
    per_pass = graph.num_edges * (row + 4) + graph.num_nodes * (row + 8)
    least = graph.num_nodes * 2 * row + graph.num_edges * 4 + graph.num_nodes * 8
    details = (
        f"{2 * per_pass / 1e9:.1f} GB with each edge reading its row, copy {bandwidth / 1e9:.1f} GB/s; reading each row "
        f"once ({2 * least / 1e9:.2f} GB) would be {2 * least / seconds / bandwidth:.3f}"
    )
    name = "spmm_bandwidth_share" if width == 128 else f"spmm_bandwidth_share_{width}"
    return Figure(name, 2 * per_pass / seconds / bandwidth, "share", details)
