"""DeepGCN: residual layers in the "res+" order, norm -> relu -> dropout -> conv -> add (Li et al., 2020; ResGCN+)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from polyhop.errors import ConfigError
from polyhop.graph.block import Block
from polyhop.kernels.keys import Key
from polyhop.nn.conv import SAGEConv
from polyhop.nn.model import Model, State, act_and_drop, rows_of
from polyhop.nn.modules import BatchNorm
from polyhop.nn.rows import Rows, linear, own_rows

__all__ = ["DeepGCN", "DeepGCNLayer"]


class DeepGCNLayer(nn.Module):
    """One residual layer's parameters, under the names of PyG's DeepGCNLayer: ``conv`` and ``norm``."""

    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.norm = norm


class DeepGCN(Model):
    """linear -> num_layers x (h + SAGEConv(dropout(relu(norm(h))))) -> norm -> relu -> dropout -> linear.

    ``norm`` is "layer" (each row by itself) or "batch". Keys: ``node_encoder``, ``layers.i.conv``, ``layers.i.norm``,
    ``norm``, ``lin``. Further arguments go to SAGEConv. Dropout before layer i uses site i, the last one site num_layers.
    """

    begins_plain = False

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        norm: str = "layer",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if num_layers < 1 or not 0 <= dropout <= 1:
            raise ConfigError(f"DeepGCN: num_layers={num_layers} (at least 1), dropout={dropout} (0 .. 1)")
        make = _norm(norm)
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.out_channels = hidden_channels if out_channels is None else out_channels
        self.dropout = nn.Dropout(p=dropout)
        self.act = nn.ReLU()
        self.node_encoder = nn.Linear(in_channels, hidden_channels)
        self.layers = nn.ModuleList(
            DeepGCNLayer(SAGEConv(hidden_channels, hidden_channels, **kwargs), make(hidden_channels))
            for _ in range(num_layers)
        )
        self.norm = make(hidden_channels)
        self.lin = nn.Linear(hidden_channels, self.out_channels)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm, BatchNorm)):
                module.reset_parameters()

    def begin(self, x: Rows, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        return {"h": linear(x, self.node_encoder.weight, self.node_encoder.bias)}

    def layer(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        h, step = rows_of(state), self.layers[i]
        assert isinstance(step, DeepGCNLayer)
        everyone, own = own_rows(h, block)
        assert isinstance(everyone, Tensor)
        t = self._pre(step.norm, everyone, key, i, block.src_ids)
        return {"h": step.conv(t, block) + own}

    def finish(self, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> Tensor:
        out: Tensor = self.lin(self._pre(self.norm, rows_of(state), key, self.num_layers, ids))
        return out

    def _pre(self, norm: nn.Module, h: Tensor, key: Key | None, site: int, ids: Tensor | None) -> Tensor:
        """norm -> relu -> dropout."""
        return act_and_drop(norm(h), self.act, self.dropout.p if self.training else 0.0, key, site, ids=ids)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, num_layers={self.num_layers}"


def _norm(name: str) -> Callable[[int], nn.Module]:
    plain = name.lower().replace("_", "").removesuffix("norm")
    if plain == "layer":
        return nn.LayerNorm
    if plain == "batch":
        return BatchNorm
    raise ConfigError(f"DeepGCN: norm={name!r}: expected 'layer' or 'batch'")
