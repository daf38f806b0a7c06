"""A full-graph epoch (forward, backward, update) on the device, against PyG's fastest path: time and peak memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, SAGEConv

from benchmarks.gpu.graphs import graph_of, on_device
from benchmarks.gpu.timing import Times, alternate, kernel_times, peak_gib
from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.pyg_side import Gcn
from polyhop.graph import Block, Graph
from polyhop.nn import GAT, GCN, GraphSAGE

__all__ = ["run"]

LAYERS, HIDDEN = 3, 256
FEATURES = {"products": 100, "reddit": 602}
LAYOUTS = ("csr", "csr32", "csc")
Epoch = Callable[[], float]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``fullgraph_vs_pyg`` and ``peak_memory_vs_pyg``: GCN and SAGE, 3 layers of 256; GAT of 64 on half of a graph."""
    ratios, shares = [], []
    for name in ("products",) if is_quick else ("products", "reddit"):
        graph = graph_of(name + ("?scale=0.05" if is_quick else ""))
        print("  " + describe(graph), flush=True)
        for model in ("gcn", "sage"):
            sides = _sides(graph, model, FEATURES[name])
            memory, times, kernels = _measure(sides, 2 if is_quick else 5)
            peer = min((kind for kind in LAYOUTS if kind in times), key=lambda kind: times[kind].median)
            _print_kernels(model, kernels, "polyhop", peer)
            details = ", ".join(f"{side} {times[side]} {memory[side]:.2f} GiB" for side in times)
            details += f"; {graph.num_edges:,} edges"
            ratios.append(times[peer].median / times["polyhop"].median)
            shares.append(memory["polyhop"] / memory[peer])
            yield Figure(f"fullgraph_vs_pyg_{model}_{name}", ratios[-1], "x", details)
            yield Figure(f"peak_memory_vs_pyg_{model}_{name}", shares[-1], "share", details)
    details = "geometric mean of GCN and SAGE, each against PyG's fastest matrix layout; least "
    figure = math.prod(ratios) ** (1 / len(ratios))
    yield Figure("fullgraph_vs_pyg", figure, "x", f"{details}{min(ratios):.3f}", at_least=1.8)
    yield Figure("peak_memory_vs_pyg", max(shares), "share", "the largest of the models'", at_most=0.8)
    yield from _gat(is_quick)


def _sides(graph: Graph, model: str, features: int) -> dict[str, Callable[[], Epoch]]:
    def peer(layout: str) -> Callable[[], Epoch]:
        return lambda: _pyg(graph, model, layout, features)

    return {"polyhop": lambda: _ours(graph, model, features), **{layout: peer(layout) for layout in LAYOUTS}}


def _gat(is_quick: bool) -> Iterator[Figure]:
    graph = graph_of("products?scale=0.05" if is_quick else "products?scale=0.5")
    print("  " + describe(graph), flush=True)
    sides = {"polyhop": lambda: _ours(graph, "gat", 100), "pyg": lambda: _pyg(graph, "gat", "plain", 100)}
    memory, times, kernels = _measure(sides, 2 if is_quick else 3)
    _print_kernels("gat", kernels, *times)
    if "pyg" not in times:
        return
    details = ", ".join(f"{side} {times[side]} {memory[side]:.2f} GiB" for side in times)
    ratio = times["pyg"].median / times["polyhop"].median
    yield Figure("fullgraph_gat_vs_pyg", ratio, "x", details, at_least=6.0)
    yield Figure("gat_peak_memory_vs_pyg", memory["polyhop"] / memory["pyg"], "share", details, at_most=0.2)


def _print_kernels(model: str, kernels: dict[str, str], *sides: str) -> None:
    for side in sides:
        print(f"  {model}, {side}: kernels of one epoch\n{kernels.get(side, '    not recorded')}", flush=True)


def _measure(
    sides: dict[str, Callable[[], Epoch]], repeats: int
) -> tuple[dict[str, float], dict[str, Times], dict[str, str]]:
    """GiB at most of each side alone; then its times, in turns of one side after the other; then its kernels."""
    memory, rounds, losses, kernels = {}, {name: list[float]() for name in sides}, {}, {}
    for turn in range(2):  # sides do not fit beside each other: each is made, timed and let go, twice
        for name in sides if turn == 0 else reversed(list(sides)):
            if turn and name not in memory:
                continue
            try:
                epoch = sides[name]()
                losses[name] = epoch()
                memory[name] = peak_gib(epoch)
                found = alternate({name: epoch}, repeats=repeats, warm_up=1)[name]
                rounds[name] += found.seconds
                if turn:
                    kernels[name] = _kernels(epoch)
            except torch.OutOfMemoryError:
                print(f"  {name}: out of memory", flush=True)
                memory.pop(name, None)
            epoch = None  # type: ignore[assignment]
            torch.cuda.empty_cache()
    for name, loss in losses.items():
        print(f"  {name}: loss {loss:.5f}, {memory.get(name, math.nan):.2f} GiB", flush=True)
        assert abs(loss - losses["polyhop"]) < 2e-3 * abs(losses["polyhop"]), f"{name} computes another loss"
    return memory, {name: Times(tuple(found)) for name, found in rounds.items() if name in memory}, kernels


