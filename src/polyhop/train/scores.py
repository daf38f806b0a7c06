"""From chunks of logits to metrics per split, to one tensor, or to a file. Legend: N nodes, C outputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import ConfigError, PolyhopError, unknown
from polyhop.train.files import TEMPORARY
from polyhop.train.task import Task

__all__ = ["Scorer", "collect", "write_npy"]

Chunks = Callable[[Tensor | None], Iterator[tuple[int, int, Tensor]]]
"""wanted ids (sorted) or None -> (start, stop, logits) in order."""


class Scorer:
    """Metric and mean loss of some splits, as often as asked; what does not change between evaluations is made once."""

    def __init__(self, task: Task, splits: Sequence[str]) -> None:
        for split in splits:
            if split not in task.ids:
                raise ConfigError(unknown("split", split, task.ids))
        self._task = task
        self._splits = [split for split in splits if task.ids[split].numel()]
        self._y = {split: task.y[task.ids[split]] for split in self._splits}
        # All wanted nodes once, ascending, and where each split's nodes are among them.
        self._wanted = torch.unique(
            torch.cat([task.ids[split] for split in self._splits] or [torch.empty(0).long()])
        )
        self._at = {split: torch.searchsorted(self._wanted, task.ids[split]) for split in self._splits}

    def __call__(self, chunks: Chunks) -> dict[str, float]:
        """``{split: metric, split_loss: mean loss}`` of each split that has labelled nodes."""
        if not self._splits:
            return {}
        logits = torch.cat([self._rows(*chunk) for chunk in chunks(self._wanted)])
        scores: dict[str, float] = {}
        for split in self._splits:
            rows = logits[self._at[split].to(logits.device)]
            y = self._y[split].to(logits.device)
            scores[split] = self._task.measure(rows, y)
            scores[f"{split}_loss"] = float(self._task.loss(rows, y)) / (
                y.shape[0] * self._task.terms_per_row
            )
        return scores

    def _rows(self, start: int, stop: int, logits: Tensor) -> Tensor:
        """A chunk's wanted rows."""
        low, high = torch.searchsorted(self._wanted, torch.tensor([start, stop])).tolist()
        return logits[(self._wanted[low:high] - start).to(logits.device)]


def collect(chunks: Chunks, num_nodes: int) -> Tensor:
    """All logits as one CPU tensor [N, C], at least float32."""
    out = torch.empty(0)
    for start, stop, logits in chunks(None):
        rows = logits.to("cpu", torch.promote_types(logits.dtype, torch.float32))
        if stop - start == num_nodes:
            return rows
        if start == 0:
            out = torch.empty(num_nodes, rows.shape[1], dtype=rows.dtype)
        out[start:stop] = rows
    return out


def write_npy(chunks: Chunks, num_nodes: int, path: Path) -> np.ndarray[Any, Any]:
    """All logits as a .npy file [N, C], complete or absent; returns it memory-mapped, read only."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _fill_npy(chunks, num_nodes, temporary)
        temporary.replace(path)
    except OSError as error:
        raise PolyhopError(f"cannot write predictions to {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    mapped: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


def _fill_npy(chunks: Chunks, num_nodes: int, temporary: Path) -> None:
    out: np.ndarray[Any, Any] | None = None
    for start, stop, logits in chunks(None):
        rows = logits.to("cpu", torch.promote_types(logits.dtype, torch.float32)).numpy()
        if out is None:
            out = np.lib.format.open_memmap(
                temporary, mode="w+", dtype=rows.dtype, shape=(num_nodes, rows.shape[1])
            )
            handle = os.open(temporary, os.O_RDWR)
            try:
                # Claimed now: a disk that fills up later would end the process at a write to mapped memory.
                os.posix_fallocate(handle, 0, temporary.stat().st_size)
            finally:
                os.close(handle)
        out[start:stop] = rows
    if isinstance(out, np.memmap):
        out.flush()
