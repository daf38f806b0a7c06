"""GCN, GraphSAGE, GAT and GIN: PyG's basic models, with its arguments and state-dict keys.

Each layer is convolution -> norm -> activation -> dropout (activation before norm if ``act_first``), the last one
plain unless jumping knowledge (``jk``) joins all layers' rows by a final linear map.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from polyhop.errors import ConfigError, UnsupportedError, unknown
from polyhop.graph.aggregated import FixedAggregate
from polyhop.graph.block import Block
from polyhop.graph.sliced import SlicedMap
from polyhop.kernels.keys import Key
from polyhop.nn.conv import GATConv, GCNConv, GINConv, SAGEConv
from polyhop.nn.layer import Layer
from polyhop.nn.model import (
    Model,
    State,
    act_and_drop,
    drop_rows,
    first_aggregate,
    first_map,
    rows_of,
    slice_destinations,
)
from polyhop.nn.modules import MLP, JumpingKnowledge, activation, normalisation

__all__ = ["GAT", "GCN", "GIN", "BasicGNN", "GraphSAGE"]


class BasicGNN(Model):
    """Base of the four. ``out_channels`` None = ``hidden_channels``; further arguments go to the convolutions."""

    takes_pool = True

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        act: str | Callable[[Tensor], Tensor] | None = "relu",
        act_first: bool = False,
        act_kwargs: dict[str, Any] | None = None,
        norm: str | nn.Module | None = None,
        norm_kwargs: dict[str, Any] | None = None,
        jk: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _check(num_layers, dropout, jk)
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.out_channels = hidden_channels if out_channels is None else out_channels
        self.dropout = nn.Dropout(p=dropout)
        self.act = activation(act, **(act_kwargs or {}))
        self.act_first = act_first
        self.jk_mode = jk
        self.norm = norm if isinstance(norm, str) else None
        self.norm_kwargs = norm_kwargs
        to_out = out_channels is not None and jk is None
        widths = [in_channels] + [hidden_channels] * num_layers
        if to_out:
            widths[-1] = self.out_channels
        self.convs = nn.ModuleList(
            self.init_conv(widths[i], widths[i + 1], is_output=to_out and i == num_layers - 1, **kwargs)
            for i in range(num_layers)
        )
        made = normalisation(norm, hidden_channels, **(norm_kwargs or {})) or nn.Identity()
        num_norms = num_layers if jk is not None else num_layers - 1
        self.norms = nn.ModuleList(copy.deepcopy(made) for _ in range(num_norms))
        self.norms.extend(nn.Identity() for _ in range(num_layers - num_norms))
        if jk is not None:
            if jk != "last":
                self.jk = JumpingKnowledge(jk, hidden_channels, num_layers)
            joined = num_layers * hidden_channels if jk == "cat" else hidden_channels
            self.lin = nn.Linear(joined, self.out_channels)

    def init_conv(self, in_channels: int, out_channels: int, *, is_output: bool, **kwargs: Any) -> Layer:
        """The convolution of one layer; ``is_output`` marks the one that gives the model's output."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        named = [
            *self.convs,
            *self.norms,
            *(getattr(self, name) for name in ("jk", "lin") if hasattr(self, name)),
        ]
        for module in named:
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    def fixed_aggregate(self) -> FixedAggregate:
        return first_aggregate(self, BasicGNN, self.convs[0])

    def sliced_map(self) -> SlicedMap:
        return first_map(self, BasicGNN, self.convs[0])

    def layer(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        h: Tensor = self.convs[i](state["h"], block, key=key, site=i)
        if i == self.num_layers - 1 and self.jk_mode is None:
            return {"h": h}
        h = self._after(i, h, block, key, self.dropout.p if self.training else 0.0)
        if not hasattr(self, "jk"):
            return {"h": h}
        kept = slice_destinations(block, state, [f"jk{k}" for k in range(i)])
        return {"h": h, **kept, f"jk{i}": h}

    def undropped(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        h: Tensor = self.convs[i](state["h"], block, key=key, site=i)
        if i < self.num_layers - 1 or self.jk_mode is not None:
            h = self._after(i, h, block, key, 0.0)
        kept = [f"jk{k}" for k in range(i)] if hasattr(self, "jk") else []
        return {"h": h, **slice_destinations(block, state, kept)}

    def dropped(self, i: int, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        if i == self.num_layers - 1 and self.jk_mode is None:
            return state
        h = drop_rows(rows_of(state), self.dropout.p if self.training else 0.0, key, i, ids=ids)
        return state | {"h": h} | ({f"jk{i}": h} if hasattr(self, "jk") else {})

    def _after(self, i: int, h: Tensor, block: Block, key: Key | None, p: float) -> Tensor:
        """Norm, activation and dropout of layer i's output."""
        act, norm = self.act, self.norms[i]
        if self.act_first and act is not None and not isinstance(norm, nn.Identity):
            h, act = act(h), None
        in_place = isinstance(norm, nn.Identity) and bool(self.convs[i].gives_own)
        return act_and_drop(norm(h), act, p, key, i, block, in_place=in_place)

    def finish(self, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> Tensor:
        h = rows_of(state)
        if hasattr(self, "jk"):
            h = self.jk([rows_of(state, f"jk{k}") for k in range(self.num_layers)])
        if self.jk_mode is not None:
            h = self.lin(h)
        return h

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, num_layers={self.num_layers}"


def _check(num_layers: int, dropout: float, jk: str | None) -> None:
    if num_layers < 1:
        raise ConfigError(f"num_layers={num_layers}: expected at least 1")
    if not 0 <= dropout <= 1:
        raise ConfigError(f"dropout={dropout}: expected a probability in 0 .. 1")
    modes = ("last", "cat", "max", "lstm")
    if jk is not None and jk not in modes:
        raise ConfigError(unknown("jk", jk, modes))


class GCN(BasicGNN):
    """Kipf & Welling's GCN (``GCNConv`` layers)."""

    def init_conv(self, in_channels: int, out_channels: int, *, is_output: bool, **kwargs: Any) -> Layer:
        return GCNConv(in_channels, out_channels, **kwargs)


class GraphSAGE(BasicGNN):
    """Hamilton et al.'s GraphSAGE (``SAGEConv`` layers)."""

    def init_conv(self, in_channels: int, out_channels: int, *, is_output: bool, **kwargs: Any) -> Layer:
        return SAGEConv(in_channels, out_channels, **kwargs)


class GIN(BasicGNN):
    """Xu et al.'s GIN (``GINConv`` layers around a two-layer MLP)."""

    def init_conv(self, in_channels: int, out_channels: int, *, is_output: bool, **kwargs: Any) -> Layer:
        widths = [in_channels, out_channels, out_channels]
        mlp = MLP(
            widths, act=self.act, act_first=self.act_first, norm=self.norm, norm_kwargs=self.norm_kwargs
        )
        return GINConv(mlp, **kwargs)


class GAT(BasicGNN):
    """Veličković et al.'s GAT (``GATConv`` layers). The heads are joined, and averaged where the layer gives the output."""

    def init_conv(self, in_channels: int, out_channels: int, *, is_output: bool, **kwargs: Any) -> Layer:
        if kwargs.pop("v2", False):
            raise UnsupportedError(
                "GAT: v2=True is not supported; use polyhop.nn.Stack of torch_geometric GATv2Conv layers"
            )
        heads = kwargs.pop("heads", 1)
        concat = kwargs.pop("concat", True) and not is_output
        if concat and out_channels % heads != 0:
            raise ConfigError(
                f"GAT: {out_channels} columns cannot be shared by heads={heads}; use a multiple of heads"
            )
        width = out_channels // heads if concat else out_channels
        return GATConv(in_channels, width, heads=heads, concat=concat, dropout=self.dropout.p, **kwargs)
