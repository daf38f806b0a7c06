"""Metrics against slow, obvious definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.errors import ConfigError
from polyhop.train.metrics import COUNTS, METRICS, accuracy, f1_micro, roc_auc, score


def auc_by_pairs(scores: list[float], positive: list[bool]) -> float:
    """The definition: over all (positive, negative) pairs, wins plus half the ties."""
    pairs = [
        (p, n) for p, is_p in zip(scores, positive) if is_p for n, is_n in zip(scores, positive) if not is_n
    ]
    if not pairs:
        return math.nan
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
def test_binary_roc_auc_is_the_share_of_pairs_in_order(rows: list[tuple[int, bool]]) -> None:
    scores, positive = [float(s) for s, _ in rows], [p for _, p in rows]
    logits = torch.tensor([[0.0, s] for s in scores])
    expected = auc_by_pairs(scores, positive)
    assert roc_auc(logits, torch.tensor(positive).long()) == pytest.approx(expected, nan_ok=True, abs=1e-12)


def test_two_class_score_is_the_difference_of_logits() -> None:
    logits, y = torch.tensor([[5.0, 6.0], [0.0, 3.0], [9.0, 9.5]]), torch.tensor([0, 1, 0])
    assert roc_auc(logits, y) == 1.0  # by the second logit alone it would be 0


def test_multilabel_roc_auc_is_the_mean_over_classes_with_both_kinds() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, y = (
        torch.randn(50, 4, generator=generator),
        (torch.rand(50, 4, generator=generator) > 0.6).float(),
    )
    y[:, 3] = 1.0  # no negatives: left out
    areas = [auc_by_pairs(logits[:, c].tolist(), (y[:, c] > 0.5).tolist()) for c in range(3)]
    assert roc_auc(logits, y) == pytest.approx(sum(areas) / 3, abs=1e-12)


def test_roc_auc_of_many_classes_is_one_against_the_rest() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, y = torch.randn(40, 3, generator=generator), torch.randint(3, (40,), generator=generator)
    areas = [auc_by_pairs(logits[:, c].tolist(), (y == c).tolist()) for c in range(3)]
    assert roc_auc(logits, y) == pytest.approx(sum(areas) / 3, abs=1e-12)


def test_roc_auc_of_one_kind_only_is_not_a_number() -> None:
    assert math.isnan(roc_auc(torch.randn(4, 2), torch.ones(4, dtype=torch.int64)))


def test_accuracy() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert accuracy(logits, torch.tensor([1, 0, 0, 1])) == 0.75
    assert accuracy(logits - 0.5, torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])) == 0.875


def test_f1_micro_counts_all_labels_together() -> None:
    logits = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    y = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])  # TP 2, FP 1, FN 1
    assert f1_micro(logits, y) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert math.isnan(f1_micro(-torch.ones(2, 2), torch.zeros(2, 2)))
    single = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert f1_micro(single, torch.tensor([1, 1])) == accuracy(single, torch.tensor([1, 1])) == 0.5


def test_score_leaves_unlabelled_rows_out() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert score("accuracy", logits, torch.tensor([1, -1, -1])) == 1.0
    assert math.isnan(score("accuracy", logits, torch.tensor([-1, -1, -1])))


def test_unknown_metric_suggests() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'accuracy'"):
        score("acuracy", torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("name", list(COUNTS))
@pytest.mark.parametrize("multi", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_counts_of_pieces_add_up_to_the_metric(name: str, multi: bool, data: st.DataObject) -> None:
    """However the rows are spread over ranks, some of which may have none."""
    n = data.draw(st.integers(1, 25))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(n, 3, generator=rng)
    y = (torch.rand(n, 3, generator=rng) > 0.6).float() if multi else torch.randint(3, (n,), generator=rng)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))
    pieces = [COUNTS[name](logits[a:b], y[a:b]) for a, b in zip([0, *cuts], [*cuts, n])]
    part, whole = (sum(piece[at] for piece in pieces) for at in (0, 1))
    expected = METRICS[name](logits, y)
    assert (part / whole if whole else math.nan) == pytest.approx(expected, nan_ok=True, abs=1e-12)


def test_what_is_no_ratio_of_counts_says_so() -> None:
    assert set(METRICS) - set(COUNTS) == {"roc_auc"}


@pytest.mark.parametrize("metric", list(METRICS.values()))
def test_no_rows_are_no_number(metric) -> None:
    assert math.isnan(metric(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))
    assert math.isnan(metric(torch.zeros(0, 3), torch.zeros(0, 3)))
