"""A full-graph GCN epoch (forward, backward, update), in CPU-seconds on one thread, against DGL and PyG."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import dgl_side, pyg_side
from benchmarks.epoch.workload import WIDTHS, make_graph
from benchmarks.graphs import describe
from benchmarks.harness import Figure, Timing
from benchmarks.processes import Build, alternate_processes
from polyhop.graph import Graph
from polyhop.nn import GCN
from polyhop.sample import full_block

__all__ = ["run"]

Epoch = Callable[[], float]  # gives the loss
DGL_KINDS = ("int32", "int64")
PYG_LAYOUTS = ("csr", "csr32", "csc", "edge-index", "plain")


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``fullgraph_vs_dgl`` and ``fullgraph_vs_pyg``: GCN, 3 layers, hidden 256; each peer in its fastest layout."""
    graph = make_graph(is_quick=is_quick)
    print("  " + describe(graph), flush=True)
    dgl = _fastest("dgl", _dgl, graph, DGL_KINDS)
    pyg = _fastest("pyg", _pyg, graph, PYG_LAYOUTS)
    peers = {"dgl": (_by_name, ("dgl", dgl, is_quick)), "pyg": (_by_name, ("pyg", pyg, is_quick))}
    sides = {"polyhop": Build(_by_name, ("polyhop", "", is_quick), keeps_memory=True)}
    sides |= {peer: Build(*made) for peer, made in peers.items()}
    times = _timed(sides, graph.num_edges, repeats=3 if is_quick else 5)
    kept = _timed({peer: Build(*made, True) for peer, made in peers.items()}, graph.num_edges, repeats=3)
    ours = times["polyhop"]
    for peer, target in (("dgl", 1.2), ("pyg", 2.0)):
        details = f"CPU-seconds on one thread: polyhop {ours}, {peer} {times[peer]}"
        yield Figure(f"fullgraph_vs_{peer}", times[peer].median / ours.median, "x", details, at_least=target)
        details = f"{peer} {kept[peer]} under polyhop's memory policy, beside"
        yield Figure(f"fullgraph_vs_{peer}_kept_memory", kept[peer].median / ours.median, "x", details)
    yield Figure("fullgraph_cpu_s", ours.median, "cpu_s", "one epoch")


def _timed(sides: dict[str, Build], num_edges: int, *, repeats: int) -> dict[str, Timing]:
    times, losses = alternate_processes(sides, repeats=repeats, counts_cpu=True)
    for name, loss in losses.items():
        memory = ", kept memory" if sides[name].keeps_memory else ""
        print(f"  {name}{memory}: {times[name]} CPU; {num_edges:,} edges, loss {loss}", flush=True)
    return times


def _by_name(side: str, layout: str, is_quick: bool) -> Epoch:
    """One side's epoch, made in that side's process."""
    graph = make_graph(is_quick=is_quick)
    if side == "polyhop":
        return _polyhop(graph)
    return _dgl(graph, layout) if side == "dgl" else _pyg(graph, layout)


def _model() -> GCN:
    torch.manual_seed(1)
    return GCN(WIDTHS[0], WIDTHS[1], num_layers=3, out_channels=WIDTHS[-1])


def _polyhop(graph: Graph) -> Epoch:
    model, block = _model(), full_block(graph)
    return _epoch(graph, model, lambda x: model(x, block))


def _dgl(graph: Graph, kind: str) -> Epoch:
    model = dgl_side.Gcn(WIDTHS)
    model.load(_model().state_dict())
    made = dgl_side.graph(graph, dtype=getattr(torch, kind), loops=True)
    return _epoch(graph, model, lambda x: model(made, x))


def _pyg(graph: Graph, layout: str) -> Epoch:
    model = pyg_side.Gcn(WIDTHS)
    model.load_state_dict(_model().state_dict())
    edges, weight = pyg_side.normalised(graph, layout)
    return _epoch(graph, model, lambda x: model(x, edges, weight))


def _epoch(graph: Graph, model: nn.Module, forward: Callable[[Tensor], Tensor]) -> Epoch:
    """One epoch from the same weights each time, so that all sides' losses can be compared."""
    assert graph.x is not None
    x, start = graph.x.all(), {key: value.clone() for key, value in model.state_dict().items()}

    def epoch() -> float:
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        loss = functional.cross_entropy(forward(x), graph.y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return round(float(loss.detach()), 4)

    return epoch


def _fastest(peer: str, make: Callable[[Graph, str], Epoch], graph: Graph, layouts: tuple[str, ...]) -> str:
    """The fastest of a peer's layouts, by its second epoch; all are printed."""
    seconds: dict[str, float] = {}
    for layout in layouts:
        epoch = make(graph, layout)
        epoch()
        start = time.process_time()
        epoch()
        seconds[layout] = time.process_time() - start
        print(f"  {peer} {layout}: {seconds[layout]:.2f} CPU-seconds", flush=True)
    return min(seconds, key=seconds.__getitem__)
