"""How good a set of logits is, as one number. Legend: n rows, C classes (or labels per node)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polyhop.errors import ConfigError, unknown

__all__ = ["METRICS", "accuracy", "f1_micro", "roc_auc", "score"]


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Share of rows whose largest logit is the label; for y [n, C], share of the n x C labels on the right side of 0."""
    if y.dim() == 1:
        return _mean(logits.argmax(dim=1) == y)
    return _mean((logits > 0) == (y > 0.5))


def f1_micro(logits: Tensor, y: Tensor) -> float:
    """2 TP / (2 TP + FP + FN) over all rows and classes; single-label rows predict one class each, so it is accuracy."""
    if y.dim() == 1:
        return accuracy(logits, y)
    predicted, true = logits > 0, y > 0.5
    both = int((predicted & true).sum())
    total = int(predicted.sum()) + int(true.sum())
    return math.nan if total == 0 else 2 * both / total


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


def _mean(hits: Tensor) -> float:
    return math.nan if hits.numel() == 0 else int(hits.sum()) / hits.numel()


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
