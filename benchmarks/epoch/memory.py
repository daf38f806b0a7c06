"""Peak resident memory of the mini-batch epoch, each side alone in a process that first reads the graph from files.

PyG holds the graph as its loader would (int64 CSC) and reads one prepared batch at a time: no sampler is charged to it.
Run as ``python -m benchmarks.epoch.memory SIDE FOLDER`` it is one side's process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

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
from benchmarks.harness import Figure
from polyhop.graph import Block, DenseFeatures, Graph, Split
from polyhop.kernels import kept_memory
from polyhop.sample import MiniBatch

__all__ = ["run"]

PYG_LAYOUTS = ("mean-csr32", "csr32", "plain", "trim_to_layer")


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``peak_rss_vs_pyg``: our peak, under the memory policy the epoch is timed with, over the lowest of PyG's layouts."""
    graph = make_graph(is_quick=is_quick)
    print("  " + describe(graph), flush=True)
    with tempfile.TemporaryDirectory(prefix="polyhop-memory-") as name:
        folder = Path(name)
        _save(graph, folder)
        sides = ["polyhop", "polyhop:default-memory", "dgl", *(f"pyg:{layout}" for layout in PYG_LAYOUTS)]
        found = {side: _measure(side, folder) for side in sides}
    pyg = min((side for side in sides if side.startswith("pyg")), key=lambda side: found[side]["peak"])
    details = ", ".join(f"{side} {peak['peak'] / 2**20:.0f} MiB" for side, peak in found.items())
    ours = found["polyhop"]
    yield Figure(
        "peak_rss_vs_pyg", ours["peak"] / found[pyg]["peak"], "x", f"{details}; bar is {pyg}", at_most=0.7
    )
    trimmed = ours["peak"] / found["pyg:trim_to_layer"]["peak"]
    yield Figure("peak_rss_vs_pyg_trimmed", trimmed, "x", "against PyG's own trim_to_layer", at_most=0.7)
    unkept = found["polyhop:default-memory"]["peak"] / found[pyg]["peak"]
    yield Figure("peak_rss_vs_pyg_default_memory", unkept, "x", "without the trainer's memory policy, beside")
    yield Figure("peak_rss_vs_dgl", ours["peak"] / found["dgl"]["peak"], "x", "same processes")
    grown = {side: peak["peak"] - peak["before"] for side, peak in found.items()}
    above = ", ".join(f"{side} {size / 2**20:.0f} MiB" for side, size in grown.items())
    yield Figure(
        "epoch_rss_vs_pyg", grown["polyhop"] / grown[pyg], "x", f"above imports, graph and features: {above}"
    )


def _save(graph: Graph, folder: Path) -> None:
    """Graph and features once, and every batch in a file of its own for PyG."""
    assert graph.x is not None
    assert graph.y is not None
    assert graph.split is not None
    arrays = {
        "indptr": graph.indptr,
        "indices": graph.indices,
        "x": graph.x.all(),
        "y": graph.y,
        "train": graph.split.train,
    }
    for name, tensor in arrays.items():
        np.save(folder / f"{name}.npy", tensor.numpy())
    for loaded in loader(graph).batches(0):
        blocks = {}
        for i, block in enumerate(loaded.batch.blocks):
            blocks |= {f"indptr{i}": block.indptr.numpy(), f"indices{i}": block.indices.numpy()}
        np.savez(
            folder / f"batch{loaded.batch.step}.npz",
            ids=loaded.batch.input_ids,
            seeds=loaded.batch.seeds,
            **blocks,
        )


def _measure(side: str, folder: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.epoch.memory", side, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{side} failed:\n{done.stderr}")
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    peak, before = answer["peak"] / 2**20, answer["before"] / 2**20
    print(f"  {side}: peak {peak:.0f} MiB, before the epoch {before:.0f} MiB; {answer['did']}", flush=True)
    return answer


def _status(field: str) -> int:
    """Bytes of one field of this process's status: VmRSS now, VmHWM the peak (unlike getrusage's, not inherited)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this bench needs Linux")


def _array(folder: Path, name: str) -> Tensor:
    return torch.from_numpy(np.load(folder / f"{name}.npy"))


def _graph(folder: Path) -> Graph:
    train = _array(folder, "train")
    none = train[:0]
    x = DenseFeatures(_array(folder, "x"))
    split = Split(train, none, none)
    return Graph(
        _array(folder, "indptr"),
        _array(folder, "indices"),
        x,
        _array(folder, "y"),
        split,
        num_classes=WIDTHS[-1],
    )


def _polyhop_side(folder: Path, *, keeps_memory: bool) -> tuple[int, Outcome]:
    graph = _graph(folder)
    before = _status("VmRSS")
    with kept_memory() if keeps_memory else nullcontext():
        return before, our_epoch(our_model(), loader(graph, in_place=True).batches(0))


def _dgl_side(folder: Path) -> tuple[int, Outcome]:
    from benchmarks import dgl_side

    graph = _graph(folder)
    made, x, y = dgl_side.graph(graph, formats=False), graph.x.all(), graph.y
    train = graph.split.train
    del graph
    before = _status("VmRSS")
    model = dgl_side.Sage(WIDTHS)
    model.load(our_model().state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    done = Outcome()
    for blocks, rows, labels in dgl_side.batches(dgl_side.loader(made, train, NUM_NEIGHBORS, BATCH), x, y):
        done.losses.append(step(model, optimizer, model(blocks, rows), labels))
        done.edges += sum(block.num_edges() for block in blocks)
    return before, done


def _pyg_side(folder: Path, layout: str) -> tuple[int, Outcome]:
    from benchmarks import pyg_side

    x, y = _array(folder, "x"), _array(folder, "y")
    graph = (_array(folder, "indptr"), _array(folder, "indices").long())
    before = _status("VmRSS")
    model = pyg_side.SageTrimmed(WIDTHS) if layout == "trim_to_layer" else pyg_side.Sage(WIDTHS, layout)
    model.load_state_dict(our_model().state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    done = Outcome()
    for path in sorted(folder.glob("batch*.npz")):
        batch = _batch(path)
        layers = model.prepare(batch)
        done.edges += sum(block.num_edges for block in batch.blocks)
        ids, seeds = batch.input_ids, batch.seeds
        del batch
        done.losses.append(step(model, optimizer, model(x[ids], layers), y[seeds]))
        del layers
    assert graph[0].numel() > 0
    return before, done


def _batch(path: Path) -> MiniBatch:
    with np.load(path) as stored:
        ids, seeds = torch.from_numpy(stored["ids"]), torch.from_numpy(stored["seeds"])
        blocks, num_src = [], ids.numel()
        for i in range(len(NUM_NEIGHBORS)):
            indptr = torch.from_numpy(stored[f"indptr{i}"])
            blocks.append(
                Block(indptr, torch.from_numpy(stored[f"indices{i}"]), num_src, src_ids=ids[:num_src])
            )
            num_src = indptr.numel() - 1
    return MiniBatch(int(path.stem.removeprefix("batch")), seeds, tuple(blocks))


def _main(side: str, folder: Path) -> None:
    torch.set_num_threads(1)
    if side.startswith("polyhop"):
        before, done = _polyhop_side(folder, keeps_memory=side == "polyhop")
    elif side == "dgl":
        before, done = _dgl_side(folder)
    else:
        before, done = _pyg_side(folder, side.removeprefix("pyg:"))
    print(json.dumps({"before": before, "peak": _status("VmHWM"), "did": str(done)}))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
