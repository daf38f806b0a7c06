"""Strategies ``data`` and ``macro`` with four virtual ranks (threads) on one CUDA device, and every strategy over nccl with
one rank: the values of one process on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.comm.torch_line import join
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
BATCHES = {"batch_size": 20, "num_neighbors": [4, 3, 3]}


def fit(
    line: Collective | None, graph: Graph, owner: Tensor, name: str, strategy: str, options: dict[str, Any]
) -> Any:
    with SEEDING:  # ranks are threads, and torch's generator is one
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes)
    chosen = Trainer(
        strategy, max_epochs=3, eval_every=100, precision="64-true", progress="none", seed=3, **options
    )
    if line is None:
        chosen.fit(model, graph)
    else:
        chosen.fit(model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line)
    return {key: value.cpu() for key, value in model.state_dict().items()}


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for key, value in expected.items():
        assert float((found[key] - value).abs().max()) <= 1e-9, key


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("data", {}),
        ("data", {"cache": 2000}),
        ("macro", {"macro": 2}),
        ("macro", {"aggregate_inputs": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_on_one_device(
    make_graph: Callable[..., Graph], name: str, strategy: str, options: dict[str, Any]
) -> None:
    graph = make_graph()
    owner = partition(graph, 4, "hash").owner
    expected = fit(None, graph, owner, name, "single", {**BATCHES, "device": "cpu"})
    given = {**BATCHES, "device": "cuda", **options}
    for weights in run_in_threads(4, fit, graph, owner, name, strategy, given):
        assert_same(expected, weights)


@pytest.mark.parametrize("strategy", ["data", "macro", "split", "pushpull", "halo", "pipeline"])
def test_one_rank_over_nccl(make_graph: Callable[..., Graph], strategy: str) -> None:
    graph = make_graph()
    owner = torch.zeros(graph.num_nodes, dtype=torch.int32)
    more: dict[str, Any] = {} if strategy in ("halo", "pipeline") else BATCHES
    expected = fit(None, graph, owner, "sage", "single", {**more, "device": "cpu"})
    line = join(torch.distributed.HashStore(), 0, 1, backend="nccl")
    try:
        assert_same(expected, fit(line, graph, owner, "sage", strategy, {**more, "device": "cuda"}))
    finally:
        line.close()
