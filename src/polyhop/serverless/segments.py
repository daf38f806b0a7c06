"""A model of ``polyhop.nn`` as a chain: dense pieces, which functions run, with graph operations between them.

    rows of the inputs -> [map] -> aggregate -> update, norm, act -> (dropout) -> [map] -> aggregate -> ... -> loss

Names of rows, i being a layer: ``h{i}`` what the layer is given (h0: the inputs), ``m{i}`` messages, ``src{i}`` and
``dst{i}`` the two halves of attention scores, ``own{i}`` what update adds of the destinations' own rows where these are
mapped together with the messages, ``z{i}`` the aggregated rows, always [n, columns]. The last piece reads ``labels`` (and
``mask``). Rows that a layer only passes on keep their name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhop.errors import UnsupportedError
from polyhop.graph import Sizes
from polyhop.nn import BasicGNN, GATConv, GCNConv, Layer, LayerNorm, SAGEConv, Stack
from polyhop.serverless.program import Call, Program, Row

__all__ = ["Dense", "Graph", "Loss", "Segment", "segments"]

Loss: TypeAlias = Literal["cross_entropy", "binary_cross_entropy"]

_OTHERS = "strategy 'halo' trains it on several ranks"


@dataclass(frozen=True)
class Dense:
    """Row by row: for a function, unless it ``stays``. Its weights go by their names in the model's state dict."""

    program: Program
    drops: int | None = (
        None  # site of the dropout on its only output, which keeps its name; None: nothing is dropped
    )

    @property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(self.program.weights)

    @property
    def stays(self) -> bool:
        """Whether the server computes it itself: nothing is computed, or sparse rows are multiplied (``server_rows``)."""
        return not self.program.calls or any(row.kind == "sparse" for row in self.program.rows.values())


@dataclass(frozen=True)
class Graph:
    """``Layer.aggregate`` over the in-edges of the destinations: for a graph server."""

    layer: int
    map_first: bool  # rows were mapped already
    takes: tuple[str, ...]  # rows of the sources: messages; with attention also (src [n, H], dst [n, H])
    gives: str
    own: str | None = None  # rows of the destinations that the piece after reads beside what this gives
    has_gradient: bool = (
        True  # False: nothing learnt comes before, so what it gives is the same at every step
    )

    @property
    def needs_own(self) -> bool:
        return self.own is not None


Segment: TypeAlias = Dense | Graph


def segments(
    model: nn.Module,
    sizes: Sizes,
    *,
    is_sparse: bool = False,
    loss: Loss | None = "cross_entropy",
    scale: float = 1.0,
    maps_late: bool = False,
) -> list[Segment]:
    """The chain of a model on a graph of these sizes; UnsupportedError says what it cannot hold.

    ``is_sparse``: of the inputs, which are then mapped first. The last piece gives ("loss", "count"), the loss being a sum
    over train rows times ``scale`` (1 / their number); without a loss, its first output is the model's.

    Dense inputs are aggregated before they are mapped: once, since nothing learnt comes before, so that the first layer asks
    nothing of other servers in any epoch. The other layers go about it as one process would; or (``maps_late``) aggregate
    first wherever they can: rows that are read when they are old then at least do not hold old weights of the reading layer.
    """
    parts = _Parts.of(model)
    width = parts.layers[0][1].in_channels
    chain = _Chain({"h0": Row((width,), "sparse" if is_sparse else "float", is_fixed=True)})
    for i, (path, layer) in enumerate(parts.layers):
        is_bent = isinstance(layer, GATConv) or (
            isinstance(layer, SAGEConv) and layer.project
        )  # no sum of what it is given
        must_map = is_bent or (is_sparse and i == 0)
        map_first = must_map or (i > 0 and not maps_late and layer.map_first(sizes, True))
        _add_layer(chain, i, path, layer, map_first)
        if i < len(parts.layers) - 1:
            _add_after(chain, i, parts)
            if parts.dropout > 0:
                chain.cut((chain.current,), drops=i)
    if not chain.is_between(chain.current):
        chain.rename("logits")
    if loss is not None:
        _add_loss(chain, loss, scale, parts.num_outputs)
    chain.cut(("loss", "count") if loss is not None else (chain.current,), is_last=True)
    return chain.found


