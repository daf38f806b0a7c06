"""Models that cannot be a chain are refused: the message says what is in the way and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.graph import Sizes
from polyhop.nn import GCN, GCNII, GIN, DeepGCN, GCNConv, GraphSAGE, Stack
from polyhop.serverless.segments import segments

NODES, WIDTH, CLASSES = 24, 7, 4


class Changed(GCNConv):
    def update(self, z: Tensor, h_dst: Any, carried: Tensor | None, map_first: bool) -> Tensor:
        return super().update(z, h_dst, carried, map_first) * 2


class ChangedModel(GCN):
    def layer(self, *args: Any, **kwargs: Any) -> Any:
        return super().layer(*args, **kwargs)


def _twice() -> nn.Module:
    layer = GCNConv(WIDTH, WIDTH)
    return Stack([layer, layer])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GCN(WIDTH, 6, 2, CLASSES, norm="batch_norm"), "norm BatchNorm looks at all rows.*norm='layer'"),
        (lambda: GCN(WIDTH, 6, 2, CLASSES, norm=nn.Linear(6, 6)), "norm Linear has no numpy version"),
        (lambda: GCN(WIDTH, 6, 2, CLASSES, jk="cat"), "jk='cat'.*use jk=None"),
        (lambda: GCN(WIDTH, 6, 2, CLASSES, jk="last"), "jk='last'.*use jk=None"),
        (lambda: GCN(WIDTH, 6, 2, CLASSES, act="gelu"), "act GELU has no numpy version; use relu"),
        (lambda: GCN(WIDTH, 6, 2, CLASSES, act=torch.sin), "act sin has no numpy version"),
        (lambda: GraphSAGE(WIDTH, 6, 2, CLASSES, aggr="max"), "aggr='max'.*use aggr='mean' or 'sum'"),
        (lambda: GIN(WIDTH, 6, 2, CLASSES), "GINConv has no numpy version; use GCNConv"),
        (lambda: GCNII(WIDTH, 6, 2, CLASSES), "GCNII: expected GCN, GraphSAGE, GAT or a Stack"),
        (lambda: DeepGCN(WIDTH, 6, 2, CLASSES), "DeepGCN: expected GCN"),
        (lambda: nn.Linear(3, 3), "Linear: expected GCN"),
        (lambda: Stack([Changed(WIDTH, CLASSES)]), r"Changed: it has a update\(\) of its own.*use GCNConv"),
        (lambda: ChangedModel(WIDTH, 6, 2, CLASSES), r"ChangedModel: it has a layer\(\) of its own"),
        (_twice, "two of its layers are one"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"serverless: .*{message}.*strategy 'halo'"):
        segments(make(), Sizes(NODES, NODES, 50))


def test_wrapped_layers_are_refused() -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    with pytest.raises(
        UnsupportedError, match=r"Wrapped \(a layer of another library\) has no numpy version"
    ):
        segments(Stack([pyg.GraphConv(WIDTH, CLASSES)]), Sizes(NODES, NODES, 50))
