"""Stack: any layers one after another, ours or PyG's, with activation and dropout between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph.aggregated import FixedAggregate
from polyhop.graph.block import Block
from polyhop.graph.sliced import SlicedMap
from polyhop.kernels.keys import Key
from polyhop.nn.conv import wrap
from polyhop.nn.layer import Layer
from polyhop.nn.model import Model, State, act_and_drop, drop_rows, first_aggregate, first_map, rows_of
from polyhop.nn.modules import activation

__all__ = ["Stack"]


class Stack(Model):
    """layers[0] -> act -> dropout -> layers[1] -> ... -> layers[-1]. PyG convolutions are wrapped on the way in.

    Layers that need carried rows (GCN2Conv) have a model of their own (GCNII) and are refused.
    """

    takes_pool = True

    def __init__(
        self,
        layers: Sequence[nn.Module],
        dropout: float = 0.0,
        act: str | Callable[[Tensor], Tensor] | None = "relu",
    ) -> None:
        super().__init__()
        if not layers:
            raise ConfigError("Stack: expected at least one layer")
        wrapped = [layer if isinstance(layer, Layer) else wrap(layer) for layer in layers]
        for layer in wrapped:
            if layer.takes_carried:
                raise UnsupportedError(
                    f"Stack: {type(layer).__name__} needs rows carried from the start; use GCNII"
                )
        self.layers = nn.ModuleList(wrapped)
        self.num_layers = len(wrapped)
        self.in_channels = wrapped[0].in_channels
        self.out_channels = wrapped[-1].out_channels
        self.dropout = nn.Dropout(p=dropout)
        self.act = activation(act)

    def fixed_aggregate(self) -> FixedAggregate:
        return first_aggregate(self, Stack, self.layers[0])

    def sliced_map(self) -> SlicedMap:
        return first_map(self, Stack, self.layers[0])

    def layer(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        h: Tensor = self.layers[i](state["h"], block, key=key, site=i)
        if i == self.num_layers - 1:
            return {"h": h}
        return {"h": act_and_drop(h, self.act, self.dropout.p if self.training else 0.0, key, i, block)}

    def undropped(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        h: Tensor = self.layers[i](state["h"], block, key=key, site=i)
        return {"h": h if i == self.num_layers - 1 or self.act is None else self.act(h)}

    def dropped(self, i: int, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        if i == self.num_layers - 1:
            return state
        return {"h": drop_rows(rows_of(state), self.dropout.p if self.training else 0.0, key, i, ids=ids)}
