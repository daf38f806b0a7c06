"""Strategy ``pipeline`` with tensors on a CUDA device: ranks are processes that share it and talk over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=4, out_channels=c, dropout=0.5),
    "sage": lambda f, c: nn.GraphSAGE(f, 12, num_layers=4, out_channels=c, dropout=0.5),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=4, out_channels=c, heads=2, dropout=0.4),
    "gcnii": lambda f, c: nn.GCNII(f, 12, num_layers=4, out_channels=c, dropout=0.5),
    "deepgcn": lambda f, c: nn.DeepGCN(f, 12, num_layers=4, out_channels=c, dropout=0.5),
}


def fit(
    line: Collective | None, graph: Graph, owner: Tensor | None, name: str, options: dict[str, Any]
) -> Any:
    torch.manual_seed(7)
    model = MODELS[name](graph.num_features, graph.num_classes)
    given: dict[str, Any] = {
        "max_epochs": 6,
        "eval_every": 100,
        "precision": "64-true",
        "progress": "none",
        "seed": 3,
        "device": "cuda",
    }
    if line is None:
        result = Trainer("single", **given).fit(model, graph)
    else:
        assert owner is not None
        shared = share(graph, Partition(owner, line.num_ranks), line.rank)
        result = Trainer("pipeline", **{**given, **options}).fit(model, shared, line=line)
    weights = {key: value.cpu() for key, value in model.state_dict().items()}
    return weights, [record["loss"] for record in result.history]


@pytest.mark.parametrize("ways", [{"exact_layers": True, "chunks": 4}, {"stages": 1, "chunks": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_one_process(
    make_graph: Callable[..., Graph], ranks: Callable[..., Any], name: str, ways: dict[str, Any]
) -> None:
    graph = make_graph()
    expected, losses = fit(None, graph, None, name, {})
    found = ranks(2, fit, graph, partition(graph, 2, "hash").owner, name, ways)
    assert found[0][1] == pytest.approx(losses, abs=1e-9)
    for weights, _ in found:
        for key, value in expected.items():
            assert float((weights[key] - value).abs().max()) <= 1e-8, key


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"bits": 8}, {"history_gradients": True},
                                     {"history_sweeps": 1}, {"history_period": 3, "history_gamma": 2.0},
                                     {"history_bound": 0.01}], ids=str)  # fmt: skip
def test_history_learns(
    make_graph: Callable[..., Graph], ranks: Callable[..., Any], options: dict[str, Any]
) -> None:
    """As far as training without history does, or nearly."""
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    given: dict[str, Any] = {"max_epochs": 40, "precision": "32-true", "lr": 0.02, "chunks": 4}
    exact = ranks(2, fit, graph, owner, "gcnii", {**given, "exact_layers": True})[0][1]
    losses = ranks(2, fit, graph, owner, "gcnii", {**given, **options})[0][1]
    assert losses[0] - losses[-1] > 0.7 * (exact[0] - exact[-1]) > 0.1
