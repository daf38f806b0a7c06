"""Chunks become metrics, a tensor or a file, whatever their bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from polyhop.errors import ConfigError, PolyhopError
from polyhop.graph import Graph
from polyhop.train.loss import binary_cross_entropy_sum, cross_entropy_sum
from polyhop.train.metrics import METRICS
from polyhop.train.scores import Scorer, collect, write_npy
from polyhop.train.task import Task

MakeGraph = Callable[..., Graph]
LOGITS = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))


def chunks_of(logits: Tensor, size: int) -> Callable[[Tensor | None], Iterator[tuple[int, int, Tensor]]]:
    def chunks(wanted: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        for start in range(0, logits.shape[0], size):
            stop = min(start + size, logits.shape[0])
            if wanted is None or bool(((wanted >= start) & (wanted < stop)).any()):
                yield start, stop, logits[start:stop]

    return chunks


def task_of(graph: Graph) -> Task:
    return Task.of(graph, {False: cross_entropy_sum, True: binary_cross_entropy_sum}, METRICS)


@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("size", [1, 7, 200])
def test_scores_do_not_depend_on_chunks(make_graph: MakeGraph, kind: str, size: int) -> None:
    graph = make_graph(kind=kind)
    scores = Scorer(task_of(graph), ("train", "val", "test"))(chunks_of(LOGITS, size))
    assert graph.y is not None
    assert graph.split is not None
    for split in ("train", "val", "test"):
        ids = getattr(graph.split, split)
        ids = ids[graph.y[ids] >= 0] if kind == "single" else ids
        assert scores[split] == METRICS["accuracy"](LOGITS[ids], graph.y[ids])
        mean = (
            torch.nn.functional.cross_entropy
            if kind == "single"
            else torch.nn.functional.binary_cross_entropy_with_logits
        )
        assert scores[f"{split}_loss"] == pytest.approx(float(mean(LOGITS[ids], graph.y[ids])), rel=1e-5)


def test_unknown_split(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError, match=r"unknown split 'valid'. Did you mean 'val'"):
        Scorer(task_of(make_graph()), ("valid",))


@pytest.mark.parametrize("size", [1, 33, 200])
def test_collect_and_file(size: int, tmp_path: Path) -> None:
    assert torch.equal(collect(chunks_of(LOGITS, size), 200), LOGITS)
    mapped = write_npy(chunks_of(LOGITS, size), 200, tmp_path / "deep" / "out.npy")
    assert isinstance(mapped, np.memmap)
    assert np.array_equal(mapped, LOGITS.numpy())
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out.npy"]


def test_small_formats_become_float32(tmp_path: Path) -> None:
    small = LOGITS.bfloat16()
    assert collect(chunks_of(small, 50), 200).dtype == torch.float32
    assert write_npy(chunks_of(small, 50), 200, tmp_path / "a.npy").dtype == np.float32


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def broken(wanted: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        yield 0, 50, LOGITS[:50]
        raise OSError(28, "No space left on device")

    with pytest.raises(PolyhopError, match="cannot write predictions"):
        write_npy(broken, 200, tmp_path / "a.npy")
    assert list(tmp_path.iterdir()) == []
