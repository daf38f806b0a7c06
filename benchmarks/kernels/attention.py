"""One attention layer (projection, edge softmax, weighted sum), forward and backward, against DGL and PyG."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks import dgl_side, pyg_side
from benchmarks.graphs import describe, synth
from benchmarks.harness import Figure, alternate
from polyhop.graph import Block, Graph
from polyhop.nn import GATConv

__all__ = ["run"]

IN, OUT, HEADS = 128, 32, 4  # 4 heads of 32 channels, concatenated to 128


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``gat_vs_dgl`` and ``gat_vs_pyg`` at the largest scale PyG fits in memory here (it keeps several [E, 128] arrays)."""
    graph = synth(f"synth:products?scale={0.005 if is_quick else 0.03}&features=0")
    print("  " + describe(graph), flush=True)
    sides = _sides(graph, with_pyg=True)
    times = alternate(sides, repeats=3 if is_quick else 5)
    for name, time in times.items():
        print(f"  {name}: {time}", flush=True)
    ours = times["polyhop"].median
    pyg = min(times["pyg edge-index"].median, times["pyg sorted"].median)
    details = f"{HEADS} heads of {OUT}, {graph.num_edges:,} edges and {graph.num_nodes:,} loops; polyhop {ours:.3f} s"
    yield Figure(
        "gat_vs_dgl", times["dgl"].median / ours, "x", details + f", dgl {times['dgl']}", at_least=1.5
    )
    yield Figure("gat_vs_pyg", pyg / ours, "x", details + f", pyg {pyg:.3f} s", at_least=4)
    if not is_quick:
        yield from _large()


def _large() -> Iterator[Figure]:
    """The same against DGL alone on a graph whose [E, 128] arrays (6 GiB each) PyG cannot hold here."""
    graph = synth("synth:products?scale=0.1&features=0")
    times = alternate(_sides(graph, with_pyg=False), repeats=3, warm_up=False)
    details = f"{graph.num_edges:,} edges; polyhop {times['polyhop']}, dgl {times['dgl']}"
    yield Figure("gat_vs_dgl_large", times["dgl"].median / times["polyhop"].median, "x", details)


def _sides(graph: Graph, *, with_pyg: bool) -> dict[str, Callable[[], Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes, IN, requires_grad=True)
    gradient = torch.randn(graph.num_nodes, HEADS * OUT)
    block = Block(graph.indptr, graph.indices, graph.num_nodes)
    block.transposed()
    ours, theirs, dgl_conv = (
        GATConv(IN, OUT, heads=HEADS),
        pyg_side.gat(IN, OUT, HEADS),
        dgl_side.gat(IN, OUT, HEADS),
    )
    ours.load_state_dict(theirs.state_dict())
    dgl_side.load_gat(dgl_conv, theirs.state_dict())
    made = dgl_side.graph(graph, loops=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "polyhop": _both(ours, lambda: ours(x, block), x, gradient),
        "dgl": _both(dgl_conv, lambda: dgl_conv(made, x).flatten(1), x, gradient),
    }
    if with_pyg:
        for name, is_cached in (("pyg edge-index", True), ("pyg sorted", False)):
            edges = pyg_side.gat_edges(graph, is_cached=is_cached)
            calls[name] = _both(theirs, lambda e=edges: theirs(x, e), x, gradient)
    _check_equal(calls, x)
    return calls


def _both(
    model: nn.Module, forward: Callable[[], Tensor], x: Tensor, gradient: Tensor
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad()
        x.grad = None
        out = forward()
        out.backward(gradient)
        return out.detach()

    return step


def _check_equal(calls: dict[str, Callable[[], Tensor]], x: Tensor) -> None:
    """Same work: outputs and input gradients of all sides agree to float32 rounding."""
    expected, expected_gradient = calls["polyhop"](), x.grad
    for name, call in calls.items():
        for ours, theirs in ((expected, call()), (expected_gradient, x.grad)):
            error = float((ours - theirs).abs().max() / ours.abs().max())
            assert error < 1e-3, f"{name} differs from polyhop by {error:.1e} of the largest value"
