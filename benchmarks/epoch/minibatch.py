"""A whole mini-batch training epoch of GraphSAGE, in CPU-seconds on one thread, against DGL and PyG.

polyhop and DGL are charged for everything: sampling, gathering, forward, backward, update. PyG has no sampler on PyPI:
it is handed polyhop's batches, gathered and in its best layout, and charged for forward, backward and update only.
Each side runs in a process of its own with the memory policy its users get; the peers under polyhop's are shown beside.
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
    loader,
    make_graph,
    our_epoch,
    our_model,
    step,
)
from benchmarks.graphs import describe
from benchmarks.harness import Figure, Timing
from benchmarks.processes import Build, alternate_processes
from polyhop.sample import Loaded

__all__ = ["run"]

Side = Callable[[], Outcome]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``epoch_vs_dgl``, ``epoch_vs_pyg``, ``epoch_vs_floor``; PyG's slower ways beside."""
    graph = make_graph(is_quick=is_quick)
    print("  " + describe(graph), flush=True)
    best = _best_pyg_layout(list(loader(graph).batches(0))[:2])
    name = f"pyg {best}"
    sides = {"polyhop": Build(_polyhop, (is_quick,), keeps_memory=True), "dgl": Build(_dgl, (is_quick,))}
    times = _timed({**sides, name: Build(_pyg, (is_quick, best))}, repeats=3 if is_quick else 5)
    trimmed, plain = Build(_pyg_trimmed, (is_quick,)), Build(_pyg, (is_quick, "plain"))
    slower = _timed({"pyg trim_to_layer": trimmed, "pyg plain": plain}, repeats=1)
    peers = {"dgl": Build(_dgl, (is_quick,), True), name: Build(_pyg, (is_quick, best), True)}
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
            f"{name} {timing.median:.2f} CPU-seconds",
            at_least=3.5 if key.endswith("trimmed") else None,
        )
    for name, timing in kept.items():
        key = f"epoch_vs_{name.split()[0]}_kept_memory"
        yield Figure(key, timing.median / ours, "x", f"{name} {timing} under polyhop's memory policy, beside")
    yield Figure("epoch_cpu_s", ours, "cpu_s", f"{len(loader(graph))} steps of {BATCH}")
    least = floor.measure(our_model(), [loaded.batch for loaded in loader(graph).batches(0)])
    yield Figure(
        "epoch_vs_floor", ours / least.seconds, "x", f"epoch {ours:.2f} s, floor: {least}", at_most=1.3
    )


def _timed(sides: dict[str, Build], *, repeats: int) -> dict[str, Timing]:
    times, outcomes = alternate_processes(sides, repeats=repeats, counts_cpu=True)
    for name, timing in times.items():
        memory = ", kept memory" if sides[name].keeps_memory else ""
        print(f"  {name}{memory}: {timing} CPU; {outcomes[name]}", flush=True)
    return times


def _polyhop(is_quick: bool) -> Side:
    batches = loader(make_graph(is_quick=is_quick), in_place=True)
    model, start = our_model(), our_model().state_dict()

    def epoch() -> Outcome:
        model.load_state_dict(start)
        return our_epoch(model, batches.batches(0))

    return epoch


def _dgl(is_quick: bool) -> Side:
    graph = make_graph(is_quick=is_quick)
    assert graph.x is not None
    assert graph.split is not None
    batches = dgl_side.loader(dgl_side.graph(graph, formats=False), graph.split.train, NUM_NEIGHBORS, BATCH)
    model, start = dgl_side.Sage(WIDTHS), our_model().state_dict()
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


def _pyg(is_quick: bool, layout: str) -> Side:
    batches = list(loader(make_graph(is_quick=is_quick)).batches(0))
    return _pyg_side(pyg_side.Sage(WIDTHS, layout), batches)


def _pyg_trimmed(is_quick: bool) -> Side:
    return _pyg_side(pyg_side.SageTrimmed(WIDTHS), list(loader(make_graph(is_quick=is_quick)).batches(0)))


def _pyg_side(model: pyg_side.Sage | pyg_side.SageTrimmed, batches: list[Loaded]) -> Side:
    prepared = [(loaded.x, loaded.y, model.prepare(loaded.batch)) for loaded in batches]
    edges = sum(model.num_edges(layers) for _, _, layers in prepared)
    start = our_model().state_dict()

    def epoch() -> Outcome:
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        done = Outcome(edges)
        for x, y, layers in prepared:
            done.losses.append(step(model, optimizer, model(x, layers), y))
        return done

    return epoch


def _best_pyg_layout(batches: list[Loaded]) -> str:
    """The fastest of PyG's layouts on these batches."""
    seconds = {}
    for layout in pyg_side.LAYOUTS:
        side = _pyg_side(pyg_side.Sage(WIDTHS, layout), batches)
        side()
        begin = time.process_time()
        side()
        seconds[layout] = time.process_time() - begin
    print("  pyg, two steps: " + ", ".join(f"{name} {s:.2f} s" for name, s in seconds.items()), flush=True)
    return min(seconds, key=seconds.__getitem__)
