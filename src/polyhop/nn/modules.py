"""The small torch modules PyG's models are made of, with its names and state-dict keys, without needing PyG.

Only what works row by row (or has running statistics) is here: a layer's output may then be computed in any grouping of
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhop.errors import ConfigError, UnsupportedError, unknown

__all__ = ["MLP", "BatchNorm", "JumpingKnowledge", "LayerNorm", "activation", "normalisation"]

_GROUPING_NORMS = {
    "graphnorm",
    "graphsizenorm",
    "pairnorm",
    "meansubtractionnorm",
    "instancenorm",
    "diffgroupnorm",
}


class BatchNorm(nn.Module):
    """PyG's BatchNorm over rows [n, F]: torch's BatchNorm1d under the name ``module``. Mixes rows in training."""

    def __init__(
        self,
        in_channels: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        allow_single_element: bool = False,
    ) -> None:
        super().__init__()
        if allow_single_element and not track_running_stats:
            raise ConfigError("BatchNorm: allow_single_element=True needs track_running_stats=True")
        self.module = nn.BatchNorm1d(in_channels, eps, momentum, affine, track_running_stats)
        self.in_channels = in_channels
        self.allow_single_element = allow_single_element

    def reset_parameters(self) -> None:
        self.module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self.allow_single_element and x.shape[0] <= 1:
            m = self.module
            return F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, False, 0.0, m.eps)
        out: Tensor = self.module(x)
        return out


class LayerNorm(nn.Module):
    """PyG's LayerNorm with ``mode="node"``: each row [F] by itself. ``mode="graph"``, its default, is refused."""

    def __init__(self, in_channels: int, eps: float = 1e-5, affine: bool = True, mode: str = "graph") -> None:
        super().__init__()
        if mode != "node":
            raise UnsupportedError(
                f"LayerNorm: mode={mode!r} (PyG's default is \"graph\") normalises over all rows of a block, so a node's "
                'output would depend on who else is in the block. Use norm_kwargs={"mode": "node"}, or norm="batch".'
            )
        self.in_channels = in_channels
        self.eps = eps
        self.mode = mode
        self.weight = nn.Parameter(torch.ones(in_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(in_channels)) if affine else None

    def reset_parameters(self) -> None:
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.in_channels,), self.weight, self.bias, self.eps)


class JumpingKnowledge(nn.Module):
    """PyG's JumpingKnowledge (Xu et al., 2018): all layers' rows ([n, F] each) joined by ``cat``, ``max`` or ``lstm``."""

    def __init__(self, mode: str, channels: int | None = None, num_layers: int | None = None) -> None:
        super().__init__()
        self.mode = mode.lower()
        if self.mode not in ("cat", "max", "lstm"):
            raise ConfigError(unknown("jk", mode, ("cat", "max", "lstm", "last")))
        if self.mode == "lstm":
            if channels is None or num_layers is None:
                raise ConfigError("JumpingKnowledge: mode='lstm' needs channels and num_layers")
            half = (num_layers * channels) // 2
            self.lstm = nn.LSTM(channels, half, bidirectional=True, batch_first=True)
            self.att = nn.Linear(2 * half, 1)

    def reset_parameters(self) -> None:
        if self.mode == "lstm":
            self.lstm.reset_parameters()
            self.att.reset_parameters()

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        if self.mode == "cat":
            return torch.cat(list(xs), dim=-1)
        if self.mode == "max":
            return torch.stack(list(xs), dim=-1).max(dim=-1)[0]
        x = torch.stack(list(xs), dim=1)  # [n, layers, F]
        alpha, _ = self.lstm(x)
        alpha = torch.softmax(self.att(alpha).squeeze(-1), dim=-1)  # [n, layers]
        return (x * alpha.unsqueeze(-1)).sum(dim=1)


class MLP(nn.Module):
    """PyG's MLP from a list of widths, last layer plain: [n, widths[0]] -> [n, widths[-1]]. No dropout."""

    def __init__(
        self,
        channel_list: Sequence[int],
        *,
        act: str | Callable[[Tensor], Tensor] | None = "relu",
        act_first: bool = False,
        act_kwargs: dict[str, Any] | None = None,
        norm: str | nn.Module | None = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.channel_list = list(channel_list)
        self.act = activation(act, **(act_kwargs or {}))
        self.act_first = act_first
        pairs = zip(self.channel_list[:-1], self.channel_list[1:], strict=True)
        self.lins = nn.ModuleList(nn.Linear(width_in, width_out, bias=bias) for width_in, width_out in pairs)
        self.norms = nn.ModuleList(
            normalisation(norm, width, **(norm_kwargs or {})) or nn.Identity()
            for width in self.channel_list[1:-1]
        )

    @property
    def in_channels(self) -> int:
        return self.channel_list[0]

    @property
    def out_channels(self) -> int:
        return self.channel_list[-1]

    def reset_parameters(self) -> None:
        for module in (*self.lins, *self.norms):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    def forward(self, x: Tensor) -> Tensor:
        return self.after_first(self.lins[0](x))

    def after_first(self, x: Tensor) -> Tensor:
        """The rest of the network, given the output of its first linear map [n, widths[1]]."""
        for norm, lin in zip(self.norms, list(self.lins)[1:], strict=True):
            if self.act is not None and self.act_first:
                x = self.act(x)
            x = norm(x)
            if self.act is not None and not self.act_first:
                x = self.act(x)
            x = lin(x)
        return x


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def activation(
    given: str | Callable[[Tensor], Tensor] | None, **kwargs: Any
) -> Callable[[Tensor], Tensor] | None:
    """A torch activation by name ("relu", "leaky_relu", "ELU", "swish"), a callable as it is, or None."""
    if not isinstance(given, str):
        return given
    known: dict[str, Callable[..., Callable[[Tensor], Tensor]]] = {
        _plain(name): kind
        for name, kind in vars(nn.modules.activation).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind is not nn.Module
    }
    known["swish"] = nn.SiLU
    if _plain(given) in known:
        return known[_plain(given)](**kwargs)
    raise ConfigError(unknown("activation", given, known))


def normalisation(given: str | nn.Module | None, width: int, **kwargs: Any) -> nn.Module | None:
    """BatchNorm or LayerNorm by PyG's name ("batch", "batch_norm", "BatchNorm", ...), a module as it is, or None."""
    if not isinstance(given, str):
        return given
    name = _plain(given).removesuffix("norm")
    if name == "batch":
        return BatchNorm(width, **kwargs)
    if name == "layer":
        return LayerNorm(width, **kwargs)
    if name + "norm" in _GROUPING_NORMS:
        raise UnsupportedError(
            f"norm={given!r} mixes all rows of a block, so a node's output would depend on who else is in the block. "
            "Supported: batch_norm, layer_norm with mode='node', or a row-wise torch.nn.Module."
        )
    raise ConfigError(unknown("norm", given, ("batch_norm", "layer_norm")))
