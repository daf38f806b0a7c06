"""What a checkpoint belongs to, in a few values that can be compared and explained.

Large arrays are sampled at fixed strides, so that a graph on disk is recognised without being read.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.graph import Graph, SparseRows

__all__ = ["differences", "fingerprint_graph", "fingerprint_model"]

_SAMPLES = 1 << 16
_ROWS = 64


def _digest(*tensors: Tensor | None) -> str:
    """Digest of up to _SAMPLES values of each tensor, evenly spread."""
    total = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if tensor is None:
            total.update(b"none")
            continue
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous()
        total.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        total.update(sample.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def fingerprint_graph(graph: Graph) -> dict[str, Any]:
    """Sizes and sampled contents of a graph."""
    split = graph.split
    sets = (None,) if split is None else (split.train, split.val, split.test)
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "features": graph.num_features,
        "classes": graph.num_classes,
        "structure": _digest(graph.indptr, graph.indices, graph.edge_weight),
        "labels": _digest(graph.y),
        "split": _digest(*sets),
        "feature_rows": _digest(*_some_rows(graph)),
    }


def _some_rows(graph: Graph) -> tuple[Tensor | None, ...]:
    if graph.x is None or graph.num_nodes == 0:
        return (None,)
    ids = torch.arange(0, graph.num_nodes, max(1, graph.num_nodes // _ROWS))
    rows = graph.x.gather(ids)
    if isinstance(rows, SparseRows):
        return rows.indptr, rows.indices, rows.values
    return (rows,)


def fingerprint_model(model: nn.Module) -> dict[str, Any]:
    """Class, printed form (which shows widths, dropout and the like) and shapes of a model."""
    shapes = {name: [str(v.dtype).removeprefix("torch."), *v.shape] for name, v in model.state_dict().items()}
    printed = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    knobs = {
        name: value for name, value in vars(model).items() if isinstance(value, int | float | str | bool)
    }
    knobs = {name: value for name, value in knobs.items() if name != "training" and not name.startswith("_")}
    return {"class": type(model).__qualname__, "printed": printed, "options": knobs, "shapes": shapes}


def differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """One line for each leaf that differs, such as ``config.lr: the checkpoint has 0.01, this run 0.02``."""
    lines: list[str] = []
    for name in sorted(saved.keys() | now.keys()):
        left, right = saved.get(name), now.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += differences(left, right, f"{prefix}{name}.")
        elif left != right:
            lines.append(f"{prefix}{name}: the checkpoint has {_short(left)}, this run {_short(right)}")
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
