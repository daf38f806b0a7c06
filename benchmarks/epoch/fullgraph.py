"""A full-graph GCN epoch (forward, backward, update), in CPU-seconds on one thread, against DGL and PyG."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import dgl_side, pyg_side
from benchmarks.epoch.workload import WIDTHS, as_trained, make_graph
from benchmarks.graphs import describe
from benchmarks.harness import Figure, alternate
from polyhop.graph import Graph
from polyhop.nn import GCN
from polyhop.sample import full_block

__all__ = ["run"]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``fullgraph_vs_dgl`` and ``fullgraph_vs_pyg``: GCN, 3 layers, hidden 256; each peer in its fastest layout."""
    graph = make_graph(is_quick=is_quick)
    print("  " + describe(graph), flush=True)
    losses: dict[str, float] = {}
    torch.manual_seed(1)
    ours = GCN(WIDTHS[0], WIDTHS[1], num_layers=3, out_channels=WIDTHS[-1])
    start = ours.state_dict()
    block = full_block(graph)
    sides = {"polyhop": as_trained(_epoch("polyhop", graph, ours, lambda x: ours(x, block), losses))}
    sides["dgl"] = _fastest(_dgl(graph, start, losses))
    sides["pyg"] = _fastest(_pyg(graph, start, losses))
    times = alternate(sides, repeats=3 if is_quick else 5, counts_cpu=True)
    peers = {name: as_trained(side) for name, side in sides.items() if name != "polyhop"}
    kept = alternate(peers, repeats=3, counts_cpu=True)
    for name, loss in losses.items():
        print(f"  {name}: {graph.num_edges:,} edges, loss {loss:.4f}", flush=True)
    for peer, target in (("dgl", 1.2), ("pyg", 2.0)):
        details = f"CPU-seconds on one thread: polyhop {times['polyhop']}, {peer} {times[peer]}"
        ratio = times[peer].median / times["polyhop"].median
        yield Figure(f"fullgraph_vs_{peer}", ratio, "x", details, at_least=target)
        beside = kept[peer].median / times["polyhop"].median
        details = f"{peer} {kept[peer]} under polyhop's memory policy, beside"
        yield Figure(f"fullgraph_vs_{peer}_kept_memory", beside, "x", details)
    yield Figure("fullgraph_cpu_s", times["polyhop"].median, "cpu_s", "one epoch")


def _epoch(
    name: str, graph: Graph, model: nn.Module, forward: Callable[[Tensor], Tensor], losses: dict[str, float]
) -> Callable[[], None]:
    """One epoch from the same weights each time, so that all sides' losses can be compared."""
    assert graph.x is not None
    x, start = graph.x.all(), {key: value.clone() for key, value in model.state_dict().items()}

    def epoch() -> None:
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        loss = functional.cross_entropy(forward(x), graph.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[name] = float(loss.detach())

    return epoch


def _dgl(
    graph: Graph, start: dict[str, Tensor], losses: dict[str, float]
) -> Iterator[tuple[str, Callable[[], None]]]:
    for kind in (torch.int32, torch.int64):
        model, name = dgl_side.Gcn(WIDTHS), f"dgl {kind}"
        model.load(start)
        made = dgl_side.graph(graph, dtype=kind, loops=True)
        yield name, _epoch(name, graph, model, lambda x, m=model, g=made: m(g, x), losses)


def _pyg(
    graph: Graph, start: dict[str, Tensor], losses: dict[str, float]
) -> Iterator[tuple[str, Callable[[], None]]]:
    for layout in ("csr", "csr32", "csc", "edge-index", "plain"):
        model, name = pyg_side.Gcn(WIDTHS), f"pyg {layout}"
        model.load_state_dict(start)
        edges, weight = pyg_side.normalised(graph, layout)
        yield name, _epoch(name, graph, model, lambda x, m=model, e=edges, w=weight: m(x, e, w), losses)


def _fastest(ways: Iterator[tuple[str, Callable[[], None]]]) -> Callable[[], None]:
    """The fastest of a peer's ways, by its second run; the others are printed beside."""
    best: tuple[float, Callable[[], None]] | None = None
    for name, epoch in ways:
        epoch()
        start = time.process_time()
        epoch()
        seconds = time.process_time() - start
        print(f"  {name}: {seconds:.2f} CPU-seconds", flush=True)
        if best is None or seconds < best[0]:
            best = seconds, epoch
    assert best is not None
    return best[1]
