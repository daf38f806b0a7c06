"""Strategy ``split`` with four virtual ranks (threads) on one CUDA device: the values of the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.partition import Partition, partition, share
from polyhop.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "sage": lambda f, c: nn.GraphSAGE(f, 12, num_layers=3, out_channels=c, dropout=0.5),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=4, dropout=0.4),
}


def fit(
    line: Collective | None,
    graph: Graph,
    owner: Tensor | None,
    name: str,
    device: str,
    options: dict[str, Any],
) -> Any:
    with SEEDING:  # ranks are threads, and torch's generator is one
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes)
    chosen = Trainer(
        "single" if line is None else "split", max_epochs=3, batch_size=20, num_neighbors=[4, 3, 3], eval_every=100,
        precision="64-true", progress="none", seed=3, device=device, **options,
    )  # fmt: skip
    if line is None:
        chosen.fit(model, graph)
    else:
        assert owner is not None
        num_parts = line.num_ranks // options.get("split_groups", 1)
        chosen.fit(model, share(graph, Partition(owner, num_parts), line.rank % num_parts), line=line)
    return {key: value.cpu() for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"split_depth": 2, "cache": 2000}, {"split_groups": 2}, {"device_cache": 1500}],
    ids=["all layers", "two, copies", "groups", "hot rows"],
)
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_cpu(
    make_graph: Callable[..., Graph], name: str, options: dict[str, Any]
) -> None:
    graph = make_graph()
    expected = fit(None, graph, None, name, "cpu", {})
    owner = partition(graph, 4 // options.get("split_groups", 1), "hash").owner
    for weights in run_in_threads(4, fit, graph, owner, name, "cuda", options):
        for key, value in expected.items():
            assert float((weights[key] - value).abs().max()) <= 1e-9, key
