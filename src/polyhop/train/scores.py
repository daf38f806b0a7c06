"""From chunks of logits to metrics per split, to one tensor, or to a file. Legend: N nodes, C outputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError, PolyhopError, unknown
from polyhop.train.files import TEMPORARY
from polyhop.train.task import Task

__all__ = ["Scorer", "collect", "write_npy"]

Chunks = Callable[[Tensor | None], Iterator[tuple[int, int, Tensor]]]
"""wanted ids (sorted) or None -> (start, stop, logits) in order."""


class Scorer:
    """Metric and mean loss of some splits, as often as asked; what does not change between evaluations is made once.

    With a ``line``, of the nodes of all ranks: made and called by all ranks together, the same numbers on each.
    """

    def __init__(self, task: Task, splits: Sequence[str], line: Collective | None = None) -> None:
        for split in splits:
            if split not in task.ids:
                raise ConfigError(unknown("split", split, task.ids))
        self._task, self._line = task, line
        sizes = torch.tensor([task.ids[split].numel() for split in splits])
        if line is not None:
            sizes = line.all_reduce(sizes.to(line.device), kind="scores").cpu()
        self._sizes = dict(zip(splits, sizes.tolist(), strict=True))
        self._splits = [split for split in splits if self._sizes[split]]
        self._y = {split: task.y[task.ids[split]] for split in self._splits}
        # All wanted nodes once, ascending, and where each split's nodes are among them.
        self._wanted = torch.unique(
            torch.cat([task.ids[split] for split in self._splits] or [torch.empty(0).long()])
        )
        self._at = {split: torch.searchsorted(self._wanted, task.ids[split]) for split in self._splits}

    def has(self, split: str) -> bool:
        """Whether the split has labelled nodes, on any rank."""
        return split in self._splits

    def __call__(self, chunks: Chunks) -> dict[str, float]:
        """``{split: metric, split_loss: mean loss}`` of each split that has labelled nodes."""
        if not self._splits:
            return {}
        pieces = [self._rows(*chunk) for chunk in chunks(self._wanted)]
        if self._line is not None:
            return self._of_all(torch.cat(pieces) if pieces else torch.empty(0, 1), self._line)
        logits = torch.cat(pieces)
        scores: dict[str, float] = {}
        for split in self._splits:
            rows = logits[self._at[split].to(logits.device)]
            y = self._y[split].to(logits.device)
            scores[split] = self._task.measure(rows, y)
            scores[f"{split}_loss"] = float(self._task.loss(rows, y)) / (
                y.shape[0] * self._task.terms_per_row
            )
        return scores

    def _of_all(self, logits: Tensor, line: Collective) -> dict[str, float]:
        """The same over all ranks: counts and losses are added up; a metric that needs every row gets every row."""
        task, numbers = self._task, []
        parts = {split: (logits[self._at[split].to(logits.device)], self._y[split]) for split in self._splits}
        for rows, y in parts.values():
            y = y.to(rows.device)
            total = float(task.loss(rows, y)) if len(y) else 0.0
            counts = task.counts(rows, y) if task.counts is not None and len(y) else (0.0, 0.0)
            is_double = len(y) > 0 and rows.dtype == torch.float64
            numbers.append([total, *counts, is_double])
        sums = line.all_reduce(
            torch.tensor(numbers, dtype=torch.float64, device=line.device), kind="scores"
        ).tolist()
        scores: dict[str, float] = {}
        for (split, (rows, y)), (total, part, whole, doubles) in zip(parts.items(), sums, strict=True):
            if task.counts is not None:
                scores[split] = part / whole if whole else math.nan
            else:
                scores[split] = task.measure(
                    *_everyone(rows, y, torch.float64 if doubles else torch.float32, line)
                )
            scores[f"{split}_loss"] = total / (self._sizes[split] * task.terms_per_row)
        return scores

    def _rows(self, start: int, stop: int, logits: Tensor) -> Tensor:
        """A chunk's wanted rows."""
        low, high = torch.searchsorted(self._wanted, torch.tensor([start, stop])).tolist()
        return logits[(self._wanted[low:high] - start).to(logits.device)]


def _everyone(rows: Tensor, y: Tensor, dtype: torch.dtype, line: Collective) -> tuple[Tensor, Tensor]:
    """The rows and labels of all ranks, on each; ``dtype`` is the rows' on every rank, also on one that has none."""
    y_all = torch.cat(line.all_gather(y.to(line.device), kind="scores")).cpu()
    floats = rows.to(line.device, dtype).reshape(-1)
    flat = torch.cat(line.all_gather(floats, kind="scores"))
    return flat.cpu().view(len(y_all), -1), y_all


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
