"""Every method on the same graphs, each side in a process of its own: time, cut, balance, halo, peak memory."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.graphs import describe
from benchmarks.harness import ROOT, Figure, Timing
from benchmarks.processes import Build, alternate_processes
from polyhop import datasets
from polyhop.graph import Graph, Split
from polyhop.partition import Partition, partition, quality

__all__ = ["run"]

PARTS = 8
METHODS = ("metis", "fennel", "ldg", "hash", "block")
GRAPHS = {
    "pubmed": "pubmed",
    "debian": "debian-packages",
    "web": "web-google",
    "products": "synth:products?scale=0.1&features=1",
}
QUICK = {"pubmed": "pubmed", "products": "synth:products?scale=0.01&features=1"}
CLUSTERED = 1.5  # fennel's cut over metis's, at most


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``fennel_cut_vs_metis`` (the worst graph), and what each method does to each graph."""
    os.environ.setdefault("POLYHOP_DATA", str(ROOT.parent / "shared" / "data"))
    ratios: dict[str, dict[str, float]] = {"fennel": {}, "ldg": {}}
    for name, source in (QUICK if is_quick else GRAPHS).items():
        graph = datasets.load(source)
        print("  " + describe(graph), flush=True)
        found = _measure(graph, repeats=1 if is_quick else 3)
        for method, one in found.items():
            print(f"    {method:7}{one}", flush=True)
            yield Figure(f"partition_cut_{name}_{method}", one.quality["cut"], "share", one.costs)
            yield Figure(f"partition_s_{name}_{method}", one.timing.median, "cpu_s", f"{one.timing}")
            yield Figure(f"partition_mib_{name}_{method}", one.peak_mib, "MiB", "peak above the loaded graph")
        for method, to in ratios.items():
            to[name] = found[method].quality["cut"] / found["metis"].quality["cut"]
    for method, by_graph in ratios.items():
        details = f"{PARTS} parts, the worst of " + ", ".join(f"{g} {x:.2f}" for g, x in by_graph.items())
        aim = CLUSTERED if method == "fennel" else None
        yield Figure(f"{method}_cut_vs_metis", max(by_graph.values()), "x", details, at_most=aim)


@dataclass(frozen=True)
class _Found:
    timing: Timing
    quality: dict[str, float]
    peak_mib: float

    @property
    def costs(self) -> str:
        q = self.quality
        return (
            f"balance of nodes {q['node_balance']:.3f}, edges {q['edge_balance']:.3f}, train nodes "
            f"{q['train_balance']:.3f}; halo {q['halo']:.3f} of the nodes; cut by chance {q['chance_cut']:.3f}"
        )

    def __str__(self) -> str:
        return f"cut {self.quality['cut']:.4f}, {self.timing}, peak +{self.peak_mib:.0f} MiB; {self.costs}"


def _measure(graph: Graph, *, repeats: int) -> dict[str, _Found]:
    with tempfile.TemporaryDirectory(prefix="polyhop-partition-") as name:
        _save(graph, Path(name))
        sides = {method: Build(_side, (name, method)) for method in METHODS}
        timings, outcomes = alternate_processes(sides, repeats=repeats, counts_cpu=True)
    answers = {method: json.loads(outcomes[method]) for method in METHODS}
    return {m: _Found(timings[m], answer["quality"], answer["peak_mib"]) for m, answer in answers.items()}


def _save(graph: Graph, folder: Path) -> None:
    train = torch.zeros(0, dtype=torch.int64) if graph.split is None else graph.split.train
    for name, tensor in (("indptr", graph.indptr), ("indices", graph.indices), ("train", train)):
        np.save(folder / f"{name}.npy", tensor.numpy())


def _side(folder: str, method: str) -> Callable[[], object]:
    """In the side's process: the graph without features, and one partition of it per call."""

    def array(name: str) -> Tensor:
        return torch.from_numpy(np.load(Path(folder) / f"{name}.npy"))

    graph = Graph(array("indptr"), array("indices"))
    train = array("train")
    if train.numel():
        graph = replace(graph, split=Split.of(graph.num_nodes, train))
    before = _status("VmRSS")
    return lambda: _Outcome(graph, partition(graph, PARTS, method), _status("VmHWM") - before)


@dataclass(frozen=True)
class _Outcome:
    """What a call gave; its quality is measured when it is asked for its words, after the clock has stopped."""

    graph: Graph
    made: Partition
    peak: int

    def __str__(self) -> str:
        found = {name: float(value) for name, value in asdict(quality(self.graph, self.made)).items()}
        return json.dumps({"quality": found, "peak_mib": self.peak / 2**20})


def _status(field: str) -> int:
    """Bytes of one field of this process's status: VmRSS now, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this bench needs Linux")
