"""One attention layer, forward and backward, against PyG's GATConv on the device: time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch_geometric.nn import GATConv as PygConv

from benchmarks.gpu.graphs import graph_of, on_device
from benchmarks.gpu.timing import alternate, peak_gib
from benchmarks.graphs import describe
from benchmarks.harness import Figure
from polyhop.graph import Block
from polyhop.nn import GATConv

__all__ = ["run"]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``gat_vs_pyg``: 64 columns in, 4 heads of 16; half of the products graph, because PyG keeps rows per edge."""
    graph = graph_of("products?scale=0.05" if is_quick else "products?scale=0.5")
    print("  " + describe(graph), flush=True)
    block = on_device(graph)
    torch.manual_seed(1)
    ours, theirs = (make(64, 16, heads=4).cuda() for make in (GATConv, PygConv))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(graph.num_nodes, 64, device="cuda", requires_grad=True)
    grad = torch.randn(graph.num_nodes, 64, device="cuda")
    edges = torch.stack([block.indices.long(), _destinations(block.drawn)])
    sides = {
        "polyhop": _step(lambda: ours(x, block), x, grad),
        "pyg": _step(lambda: theirs(x, edges), x, grad),
    }
    _check_equal(sides, ours, block, x, grad)
    memory = {name: peak_gib(side) for name, side in sides.items()}
    times = alternate(sides, repeats=3 if is_quick else 7)
    details = ", ".join(f"{name} {times[name]} {memory[name]:.1f} GiB" for name in sides)
    details += f"; {edges.shape[1]:,} edges, and loops"
    yield Figure("gat_vs_pyg", times["pyg"].median / times["polyhop"].median, "x", details, at_least=6.0)
    yield Figure("gat_memory_vs_pyg", memory["polyhop"] / memory["pyg"], "share", details, at_most=0.2)


def _check_equal(
    sides: dict[str, Callable[[], tuple[Tensor, Tensor]]],
    ours: GATConv,
    block: Block,
    x: Tensor,
    grad: Tensor,
) -> None:
    """Same work: outputs and gradients agree with ours in float64 to float32 rounding of sums over a hub's edges."""
    wide = x.detach().double().requires_grad_()
    exact = _step(lambda: ours.double()(wide, block), wide, grad.double())()
    ours.float()
    for name, side in sides.items():
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(side(), exact, strict=True)]
        print(
            f"  {name}: off by {errors[0]:.1e} of the largest value, {errors[1]:.1e} of the gradient's",
            flush=True,
        )
        assert max(errors) < 1e-3, f"{name} computes something else"


def _destinations(degree: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(degree.numel(), device=degree.device), degree)


def _step(forward: Callable[[], Tensor], x: Tensor, grad: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    def step() -> tuple[Tensor, Tensor]:
        x.grad = None
        out = forward()
        out.backward(grad)
        assert x.grad is not None
        return out.detach(), x.grad

    return step
