"""Strategy ``halo`` with tensors on a CUDA device: ranks are processes that share it and talk over gloo."""

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
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "sage": lambda f, c: nn.GraphSAGE(f, 12, num_layers=3, out_channels=c, dropout=0.5, norm="batch"),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=2, out_channels=c, heads=2, dropout=0.4),
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
    }
    chosen = Trainer("single" if line is None else "halo", **{**given, "device": "cuda", **options})
    if line is None:
        result = chosen.fit(model, graph)
    else:
        assert owner is not None
        result = chosen.fit(model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line)
    weights = {key: value.cpu() for key, value in model.state_dict().items()}
    return weights, [record["loss"] for record in result.history]


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_one_process(
    make_graph: Callable[..., Graph], ranks: Callable[..., Any], name: str
) -> None:
    graph = make_graph()
    expected, losses = fit(None, graph, None, name, {})
    found = ranks(2, fit, graph, partition(graph, 2, "hash").owner, name, {})
    assert found[0][1] == pytest.approx(losses, abs=1e-9)
    for weights, _ in found:
        for key, value in expected.items():
            assert float((weights[key] - value).abs().max()) <= 1e-9, key


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": "adaptive", "bits_period": 3}, {"halo": "stale"},
                                     {"halo": "skipping"}, {"halo": "sampled", "halo_share": 0.5}], ids=str)  # fmt: skip
def test_other_halos_learn(
    make_graph: Callable[..., Graph], ranks: Callable[..., Any], options: dict[str, Any]
) -> None:
    graph = make_graph()
    given = {"max_epochs": 25, "precision": "32-true", "lr": 0.02, **options}
    found = ranks(2, fit, graph, partition(graph, 2, "hash").owner, "gcn", given)
    losses = found[0][1]
    assert losses[-1] < 0.8 * losses[0]