def _kernels(epoch: Epoch) -> str:
    """For reading only: nothing fails where kernels cannot be recorded."""
    try:
        return kernel_times(epoch)
    except Exception as error:
        return f"    not recorded: {error}"


def _widths(features: int, classes: int) -> list[int]:
    return [features, *[HIDDEN] * (LAYERS - 1), classes]


def _model(model: str, features: int, classes: int) -> nn.Module:
    torch.manual_seed(1)
    if model == "gat":
        return GAT(features, 64, num_layers=LAYERS, out_channels=classes, heads=1)
    make = GCN if model == "gcn" else GraphSAGE
    return make(features, HIDDEN, num_layers=LAYERS, out_channels=classes)


def _ours(graph: Graph, model: str, features: int) -> Epoch:
    block, net = on_device(graph), _model(model, features, graph.num_classes).cuda()
    return _epoch(graph, net, features, lambda x: net(x, block))


def _pyg(graph: Graph, model: str, layout: str, features: int) -> Epoch:
    start = _model(model, features, graph.num_classes).state_dict()
    block = Block(graph.indptr.cuda(), graph.indices.cuda(), graph.num_nodes)
    net: nn.Module
    if model == "gcn":
        net, edges = Gcn(_widths(features, graph.num_classes)), _normalised(block, layout)
        forward: Callable[[Tensor], Tensor] = lambda x: net(x, edges, None)  # noqa: E731
    elif model == "sage":
        values = (1 / block.drawn.clamp(min=1).float()).repeat_interleave(block.drawn)
        net = _Stack(SAGEConv(a, b, aggr="sum") for a, b in _pairs(_widths(features, graph.num_classes)))
        edges = _matrix(block.indptr, block.indices, values, layout)
        forward = lambda x: net(x, edges)  # noqa: E731
    else:
        widths = [features, 64, 64, graph.num_classes]
        net = _Stack(GATConv(a, b) for a, b in _pairs(widths))
        edges = torch.stack([block.indices.long(), _destinations(block.drawn)])
        forward = lambda x: net(x, edges)  # noqa: E731
    net.load_state_dict(start)
    net.cuda()
    del block
    return _epoch(graph, net, features, forward)


class _Stack(nn.Module):
    """PyG's convolutions with a relu between."""

    def __init__(self, convs: Iterator[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            h = conv(h, edges)
            h = h.relu() if i + 1 < len(self.convs) else h
        return h


def _pairs(widths: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(widths))


def _destinations(degree: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(degree.numel(), device=degree.device), degree)


def _normalised(block: Block, layout: str) -> Tensor:
    """GCN's matrix with every node's loop, normalised ahead of time."""
    num = block.num_dst
    own = torch.arange(num, device="cuda")
    dst, src = torch.cat([_destinations(block.drawn), own]), torch.cat([block.indices.long(), own])
    order = torch.sort(dst, stable=True).indices
    dst, src = dst[order], src[order]
    root = (block.drawn + 1).float().rsqrt()
    indptr = block.indptr + torch.arange(num + 1, device="cuda")
    return _matrix(indptr, src, root[dst] * root[src], layout)


def _matrix(indptr: Tensor, indices: Tensor, values: Tensor, layout: str) -> Tensor:
    kind = torch.int32 if layout.endswith("32") else torch.int64
    num = indptr.numel() - 1
    made = torch.sparse_csr_tensor(indptr.to(kind), indices.to(kind), values, (num, num))
    return made.to_sparse_csc() if layout == "csc" else made


def _epoch(graph: Graph, model: nn.Module, features: int, forward: Callable[[Tensor], Tensor]) -> Epoch:
    """One epoch from the same weights each time, so that all sides' losses can be compared."""
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(graph.num_nodes, features, device="cuda", generator=generator)
    assert graph.y is not None
    y = graph.y.cuda()
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def epoch() -> float:
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        loss = functional.cross_entropy(forward(x), y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return epoch