class _Chain:
    """Calls of the piece that is being made, and the pieces before it."""

    def __init__(self, rows: dict[str, Row]) -> None:
        self.found: list[Segment] = []
        self.current = "h0"  # the rows that the next call reads
        self._rows = rows  # that exist between pieces
        self._calls: list[Call] = []
        self._weights: dict[str, tuple[int, ...]] = {}

    def call(
        self,
        op: str,
        rows: Sequence[str],
        weights: Sequence[tuple[str, Tensor | None]] = (),
        outputs: Sequence[str] = (),
        **attrs: Any,
    ) -> str:
        """Add a call; the name of its first output. Weights that are None are left out."""
        given = [(name, weight) for name, weight in weights if weight is not None]
        self._weights.update((name, tuple(weight.shape)) for name, weight in given)
        made = tuple(outputs) or (f"{op}.{len(self.found)}.{len(self._calls)}",)
        self._calls.append(Call(op, (*rows, *(name for name, _ in given)), made, attrs))
        return made[0]

    def step(self, op: str, weights: Sequence[tuple[str, Tensor | None]] = (), **attrs: Any) -> None:
        """A call on the current rows, which its output replaces."""
        self.current = self.call(op, [self.current], weights, **attrs)

    def rename(self, name: str) -> None:
        """Give the current rows, which the last call made, a name that other pieces know."""
        call = self._calls[-1]
        assert call.outputs == (self.current,)
        self._calls[-1], self.current = replace(call, outputs=(name,)), name

    def read(self, name: str, row: Row) -> str:
        """Rows that the server gives to the piece."""
        self._rows[name] = row
        return name

    def is_fixed(self, name: str) -> bool:
        return self._rows[name].is_fixed

    def is_between(self, name: str) -> bool:
        """Whether rows of this name have left a piece, or were never in one."""
        return name in self._rows

    def is_sparse(self, name: str) -> bool:
        return name in self._rows and self._rows[name].kind == "sparse"

    def cut(self, outputs: tuple[str, ...], drops: int | None = None, *, is_last: bool = False) -> None:
        """End the piece here, if there is anything in it."""
        if not self._calls and drops is None and not is_last:
            return
        made = {name for call in self._calls for name in call.outputs}
        read = [
            name for call in self._calls for name in call.inputs if name not in made | self._weights.keys()
        ]
        rows = {name: self._rows[name] for name in (*read, *(name for name in outputs if name not in made))}
        program = Program(rows, dict(self._weights), tuple(self._calls), outputs)
        for name in outputs:
            if name not in program.sums:
                self._rows[name] = Row(program.shapes[name], is_fixed=name not in program.moving)
        self.found.append(Dense(program, drops))
        self._calls, self._weights = [], {}


def _add_layer(chain: _Chain, i: int, path: str, layer: Layer, map_first: bool) -> None:
    """Map, cut, aggregate, update."""
    given, own, width = chain.current, None, layer.in_channels
    if map_first:
        linear = "sparse_linear" if chain.is_sparse(given) else "linear"
        takes, own, width = _add_map(chain, i, path, layer, linear)
        chain.cut((*takes, *([own] if own is not None else [])))
    else:
        takes, own = (given,), given if layer.reads_own else None
        chain.cut((given,))
    is_fixed = all(chain.is_fixed(name) for name in takes)
    chain.found.append(Graph(i, map_first, takes, f"z{i}", own, not is_fixed))
    chain.current = chain.read(f"z{i}", Row((width,), is_fixed=is_fixed))
    _add_update(chain, path, layer, own, map_first)


