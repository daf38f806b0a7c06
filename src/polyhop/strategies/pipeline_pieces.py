"""A model in pieces, as a pipeline needs to know it before any row moves: what passes between layers, which parameters each
piece uses, what each layer costs. Found by running the model on a graph of one node.

Legend: N nodes, E edges, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import UnsupportedError
from polyhop.graph import Block
from polyhop.nn.counts import quiet
from polyhop.nn.layer import EDGE_COST
from polyhop.nn.model import Model, State

__all__ = ["Pieces", "splits_dropout"]


@dataclass(frozen=True)
class Pieces:
    """``states[l]``: name -> (shape of a row, dtype) of what layer l is given; ``states[L]`` of what the last one gives."""

    states: tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], ...]
    used: tuple[frozenset[str], ...]  # parameters of begin, of each layer, of finish
    begun: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of what ``begin`` makes and all layers pass on as it is, with the parameters that it is made by."""
    local: frozenset[str] = frozenset()  # of these, what every stage makes for itself: it does not cross

    @property
    def num_layers(self) -> int:
        return len(self.states) - 1

    @classmethod
    def of(
        cls,
        model: Model,
        num_features: int,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Pieces:
        """``context``: in which forward passes run."""
        parameter = next(model.parameters())
        ids = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        none = torch.zeros(0, dtype=torch.int32, device=parameter.device)
        block = Block(ids.new_zeros(2), none, 1, src_ids=ids, in_degree=ids.to(torch.int32))
        states, used = [], []
        with torch.enable_grad(), quiet(model), context():
            state = model.begin(parameter.new_zeros(1, num_features), ids=ids)
            used.append(_used(model, state))
            begun = {name: _used(model, {name: state[name]}) for name in state if name != "h"}
            for index in range(model.num_layers):
                state = _cut(state)
                states.append(_spec(state))
                given = model.dropped(index - 1, state, ids=ids) if index else state
                made = model.undropped(index, block, given)
                begun = {name: by for name, by in begun.items() if _is_same(made.get(name), state[name])}
                state = made
                used.append(_used(model, state))
            state = _cut(state)
            states.append(_spec(state))
            last = model.dropped(model.num_layers - 1, state, ids=ids)
            used.append(_used(model, {"h": model.finish(last, ids=ids)}))
        return cls(tuple(states), tuple(used), begun)

    def crossing(self, layer: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Of ``states[layer]``, what crosses where stages are cut there."""
        return {name: spec for name, spec in self.states[layer].items() if name not in self.local}

    def columns(self, layer: int) -> int:
        """That cross where stages are cut before a layer."""
        return sum(math.prod(shape) for shape, _ in self.crossing(layer).values())

    def value_dtype(self, layer: int) -> torch.dtype:
        """In which all of it crosses."""
        found = [dtype for _, dtype in self.crossing(layer).values()]
        wide = found[0]
        for dtype in found[1:]:
            wide = torch.promote_types(wide, dtype)
        return wide

    def of_span(self, first: int, stop: int) -> frozenset[str]:
        """Parameters of a stage of layers first .. stop - 1, with begin and finish at the ends."""
        start = 0 if first == 0 else first + 1
        end = len(self.used) if stop == self.num_layers else stop + 1
        return frozenset().union(*self.used[start:end], *(self.begun[name] for name in self.local))

    def costs(
        self, num_features: int, num_nodes: int, num_edges: int, num_set: float | None = None
    ) -> list[float]:
        """Of each layer, in multiply-adds of a matrix product: dense products and sums over edges, forward and backward.

        ``num_set``: values in an input row that is kept sparse; such rows are always multiplied first.
        """
        widths = [math.prod(state["h"][0]) for state in self.states]
        found = [
            3.0 * num_nodes * before * after + 2.0 * EDGE_COST * num_edges * before
            for before, after in pairwise(widths)
        ]
        columns = num_features if num_set is None else min(float(num_features), EDGE_COST * num_set)
        if self.used[0]:
            found[0] += 2.0 * num_nodes * columns * widths[0]
        elif num_set is not None:
            found[0] = 2.0 * num_nodes * columns * widths[1] + 2.0 * EDGE_COST * num_edges * widths[1]
        return found


def splits_dropout(model: Model) -> bool:
    """Whether ``undropped`` and ``dropped`` are those of the model's ``layer``, and not of a class that it changes."""
    kinds = type(model).__mro__
    first = {
        name: next(at for at, kind in enumerate(kinds) if name in vars(kind))
        for name in ("layer", "undropped")
    }
    return first["undropped"] <= first["layer"]


def _is_same(made: object, given: object) -> bool:
    """Whether a layer passed something on as it was given it."""
    if not isinstance(made, Tensor) or not isinstance(given, Tensor) or made.shape != given.shape:
        return False
    return made.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


def _used(model: Model, state: State) -> frozenset[str]:
    """Names of the parameters that some rows depend on."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    made = [value.sum() for value in state.values() if isinstance(value, Tensor) and value.requires_grad]
    if not made or not named:
        return frozenset()
    weights = [p for _, p in named]
    grads: Sequence[Tensor | None] = torch.autograd.grad(made, weights, allow_unused=True, retain_graph=True)
    return frozenset(name for (name, _), grad in zip(named, grads, strict=True) if grad is not None)


def _cut(state: State) -> State:
    """The same rows without their past."""
    cut: State = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise UnsupportedError(
                f"what the model carries as {name!r} is no tensor of rows: it cannot cross between stages"
            )
        cut[name] = value.detach()
    return cut


def _spec(state: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(value.shape[1:]), value.dtype) for name, value in state.items()}
