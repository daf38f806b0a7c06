"""A whole training step by the kernels: mini-batches and gradients are those of the host's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.nn import GCN, GraphSAGE
from polyhop.sample import NeighborLoader
from polyhop.strategies import Placement, WholeGraph
from polyhop.strategies.placed import place_graph
from polyhop.strategies.single import _MiniBatch
from polyhop.train.loss import cross_entropy_sum

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "sage": lambda f, c: GraphSAGE(f, 6, num_layers=3, out_channels=c),
    "sage, dropout": lambda f, c: GraphSAGE(f, 6, num_layers=3, out_channels=c, dropout=0.5),
    "gcn": lambda f, c: GCN(f, 6, num_layers=3, out_channels=c),
}
FAN_OUTS = [3, 2, 2]


@pytest.mark.parametrize("cache", [None, 0, 1000])
@pytest.mark.parametrize("name", ["sage, dropout", "gcn", pytest.param("sage", marks=pytest.mark.slow)])
def test_gradients_of_the_host(
    make_graph: Callable[..., Graph], device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, cache: int | None
) -> None:  # fmt: skip
    graph = make_graph(200)
    assert graph.split is not None
    found = place_graph(
        graph, device, 1 << 30, cache=cache, train_ids=graph.split.train, batch_size=6, num_neighbors=FAN_OUTS
    )
    assert found is not None
    torch.manual_seed(7)
    model = MODELS[name](graph.num_features, graph.num_classes)
    gradients = []
    for kernels, on in (("auto", torch.device("cpu")), ("triton", device)):
        monkeypatch.setenv("POLYHOP_KERNELS", kernels)
        is_placed = kernels == "triton"
        loader = NeighborLoader(
            found.graph if is_placed else graph, FAN_OUTS, batch_size=6, seed=5, num_workers=0,
            in_place=cache is None, device=on if is_placed else None, transposes=is_placed,
        )  # fmt: skip
        placement = Placement(on, torch.float32)
        model = model.to(on).train()
        step = _MiniBatch(model, loader, WholeGraph(graph, placement), cross_entropy_sum, 1, None, [])
        batches = step.batches(1)
        for at in range(2):
            model.zero_grad()
            loss = step.gradients(next(batches), Key(3, 1, at))
            gradients.append(
                [loss.cpu(), *(p.grad.cpu().clone() for p in model.parameters() if p.grad is not None)]
            )
    for one, two in zip(gradients[:2], gradients[2:], strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
