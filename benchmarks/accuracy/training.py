"""One training loop for both sides: the test score at the best validation score."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

import polyhop
from benchmarks.accuracy.recipes import Recipe, recipe
from benchmarks.accuracy.sides import Side, features, make_sides
from polyhop.graph import Graph

__all__ = ["train_pair"]


@cache
def _graph(name: str) -> Graph:
    loaded: Graph = polyhop.load(name)
    return loaded


def train_pair(graph_name: str, model_name: str, seed: int) -> dict[str, tuple[float, float]]:
    """{side: (test score in points, CPU-seconds)}, both from the same initial weights; which goes first alternates."""
    torch.set_num_threads(1)
    graph, settings = _graph(graph_name), recipe(model_name, graph_name)
    x = features(graph, normalises_rows=settings.normalises_rows)
    torch.manual_seed(seed)
    sides = make_sides(graph, x, model_name, settings)
    results = {}
    for name in ("polyhop", "pyg") if seed % 2 == 0 else ("pyg", "polyhop"):
        torch.manual_seed(seed + 1000)
        start = time.process_time()
        results[name] = (100 * _train(sides[name], graph, settings), time.process_time() - start)
    return results


def _train(side: Side, graph: Graph, settings: Recipe) -> float:
    model, logits = side
    optimizer = torch.optim.Adam(_groups(model, settings), lr=settings.lr)
    assert graph.split is not None
    assert graph.y is not None
    best, best_loss, best_test, best_epoch = -1.0, float("inf"), 0.0, 0
    train, val, test = graph.split.train, graph.split.val, graph.split.test
    for epoch in range(1, settings.epochs + 1):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(logits()[train], graph.y[train]).backward()
        optimizer.step()
        if epoch % settings.eval_every and epoch != settings.epochs:
            continue
        model.eval()
        with torch.no_grad():
            out = logits()
        score = _score(out[val], graph.y[val], graph.metric)
        loss = float(functional.cross_entropy(out[val], graph.y[val]))
        is_better = score > best or (score == best and loss < best_loss)
        if loss < best_loss if settings.selects_by_loss else is_better:
            best, best_loss, best_epoch = score, loss, epoch
            best_test = _score(out[test], graph.y[test], graph.metric)
        elif epoch - best_epoch > settings.patience:
            break
    return best_test


def _groups(model: nn.Module, settings: Recipe) -> list[dict[str, object]]:
    """Weight decay by parameter name, which both sides share."""
    is_deep = any(name.startswith("lins.") for name, _ in model.named_parameters())
    prefix = "convs." if is_deep else "convs.0."
    first = [p for name, p in model.named_parameters() if name.startswith(prefix)]
    rest = [p for name, p in model.named_parameters() if not name.startswith(prefix)]
    return [
        {"params": first, "weight_decay": settings.decay_first},
        {"params": rest, "weight_decay": settings.decay_rest},
    ]


def _score(logits: Tensor, y: Tensor, metric: str) -> float:
    """Accuracy, or the area under the ROC curve of two classes (ties count half)."""
    if metric != "roc_auc":
        return float((logits.argmax(1) == y).float().mean())
    margin = (logits[:, 1] - logits[:, 0]).double()
    _, inverse, counts = torch.unique(margin, return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[inverse]  # mean rank from 1
    positive = y == 1
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    return float(
        (rank[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
    )