def _add_map(
    chain: _Chain, i: int, path: str, layer: Layer, linear: str
) -> tuple[tuple[str, ...], str | None, int]:
    """(what the graph operation takes, what update takes of own rows, columns that are aggregated)."""
    h, own = chain.current, None
    if isinstance(layer, GATConv):
        weight = layer.lin.weight
        m = chain.call(linear, [h], [(f"{path}.lin.weight", weight)], [f"m{i}"])
        both = [(f"{path}.att_src", layer.att_src), (f"{path}.att_dst", layer.att_dst)]
        chain.call("scores", [m], both, [f"src{i}", f"dst{i}"])
        if layer.res is not None:
            own = chain.call(linear, [h], [(f"{path}.res.weight", layer.res.weight)], [f"own{i}"])
        return (m, f"src{i}", f"dst{i}"), own, weight.shape[0]
    if isinstance(layer, SAGEConv):
        bias: Tensor | None = layer.lin_l.bias
        if layer.project:
            weight = layer.lin.weight
            named = [(f"{path}.lin.weight", weight), (f"{path}.lin.bias", layer.lin.bias)]
            m, bias = chain.call("relu", [chain.call(linear, [h], named)], outputs=[f"m{i}"]), None
        else:
            weight = layer.lin_l.weight
            m = chain.call(linear, [h], [(f"{path}.lin_l.weight", weight)], [f"m{i}"])
        if layer.root_weight:
            rest = [(f"{path}.lin_r.weight", layer.lin_r.weight), (f"{path}.lin_l.bias", bias)]
            own = chain.call(linear, [h], rest, [f"own{i}"])
        return (m,), own, weight.shape[0]
    assert isinstance(layer, GCNConv)
    m = chain.call(linear, [h], [(f"{path}.lin.weight", layer.lin.weight)], [f"m{i}"])
    return (m,), None, layer.out_channels


def _add_update(chain: _Chain, path: str, layer: Layer, own: str | None, map_first: bool) -> None:
    """``Layer.update``, own rows being mapped before where messages are."""
    if isinstance(layer, GATConv):
        if not layer.concat:
            chain.step("mean_heads", heads=layer.heads)
        _add_bias(chain, f"{path}.bias", layer.bias)
        if own is not None:
            chain.current = chain.call("add", [chain.current, own])
    elif isinstance(layer, SAGEConv):
        bias = (f"{path}.lin_l.bias", layer.lin_l.bias)
        if not map_first or layer.project:
            chain.step("linear", [(f"{path}.lin_l.weight", layer.lin_l.weight), bias])
        elif own is None:
            _add_bias(chain, *bias)
        if own is not None and not map_first:
            own = chain.call("linear", [own], [(f"{path}.lin_r.weight", layer.lin_r.weight)])
        if own is not None:
            chain.current = chain.call("add", [chain.current, own])
        if layer.normalize:
            chain.step("normalize")
    else:
        assert isinstance(layer, GCNConv)
        if map_first:
            _add_bias(chain, f"{path}.bias", layer.bias)
        else:
            chain.step("linear", [(f"{path}.lin.weight", layer.lin.weight), (f"{path}.bias", layer.bias)])


def _add_bias(chain: _Chain, name: str, bias: Tensor | None) -> None:
    if bias is not None:
        chain.step("bias", [(name, bias)])


def _add_after(chain: _Chain, i: int, parts: _Parts) -> None:
    """Norm and activation of a layer that is not the last."""
    act, norm = parts.act, parts.norms[i]
    if act is not None and norm is not None and parts.act_first:
        chain.step(act[0], (), **act[1])
        act = None
    if norm is not None:
        named = [(f"norms.{i}.weight", norm.weight), (f"norms.{i}.bias", norm.bias)]
        chain.step("layer_norm", named, eps=float(norm.eps))
    if act is not None:
        chain.step(act[0], (), **act[1])
    if not chain.is_between(chain.current):  # else nothing was done: the rows keep their name
        chain.rename(f"h{i + 1}")


def _add_loss(chain: _Chain, loss: Loss, scale: float, num_outputs: int) -> None:
    read = [chain.current, chain.read("labels", Row((), "ids"))]
    if loss == "binary_cross_entropy":
        read = [
            chain.current,
            chain.read("labels", Row((num_outputs,), "marks")),
            chain.read("mask", Row((), "marks")),
        ]
    chain.call(loss, read, outputs=["loss", "count"], scale=scale)


# What a model is made of, or why it cannot be had


