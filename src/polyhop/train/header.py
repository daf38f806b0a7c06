"""The first lines of a run: which data, which machine, which kernels, which plan, which folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from polyhop.graph import Graph, SharedGraph
from polyhop.kernels import native
from polyhop.strategies import Placement

__all__ = ["first_lines"]


def first_lines(
    graph: Graph | SharedGraph,
    model: nn.Module,
    placement: Placement,
    num_neighbors: Sequence[int] | None,
    run_dir: Path | None,
    notes: Sequence[str] = (),
    num_ranks: int = 1,
    num_groups: int = 1,
) -> dict[str, str]:
    """What to print before training, by name."""
    weights = sum(p.numel() for p in model.parameters())
    plan = (
        "full graph"
        if num_neighbors is None
        else f"mini-batches, fan-outs {', '.join(map(str, num_neighbors))}"
    )
    about = f"  ({graph.facts.note})" if isinstance(graph, SharedGraph) and graph.facts.note else ""
    lines = {
        "data": f"{graph.name}  {graph.num_nodes:,} nodes  {graph.num_edges:,} edges  "
        f"{graph.num_features:,} features  {graph.num_classes} classes{about}",
        "machine": _machine(placement),
        "kernels": _kernels(placement),
        "model": f"{type(model).__name__}  {weights:,} weights  {_format(placement)}",
        "plan": f"{_ranks(num_ranks, num_groups)}, {plan}",
        "run": "no folder (run_dir not given): nothing is saved" if run_dir is None else str(run_dir),
    }
    if notes:
        lines["note"] = "; ".join(notes)
    return lines


def _ranks(num_ranks: int, num_groups: int) -> str:
    if num_ranks == 1:
        return "single process"
    return f"{num_ranks} ranks" + (f" in {num_groups} groups" if num_groups > 1 else "")


def _machine(placement: Placement) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} cores, {torch.get_num_threads()} threads"
    if placement.device.type == "cuda":
        facts = torch.cuda.get_device_properties(placement.device)
        text += f", {facts.name} ({facts.total_memory / 2**30:.0f} GiB)"
    return text


def _kernels(placement: Placement) -> str:
    status = native.status()
    if placement.device.type != "cpu":
        return f"{status.get(placement.device.type, 'reference')} on {placement.device}"
    return f"{status['cpu']}  ({status['library']})"


def _format(placement: Placement) -> str:
    name = str(placement.dtype).removeprefix("torch.")
    return (
        name
        if placement.autocast is None
        else f"{name}, products in {str(placement.autocast).removeprefix('torch.')}"
    )
