"""Section ``memory``: what a rank holds at its peak, where the graph is spread and where the layers are.

Four real processes a side train three epochs; each writes its peak of resident memory (VmHWM, set back before the graph is
opened) above what it held before. Beside it what the pipeline's tables take, which is a formula: ``b n sum_l H_l (1 + [T >
1] + 1)`` over the layers of a stage that read other chunks. Sizes, so a busy machine will do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.halo.graphs import cut
from benchmarks.halo.launches import save
from benchmarks.harness import Figure
from benchmarks.pipeline.workload import NAIVE, OPTIMISED, OURS, SIDES, build_step, deep_model, reddit_like
from polyhop import launch
from polyhop.kernels.keys import Key
from polyhop.partition import open_parts

__all__ = ["measure", "run"]

NUM_RANKS, EPOCHS = 4, 3
MIB = 1 << 20


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Peaks of each model, the largest rank's of halo over the pipeline's, and tables against the formula."""
    num_nodes, layers, hidden = (4096, 8, 32) if is_quick else (32_768, 32, 64)
    made = cut(
        "like-reddit", reddit_like(num_nodes, hidden, degree=20 if is_quick else 50, inside=0.97), NUM_RANKS
    )
    print(f"  {made}", flush=True)
    with tempfile.TemporaryDirectory(prefix="polyhop-pipeline-") as name:
        parts = save(made, Path(name))
        for model in ("gcnii",) if is_quick else ("gcn", "gcnii", "deepgcn"):
            found = {side: _measured(parts, name, model, side, layers, hidden) for side in SIDES}
            yield from _figures(model, found, num_nodes, hidden)


def _measured(
    parts: Path, folder: str, model: str, side: str, layers: int, hidden: int
) -> list[dict[str, Any]]:
    """What every rank of a side saw."""
    answer = Path(folder) / f"{model}-{side}"
    answer.mkdir()
    launch.run(
        measure,
        (str(parts), str(answer), model, side, layers, hidden),
        launch.Launch(num_ranks=NUM_RANKS, threads=1, pin=False),
    )
    found = [json.loads((answer / f"rank-{k}.json").read_text()) for k in range(NUM_RANKS)]
    told = ", ".join(f"{one['peak'] / MIB:.0f}" for one in found)
    print(f"  {model}, {side}: MiB above what was held before, by rank: {told}", flush=True)
    return found


def measure(
    context: launch.RankContext, parts: str, answer: str, model_name: str, side: str, layers: int, hidden: int
) -> None:
    """Train on one rank and write its peak."""
    line, (strategy, options) = context.comm, SIDES[side]
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # what torch loads with its first optimiser
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    held = open_parts(Path(parts)).share(line.rank, line.num_ranks)
    model = deep_model(model_name, held, layers, hidden)
    step = build_step(strategy, model, held, line, options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        optimizer.zero_grad(set_to_none=True)
        step.gradients(0, Key(0, epoch))
        optimizer.step()
    found = {"peak": _status("VmHWM") - before, "tables": 0, "kept_layers": 0}
    if side == OURS:
        found |= {"tables": step.history.num_bytes, "kept_layers": len(step.history.layers)}
    step.close()
    (Path(answer) / f"rank-{line.rank}.json").write_text(json.dumps(found))


def _status(field: str) -> int:
    """Bytes of one field of this process's status: VmRSS now, VmHWM the peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _figures(
    model: str, found: dict[str, list[dict[str, Any]]], num_nodes: int, hidden: int
) -> Iterator[Figure]:
    peaks = {side: max(one["peak"] for one in ranks) / MIB for side, ranks in found.items()}
    means = {side: sum(one["peak"] for one in ranks) / len(ranks) / MIB for side, ranks in found.items()}
    ours = found[OURS]
    tables = ", ".join(f"{one['tables'] / MIB:.0f}" for one in ours)
    for side, peak in peaks.items():
        more = f"; tables of rows and gradients by rank: {tables} MiB" if side == OURS else ""
        details = f"{model}: the largest rank's peak above what it held before; mean {means[side]:.0f}{more}"
        yield Figure(f"memory_mib_{model}_{side}", peak, "MiB", details)
    for side, end in ((NAIVE, ""), (OPTIMISED, "_vs_optimised")):
        details = f"{side} {peaks[side]:.0f} MiB over pipeline {peaks[OURS]:.0f} MiB, the largest rank"
        yield Figure(f"memory_halo_vs_pipeline_{model}{end}", peaks[side] / peaks[OURS], "x", details)
    away = max(abs(one["tables"] - 2 * 4 * num_nodes * hidden * one["kept_layers"]) for one in ours)
    details = f"{model}: tables of each rank against 2 b n H for each of its layers that read other chunks"
    yield Figure(f"tables_vs_formula_{model}", float(away), "bytes off", details, at_most=0.0)
