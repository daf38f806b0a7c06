"""How good a set of logits is, as one number. Legend: n rows, C classes (or labels per node)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyhop.errors import ConfigError, unknown

__all__ = ["COUNTS", "METRICS", "accuracy", "f1_counts", "f1_micro", "hit_counts", "roc_auc", "score"]


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Share of rows whose largest logit is the label; for y [n, C], share of the n x C labels on the right side of 0."""
    return _ratio(*hit_counts(logits, y))


def f1_micro(logits: Tensor, y: Tensor) -> float:
    """2 TP / (2 TP + FP + FN) over all rows and classes; single-label rows predict one class each, so it is accuracy."""
    return _ratio(*f1_counts(logits, y))


def roc_auc(logits: Tensor, y: Tensor) -> float:
    """Chance that a random positive scores above a random negative, ties counting half.

    Two classes: the score is logit 1 - logit 0. More classes, or y [n, C]: the mean over the classes that have both
    positives and negatives (one against the rest); NaN if none has.
    """
    if y.dim() == 1 and logits.shape[1] == 2:
        return _binary_auc(logits[:, 1] - logits[:, 0], y == 1)
    columns = range(logits.shape[1])
    truth = [(y == c) if y.dim() == 1 else (y[:, c] > 0.5) for c in columns]
    areas = [_binary_auc(logits[:, c], truth[c]) for c in columns]
    known = [area for area in areas if not math.isnan(area)]
    return sum(known) / len(known) if known else math.nan


def _binary_auc(scores: Tensor, positive: Tensor) -> float:
    """Mann-Whitney: (sum of the positives' mean ranks - P (P + 1) / 2) / (P Q), for P positives and Q negatives."""
    num_positive = int(positive.sum())
    num_negative = positive.numel() - num_positive
    if num_positive == 0 or num_negative == 0:
        return math.nan
    _, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    last_rank = counts.cumsum(0).double()
    mean_rank = last_rank - (counts.double() - 1) / 2
    rank_sum = float(mean_rank[inverse[positive]].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def _ratio(part: float, whole: float) -> float:
    return math.nan if whole == 0 else part / whole


def hit_counts(logits: Tensor, y: Tensor) -> tuple[float, float]:
    """(rows or labels that are right, all of them): accuracy is their ratio."""
    hits = (logits.argmax(dim=1) == y) if y.dim() == 1 else ((logits > 0) == (y > 0.5))
    return float(hits.sum()), float(hits.numel())


def f1_counts(logits: Tensor, y: Tensor) -> tuple[float, float]:
    """(2 TP, 2 TP + FP + FN): the micro-averaged F1 is their ratio."""
    if y.dim() == 1:
        return hit_counts(logits, y)
    predicted, true = logits > 0, y > 0.5
    return 2.0 * float((predicted & true).sum()), float(predicted.sum()) + float(true.sum())


COUNTS: dict[str, Callable[[Tensor, Tensor], tuple[float, float]]] = {
    "accuracy": hit_counts,
    "f1_micro": f1_counts,
}
"""Metrics that are a ratio of two counts, so that ranks can add theirs up instead of sending their rows."""

METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1_micro": f1_micro,
    "roc_auc": roc_auc,
}


def score(name: str, logits: Tensor, y: Tensor) -> float:
    """The named metric of logits [n, C] against y (int64 [n], rows of label -1 left out, or 0/1 [n, C]); NaN of no rows."""
    if name not in METRICS:
        raise ConfigError(unknown("metric", name, METRICS))
    if y.dim() == 1 and bool((y < 0).any()):
        labelled = y >= 0
        logits, y = logits[labelled], y[labelled]
    return math.nan if y.shape[0] == 0 else METRICS[name](logits, y)
