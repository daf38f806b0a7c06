"""What a graph must have before it can be trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.nn import GCN
from polyhop.train.loss import binary_cross_entropy_sum, cross_entropy_sum
from polyhop.train.metrics import METRICS
from polyhop.train.task import Task, check_model

MakeGraph = Callable[..., Graph]
LOSSES = {False: cross_entropy_sum, True: binary_cross_entropy_sum}


def test_unlabelled_nodes_are_left_out(make_graph: MakeGraph) -> None:
    graph = make_graph()
    task = Task.of(graph, LOSSES, METRICS)
    assert graph.split is not None
    assert task.train_ids().tolist() == graph.split.train[1:].tolist()
    assert (task.metric, task.loss, task.terms_per_row) == ("accuracy", cross_entropy_sum, 1)


def test_multilabel(make_graph: MakeGraph) -> None:
    task = Task.of(make_graph(kind="multi"), LOSSES, METRICS, "roc_auc")
    assert (task.metric, task.loss, task.terms_per_row) == ("roc_auc", binary_cross_entropy_sum, 3)
    assert task.train_ids().numel() == 100


def test_what_is_missing_is_said(make_graph: MakeGraph) -> None:
    graph = make_graph()
    with pytest.raises(ConfigError, match="no labels"):
        Task.of(replace(graph, y=None), LOSSES, METRICS)
    with pytest.raises(ConfigError, match="no train/val/test split"):
        Task.of(replace(graph, split=None), LOSSES, METRICS)
    with pytest.raises(ConfigError, match="train set is empty"):
        Task.of(replace(graph, y=torch.full((200,), -1)), LOSSES, METRICS).train_ids()
    with pytest.raises(ConfigError, match="unknown metric"):
        Task.of(replace(graph, metric="brier"), LOSSES, METRICS)


def test_widths_must_fit(make_graph: MakeGraph) -> None:
    graph = make_graph()
    check_model(GCN(8, 4, num_layers=1, out_channels=3), graph)
    with pytest.raises(ConfigError, match="takes 9 features per node, graph 'planted' has 8"):
        check_model(GCN(9, 4, num_layers=1, out_channels=3), graph)
    with pytest.raises(ConfigError, match="gives 2 outputs per node, graph 'planted' has 3 classes"):
        check_model(GCN(8, 4, num_layers=1, out_channels=2), graph)
    with pytest.raises(ConfigError, match="without a shape yet"):
        check_model(torch.nn.LazyLinear(3), graph)
