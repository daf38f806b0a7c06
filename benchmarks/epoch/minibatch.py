"""A whole mini-batch training epoch of GraphSAGE, in CPU-seconds on one thread, against DGL and PyG.

polyhop and DGL are charged for everything: sampling, gathering, forward, backward, update. PyG has no sampler on PyPI:
it is handed polyhop's batches, gathered and in its best layout, and charged for forward, backward and update only.
Each side has the memory policy its users get; the peers under polyhop's are shown beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks import dgl_side, pyg_side
from benchmarks.epoch import floor
from benchmarks.epoch.workload import (
    BATCH,
    NUM_NEIGHBORS,
    WIDTHS,
    Outcome,
    as_trained,
    loader,
    make_graph,
    our_epoch,
    our_model,
    step,
)
from benchmarks.graphs import describe
from benchmarks.harness import Figure, Timing, alternate
from polyhop.graph import Graph
from polyhop.sample import Loaded

__all__ = ["run"]

Side = Callable[[], Outcome]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``epoch_vs_dgl``, ``epoch_vs_pyg``, ``epoch_vs_floor``; PyG's slower ways beside."""
    graph = make_graph(is_quick=is_quick)
    print("  " + describe(graph), flush=True)
    start = our_model().state_dict()
    batches = list(loader(graph).batches(0))
    sides: dict[str, Side] = {"polyhop": as_trained(_polyhop(graph, start)), "dgl": _dgl(graph, start)}
    best = _best_pyg_layout(batches, start)
    sides[f"pyg {best}"] = _pyg(batches, start, best)
    times = _timed(sides, repeats=3 if is_quick else 5)
    beside = {"pyg trim_to_layer": _pyg_trimmed(batches, start), "pyg plain": _pyg(batches, start, "plain")}
    slower = _timed(beside, repeats=1)
    peers = {name: as_trained(side) for name, side in sides.items() if name != "polyhop"}
    kept = _timed(peers, repeats=3)
    ours = times["polyhop"].median
    for peer, target in (("dgl", 1.5), (f"pyg {best}", 3.5)):
        details = f"CPU-seconds on one thread: polyhop {times['polyhop']}, {peer} {times[peer]}"
        yield Figure(f"epoch_vs_{peer.split()[0]}", times[peer].median / ours, "x", details, at_least=target)
    for name, timing in slower.items():
        key = "epoch_vs_pyg_" + name.split()[1].replace("trim_to_layer", "trimmed")
        yield Figure(
            key,
            timing.median / ours,
            "x",
            f"{name} {timing.median:.2f} CPU-seconds, shown beside, not the bar",
        )
    for name, timing in kept.items():
        key = f"epoch_vs_{name.split()[0]}_kept_memory"
        yield Figure(key, timing.median / ours, "x", f"{name} {timing} under polyhop's memory policy, beside")
    yield Figure("epoch_cpu_s", ours, "cpu_s", f"{len(batches)} steps of {BATCH}")
    least = floor.measure(our_model(), [loaded.batch for loaded in batches])
    yield Figure(
        "epoch_vs_floor", ours / least.seconds, "x", f"epoch {ours:.2f} s, floor: {least}", at_most=1.3
    )


def _timed(sides: dict[str, Side], *, repeats: int) -> dict[str, Timing]:
    outcomes: dict[str, Outcome] = {}

    def keep(name: str, side: Side) -> Callable[[], None]:
        def once() -> None:
            outcomes[name] = side()

        return once

    wrapped = {name: keep(name, side) for name, side in sides.items()}
    times = alternate(wrapped, repeats=repeats, counts_cpu=True)
    for name, timing in times.items():
        print(f"  {name}: {timing} CPU; {outcomes[name]}", flush=True)
    return times


def _polyhop(graph: Graph, start: dict[str, torch.Tensor]) -> Side:
    batches = loader(graph, in_place=True)
    model = our_model()

    def epoch() -> Outcome:
        model.load_state_dict(start)
        return our_epoch(model, batches.batches(0))

    return epoch


def _dgl(graph: Graph, start: dict[str, torch.Tensor]) -> Side:
    assert graph.x is not None
    made = dgl_side.graph(graph, formats=False)
    batches = dgl_side.loader(made, graph.split.train, NUM_NEIGHBORS, BATCH)
    model = dgl_side.Sage(WIDTHS)
    x = graph.x.all()

    def epoch() -> Outcome:
        model.load(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        done = Outcome()
        for blocks, rows, y in dgl_side.batches(batches, x, graph.y):
            done.losses.append(step(model, optimizer, model(blocks, rows), y))
            done.edges += sum(block.num_edges() for block in blocks)
        return done

    return epoch


def _pyg(batches: list[Loaded], start: dict[str, torch.Tensor], layout: str) -> Side:
    edges = sum(block.num_edges for loaded in batches for block in loaded.batch.blocks)
    return _pyg_side(pyg_side.Sage(WIDTHS, layout), batches, start, edges)


def _pyg_trimmed(batches: list[Loaded], start: dict[str, torch.Tensor]) -> Side:
    edges = sum(sum(pyg_side.SageTrimmed.prepare(loaded.batch)[2]) for loaded in batches)
    return _pyg_side(pyg_side.SageTrimmed(WIDTHS), batches, start, edges)


def _pyg_side(
    model: pyg_side.Sage | pyg_side.SageTrimmed,
    batches: list[Loaded],
    start: dict[str, torch.Tensor],
    edges: int,
) -> Side:
    prepared = [(loaded.x, loaded.y, model.prepare(loaded.batch)) for loaded in batches]

    def epoch() -> Outcome:
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        done = Outcome(edges)
        for x, y, layers in prepared:
            done.losses.append(step(model, optimizer, model(x, layers), y))
        return done

    return epoch


def _best_pyg_layout(batches: list[Loaded], start: dict[str, torch.Tensor]) -> str:
    """The fastest of PyG's layouts on two of the batches."""
    seconds = {}
    for layout in pyg_side.LAYOUTS:
        side = _pyg(batches[:2], start, layout)
        side()
        begin = time.process_time()
        side()
        seconds[layout] = time.process_time() - begin
    print("  pyg, two steps: " + ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()), flush=True)
    return min(seconds, key=seconds.__getitem__)
