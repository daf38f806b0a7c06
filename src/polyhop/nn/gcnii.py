"""GCNII: deep GCN with initial residuals and identity maps (Chen et al., 2020), as in PyG's example for citation graphs."""

from __future__ import annotations

from torch import Tensor, nn

from polyhop.errors import ConfigError
from polyhop.graph.block import Block
from polyhop.kernels.keys import Key
from polyhop.nn.conv import GCN2Conv
from polyhop.nn.model import Model, State, act_and_drop, drop_rows, rows_of, slice_destinations
from polyhop.nn.rows import Rows, linear

__all__ = ["GCNII"]


class GCNII(Model):
    """dropout -> linear -> relu (= h0) -> num_layers x (dropout -> GCN2Conv with h0 -> relu) -> dropout -> linear.

    ``theta`` None leaves out the identity map (beta = 1). State-dict keys: ``lins.0``, ``lins.1``, ``convs.i.weight1``.
    The state carries "h0". Input dropout uses site num_layers, h0's num_layers + 1, layer i's output site i.
    """

    takes_pool = True
    begins_plain = False

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        alpha: float = 0.1,
        theta: float | None = 0.5,
        shared_weights: bool = True,
        normalize: bool = True,
        add_self_loops: bool = True,
    ) -> None:
        super().__init__()
        if num_layers < 1 or not 0 <= dropout <= 1:
            raise ConfigError(f"GCNII: num_layers={num_layers} (at least 1), dropout={dropout} (0 .. 1)")
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.out_channels = hidden_channels if out_channels is None else out_channels
        self.dropout = nn.Dropout(p=dropout)
        self.act = nn.ReLU()
        self.lins = nn.ModuleList(
            [nn.Linear(in_channels, hidden_channels), nn.Linear(hidden_channels, self.out_channels)]
        )
        self.convs = nn.ModuleList(
            GCN2Conv(
                hidden_channels,
                alpha,
                theta,
                None if theta is None else i + 1,
                shared_weights,
                normalize=normalize,
                add_self_loops=add_self_loops,
            )
            for i in range(num_layers)
        )

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in (*self.lins, *self.convs):
            assert isinstance(module, (nn.Linear, GCN2Conv))
            module.reset_parameters()

    def begin(self, x: Rows, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        p = self.dropout.p if self.training else 0.0
        first = self.lins[0]
        assert isinstance(first, nn.Linear)
        h0 = linear(drop_rows(x, p, key, self.num_layers, ids=ids), first.weight, first.bias).relu()
        return {"h": drop_rows(h0, p, key, self.num_layers + 1, ids=ids), "h0": h0}

    def layer(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        carried = slice_destinations(block, state, ["h0"])
        h = self.convs[i](state["h"], block, carried=carried["h0"])
        p = self.dropout.p if self.training else 0.0
        return {"h": act_and_drop(h, self.act, p, key, i, block), **carried}

    def undropped(self, i: int, block: Block, state: State, *, key: Key | None = None) -> State:
        carried = slice_destinations(block, state, ["h0"])
        return {"h": self.act(self.convs[i](state["h"], block, carried=carried["h0"])), **carried}

    def dropped(self, i: int, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        p = self.dropout.p if self.training else 0.0
        return state | {"h": drop_rows(rows_of(state), p, key, i, ids=ids)}

    def finish(self, state: State, *, ids: Tensor | None = None, key: Key | None = None) -> Tensor:
        out: Tensor = self.lins[1](rows_of(state))
        return out

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, num_layers={self.num_layers}"