@dataclass(frozen=True)
class _Parts:
    layers: Sequence[tuple[str, Layer]]  # with their paths in the state dict
    norms: Sequence[LayerNorm | nn.LayerNorm | None]  # after each layer
    act: tuple[str, dict[str, Any]] | None  # op and attrs
    act_first: bool
    dropout: float

    @property
    def num_outputs(self) -> int:
        last = self.layers[-1][1]
        return last.out_channels * (last.heads if isinstance(last, GATConv) and last.concat else 1)

    @classmethod
    def of(cls, model: nn.Module) -> _Parts:
        name = type(model).__name__
        if isinstance(model, BasicGNN):
            _refuse_changed(model, BasicGNN, ("begin", "layer", "finish", "forward"))
            if model.jk_mode is not None:
                raise _unsupported(f"{name}: jk={model.jk_mode!r} joins the rows of all layers; use jk=None")
            named, act_first = [(f"convs.{i}", layer) for i, layer in enumerate(model.convs)], model.act_first
            norms = [_norm(norm, name) for norm in model.norms]
        elif isinstance(model, Stack):
            _refuse_changed(model, Stack, ("begin", "layer", "finish", "forward"))
            named, act_first = [(f"layers.{i}", layer) for i, layer in enumerate(model.layers)], False
            norms = [None] * len(named)
        else:
            raise _unsupported(f"{name}: expected GCN, GraphSAGE, GAT or a Stack of their layers")
        layers = [(path, _layer(layer, name)) for path, layer in named]
        if len({id(layer) for _, layer in layers}) < len(layers):
            raise _unsupported(f"{name}: two of its layers are one; give each its own")
        return cls(layers, norms, _activation(model.act), act_first, model.dropout.p)


def _layer(layer: nn.Module, name: str) -> Layer:
    kind = next((kind for kind in (GCNConv, SAGEConv, GATConv) if isinstance(layer, kind)), None)
    if kind is None:
        wrapped = " (a layer of another library)" if not getattr(layer, "has_pieces", True) else ""
        raise _unsupported(
            f"{name}: {type(layer).__name__}{wrapped} has no numpy version; use GCNConv, SAGEConv or GATConv layers"
        )
    _refuse_changed(layer, kind, ("transform", "edge", "update", "forward"))
    if isinstance(layer, SAGEConv) and layer.aggr == "max":
        raise _unsupported(f"{name}: aggr='max' is no sum over neighbours; use aggr='mean' or 'sum'")
    assert isinstance(layer, Layer)
    return layer


def _refuse_changed(module: nn.Module, base: type[nn.Module], names: Sequence[str]) -> None:
    for name in names:
        if getattr(type(module), name) is not getattr(base, name):
            raise _unsupported(
                f"{type(module).__name__}: it has a {name}() of its own, which functions cannot run; use {base.__name__}"
            )


def _norm(norm: nn.Module, model: str) -> LayerNorm | nn.LayerNorm | None:
    if isinstance(norm, nn.Identity):
        return None
    if type(norm) is LayerNorm or (type(norm) is nn.LayerNorm and len(norm.normalized_shape) == 1):
        return norm
    reason = "has no numpy version"
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in norm.modules()):
        reason = "looks at all rows together, a function sees some"
    raise _unsupported(
        f"{model}: norm {type(norm).__name__} {reason}; use norm=None or norm='layer' with "
        "norm_kwargs={'mode': 'node'}"
    )


def _activation(act: Callable[[Tensor], Tensor] | nn.Module | None) -> tuple[str, dict[str, Any]] | None:
    """(op, attrs); None where there is none."""
    if act is None or type(act) is nn.Identity:
        return None
    if type(act) is nn.LeakyReLU:
        return "leaky_relu", {"slope": float(act.negative_slope)}
    if type(act) is nn.ELU:
        return "elu", {"alpha": float(act.alpha)}
    known: dict[str, tuple[Any, ...]] = {
        "relu": (nn.ReLU, torch.relu, F.relu),
        "leaky_relu": (F.leaky_relu,),
        "elu": (F.elu,),
        "tanh": (nn.Tanh, torch.tanh),
        "sigmoid": (nn.Sigmoid, torch.sigmoid),
    }
    for name, forms in known.items():
        if type(act) in forms or act in forms:
            return name, {}
    given = getattr(act, "__name__", type(act).__name__)
    raise _unsupported(f"act {given} has no numpy version; use relu, leaky_relu, elu, tanh, sigmoid or None")


def _unsupported(reason: str) -> UnsupportedError:
    return UnsupportedError(f"serverless: {reason}. Otherwise {_OTHERS}.")
