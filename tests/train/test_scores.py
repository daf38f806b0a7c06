"""Chunks become metrics, a tensor or a file, whatever their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError, PolyhopError
from polyhop.graph import Graph, SharedGraph, Split
from polyhop.partition import Partition, share
from polyhop.train.loss import binary_cross_entropy_sum, cross_entropy_sum
from polyhop.train.metrics import COUNTS, METRICS
from polyhop.train.scores import Scorer, collect, write_npy
from polyhop.train.task import Task

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]
SPLITS = ("train", "val", "test")
LOGITS = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))


def chunks_of(logits: Tensor, size: int) -> Callable[[Tensor | None], Iterator[tuple[int, int, Tensor]]]:
    def chunks(wanted: Tensor | None) -> Iterator[tuple[int, int, Tensor]]:
        for start in range(0, logits.shape[0], size):
            stop = min(start + size, logits.shape[0])
            if wanted is None or bool(((wanted >= start) & (wanted < stop)).any()):
                yield start, stop, logits[start:stop]

    return chunks


def task_of(graph: Graph | SharedGraph, metric: str | None = None) -> Task:
    losses = {False: cross_entropy_sum, True: binary_cross_entropy_sum}
    return Task.of(graph, losses, METRICS, metric, COUNTS)


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


def part_scores(
    line: Collective, graph: Graph, owner: Tensor, metric: str, logits: Tensor, size: int
) -> tuple[dict[str, float], list[bool]]:
    """Scores as every rank has them; of a rank's logits there are chunks only where it has nodes."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    scorer = Scorer(task_of(held, metric), SPLITS, line)
    own = logits[held.part.user_ids]
    return scorer(chunks_of(own, size)), [scorer.has(split) for split in SPLITS]


def owners(graph: Graph, kind: str) -> Tensor:
    """int32 [N]. ``by split``: rank 0 has the train nodes, rank 1 those of val, rank 2 those of test."""
    nodes = torch.arange(graph.num_nodes)
    if kind == "by split":
        assert graph.split is not None
        owner = torch.zeros(graph.num_nodes, dtype=torch.int32)
        owner[graph.split.val], owner[graph.split.test] = 1, 2
        return owner
    return {"even": nodes % 3, "first empty": nodes % 2 + 1, "last empty": nodes % 2}[kind].int()


@pytest.mark.parametrize("parts", ["even", "first empty", "last empty", "by split"])
@pytest.mark.parametrize("kind", ["single", "multi"])
@pytest.mark.parametrize("metric", list(METRICS))
def test_scores_of_all_ranks_are_those_of_the_whole(
    make_graph: MakeGraph, metric: str, kind: str, parts: str
) -> None:
    graph = make_graph(kind=kind)
    for logits in (LOGITS, LOGITS.double(), LOGITS.bfloat16()):
        expected = Scorer(task_of(graph, metric), SPLITS)(chunks_of(logits, 200))
        assert len(expected) == 6
        found = run_in_threads(3, part_scores, graph, owners(graph, parts), metric, logits, 17)
        for scores, has in found:
            assert has == [True] * 3
            assert scores == found[0][0]  # the same numbers on each
            bound = 1e-2 if logits.dtype == torch.bfloat16 else 1e-6  # of a sum of losses in that format
            assert scores == pytest.approx(expected, rel=bound)
            if metric != "roc_auc":
                assert {s: scores[s] for s in SPLITS} == {s: expected[s] for s in SPLITS}


def test_a_metric_that_needs_every_row_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    """Also where a rank has no row of a split, and so cannot know the others' width and dtype."""
    graph = make_graph()
    for parts in ("first empty", "by split"):
        for logits in (LOGITS, LOGITS.double()):
            expected = Scorer(task_of(graph, "roc_auc"), SPLITS)(chunks_of(logits, 200))
            for scores, _ in ranks(3, part_scores, graph, owners(graph, parts), "roc_auc", logits, 50):
                assert scores == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("metric", list(METRICS))
def test_a_split_that_no_rank_has_is_left_out(make_graph: MakeGraph, metric: str) -> None:
    graph = make_graph()
    assert graph.split is not None
    none = torch.empty(0, dtype=torch.int64)
    graph = replace(graph, split=Split(graph.split.train, none, graph.split.test))
    for scores, has in run_in_threads(3, part_scores, graph, owners(graph, "even"), metric, LOGITS, 50):
        assert has == [True, False, True]
        assert sorted(scores) == ["test", "test_loss", "train", "train_loss"]
    bare = replace(graph, split=Split(none, none, none))
    for scores, has in run_in_threads(3, part_scores, bare, owners(bare, "even"), metric, LOGITS, 50):
        assert (scores, has) == ({}, [False] * 3)


def test_a_count_of_nothing_is_no_number(make_graph: MakeGraph) -> None:
    """F1 where nobody has, and nobody predicts, a positive label."""
    graph = make_graph(kind="multi")
    assert graph.y is not None
    graph = replace(graph, y=torch.zeros_like(graph.y))
    for scores, _ in run_in_threads(
        2, part_scores, graph, (torch.arange(200) % 2).int(), "f1_micro", -LOGITS.abs(), 50
    ):
        assert math.isnan(scores["val"])
        assert scores["val_loss"] > 0
