"""What steps and evaluation of a model hold, found by running it on a few rows in the proportions of the real ones.

While the model runs forward and backward, twice, on blocks whose rows, edges and halo rows are to each other as the real
ones are, all that is alive is counted (``live``): activations that autograd keeps, what layers derive of edges, what lives a
moment. Bytes are a line in the number of rows, so two runs, on some hundred rows and on twice as many, tell of any number.
Weights and their gradients are left out.

Legend: n own rows, D destinations, H rows that arrive from other ranks, E edges, F columns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.forecast.live import Live
from polyhop.forecast.training import Inputs, Training
from polyhop.graph import Block, HaloBlock, SparseRows
from polyhop.graph.aggregated import AggregatedRows
from polyhop.kernels.keys import Key
from polyhop.strategies.halo_plan import Plan
from polyhop.strategies.inputs import summed_once

__all__ = ["Evaluated", "LayerRows", "Stepped", "evaluated", "stepped"]

_FEW = (389, 773)  # rows: primes, so that no table of rows has the size of a weight
_EXACT = 1500  # so few rows are run as they are


@dataclass(frozen=True)
class LayerRows:
    """One layer: rows that are here, what it gives, what it reads."""

    own: float  # n
    dst: float  # D
    edges: float  # E
    halo: float = 0.0  # H
    central: float = 0.0  # of the destinations, those that read no halo row
    central_edges: float = 0.0
    is_crossing: bool = False  # rows arrive while the layer runs
    is_joined: bool = False  # rows of others are put behind the own ones before it runs

    def scaled(self, share: float) -> LayerRows:
        """Whole numbers."""
        dst = math.ceil(self.dst * share)
        central = min(dst, math.floor(self.central * share))
        central_edges = (
            min(math.ceil(self.central_edges * share), math.ceil(self.edges * share)) if central else 0
        )
        return LayerRows(
            max(dst, math.ceil(self.own * share)),
            dst,
            math.ceil(self.edges * share) if central < dst else central_edges,
            math.ceil(self.halo * share),
            central,
            central_edges,
            self.is_crossing,
            self.is_joined,
        )


@dataclass(frozen=True)
class Stepped:
    """Bytes of a training step."""

    kept: tuple[
        float, ...
    ]  # by each layer at the end of the forward pass; first and last, before and after all layers
    most: float  # at once, all included
    derived: float  # of edges, kept from step to step

    @property
    def activations(self) -> float:
        return sum(self.kept)

    @property
    def moments(self) -> float:
        """What lives beside the activations where most is alive."""
        return max(0.0, self.most - self.derived - self.activations)


@dataclass(frozen=True)
class Evaluated:
    """Bytes of one pass of evaluation, all rows of a layer at once."""

    most: float


def stepped(
    training: Training,
    layers: Sequence[LayerRows],
    num_labels: float,
    *,
    is_dense: bool = False,
    sums_once: bool = False,
) -> Stepped:
    """Of a step on such layers, input layer first. ``is_dense``: sparse input rows were made dense; ``sums_once``: what the
    first layer sums of its inputs is summed before the first step, where no parameter changes it."""
    return _stepped(training, _rounded(layers), num_labels, is_dense, sums_once)


def evaluated(training: Training, rows: LayerRows, *, is_copied: bool) -> Evaluated:
    """Of all layers over the same rows; ``is_copied``: input rows are put together for it."""
    return _evaluated(training, _rounded([rows])[0], is_copied)


def _rounded(layers: Sequence[LayerRows]) -> tuple[LayerRows, ...]:
    """To four digits, so that what is alike is run once."""

    def digits(value: float) -> float:
        return float(f"{value:.4g}")

    return tuple(
        LayerRows(
            digits(each.own),
            digits(each.dst),
            digits(each.edges),
            digits(each.halo),
            digits(each.central),
            digits(each.central_edges),
            each.is_crossing,
            each.is_joined,
        )
        for each in layers
    )


@lru_cache(maxsize=256)
def _stepped(
    training: Training, layers: tuple[LayerRows, ...], num_labels: float, is_dense: bool, sums_once: bool
) -> Stepped:
    def run(few: Sequence[LayerRows], share: float) -> list[float]:
        return _Probe(training, few, is_dense=is_dense).step(
            max(1, math.ceil(num_labels * share)), sums_once=sums_once
        )

    most, derived, *kept = _extended(run, layers)
    return Stepped(tuple(kept), most, derived)


@lru_cache(maxsize=256)
def _evaluated(training: Training, rows: LayerRows, is_copied: bool) -> Evaluated:
    layers = [rows] * training.counts.num_layers
    found = _extended(lambda few, _: [_Probe(training, few).evaluate(is_copied=is_copied)], layers)
    return Evaluated(found[0])


def _extended(
    run: Callable[[Sequence[LayerRows], float], list[float]], layers: Sequence[LayerRows]
) -> list[float]:
    """What ``run`` finds, a line in the number of rows, at the real one."""
    rows = max(1.0, max(each.own + each.halo for each in layers))
    if rows <= _EXACT:
        return run(_scaled(layers, 1.0), 1.0)
    one, two = (run(_scaled(layers, few / rows), few / rows) for few in _FEW)
    step = (rows - _FEW[1]) / (_FEW[1] - _FEW[0])
    return [max(0.0, b + step * (b - a)) for a, b in zip(one, two, strict=True)]


def _scaled(layers: Sequence[LayerRows], share: float) -> list[LayerRows]:
    """Whole numbers; what a layer gives is what the next one has."""
    found = [each.scaled(share) for each in layers]
    for at in reversed(range(len(found) - 1)):
        dst = found[at + 1].own
        found[at] = replace(
            found[at], dst=dst, own=max(found[at].own, dst), central=min(found[at].central, dst)
        )
    return found


class _Mirror:
    """A channel whose rows arrive as zeros that depend on those that left."""

    def __init__(self, count: int) -> None:
        self._count = count

    def leave(
        self, rows: Tensor, first: int, reader: Any = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        return (
            rows,
            rows[first:],
            lambda: (rows[:1].sum() * 0).expand(self._count, *rows.shape[1:]).contiguous(),
        )


class _Probe:
    """A copy of the model, with few rows."""

    def __init__(self, training: Training, layers: Sequence[LayerRows], *, is_dense: bool = False) -> None:
        self._model: Any = copy.deepcopy(training.model).cpu()
        self._made = torch.Generator().manual_seed(0)
        self._sizes = Plan.of(self._model, _WAYS, training.graph_sizes).sizes
        self._is_sampled = training.num_neighbors is not None
        made: dict[LayerRows, Block] = {}
        for each in layers:
            if each not in made:
                made[each] = self._block(each, index=len(made))
        self.blocks = [made[each] for each in layers]
        self._halo, self._is_joined = [each.halo for each in layers], [each.is_joined for each in layers]
        inputs = replace(training.inputs, row_length=None) if is_dense else training.inputs
        first = layers[0]
        num_rows = first.own if first.is_crossing else int(first.own + first.halo)
        self.x = _rows(int(num_rows), inputs, training.weights[0].dtype, self._made)

    def _block(self, rows: LayerRows, index: int) -> Block:
        own, dst, halo = int(rows.own), int(rows.dst), int(rows.halo)
        central = int(rows.central)
        degree = torch.cat(
            [
                _spread(int(rows.central_edges), central),
                _spread(int(rows.edges - rows.central_edges), dst - central),
            ]
        )
        indptr = torch.zeros(dst + 1, dtype=torch.int64)
        indptr[1:] = degree.cumsum(0)
        low, total = int(indptr[central]), int(indptr[-1])
        indices = torch.cat(
            [
                torch.randint(max(1, own), (low,), generator=self._made),
                torch.randint(max(1, own + halo), (total - low,), generator=self._made),
            ]
        ).int()
        count = own + halo
        block = Block(
            indptr, indices, count, src_ids=torch.arange(count),
            in_degree=torch.full((count,), 1 + total // max(1, dst), dtype=torch.int32), is_sampled=self._is_sampled,
        )  # fmt: skip
        if not rows.is_crossing:
            return block
        return HaloBlock.of(
            block, central, _Mirror(halo), self._sizes, returns=index > 0 or not self._is_sampled, num_own=own
        )

    def _live(self, more: Sequence[Tensor] = ()) -> Live:
        weights = list(self._model.parameters())
        known = [*weights, *self._model.buffers(), *_tensors(self.x), *more]
        for block in self.blocks:
            known += [t for piece in (block, *_pieces(block)) for t in _tensors(piece)]
        return Live(known, [p.numel() * p.element_size() for p in weights])

    def step(self, num_labels: int, *, sums_once: bool) -> list[float]:
        """[most, derived, kept before, by each layer, after]."""
        model, x, blocks = self._model.train(), self.x, list(self.blocks)
        if sums_once:
            x, blocks[0] = summed_once(model, x, blocks[0])  # type: ignore[assignment]
            self.x, self.blocks = x, blocks
        labels = torch.zeros(min(num_labels, blocks[-1].num_dst), dtype=torch.int64)
        at, kept = torch.arange(labels.numel()), list[float]()
        live = self._live([labels, at])
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), live:
            for repeat in range(2):  # the second has what the first derived
                logits, kept = self._forward(x, blocks, Key(0, 0, repeat), live)
                loss = nn.functional.cross_entropy(logits.index_select(0, at), labels, reduction="sum")
                loss.backward()  # type: ignore[no-untyped-call]
                del logits, loss
                for parameter in model.parameters():
                    parameter.grad = None
        return [float(live.most), float(live.now), *kept]

    def _forward(self, x: Any, blocks: Sequence[Block], key: Key, live: Live) -> tuple[Tensor, list[float]]:
        """(logits, bytes that are alive after begin, every layer, finish, more than before)."""
        model, marks = self._model, [float(live.now)]
        is_summed = isinstance(x, AggregatedRows)
        state: Any = {"h": x} if is_summed else model.begin(x, ids=blocks[0].src_ids, key=key)
        marks.append(live.now)
        for index, block in enumerate(blocks):
            if self._is_joined[index]:
                count = int(self._halo[index])
                state = {name: _joined(rows, count) for name, rows in state.items()}
            state = model.layer(index, block, state, key=key)
            marks.append(live.now)
        logits = model.finish(state, ids=blocks[-1].dst_ids(), key=key)
        del state
        marks.append(live.now)
        return logits, [after - before for before, after in pairwise(marks)]

    def evaluate(self, *, is_copied: bool) -> float:
        """The most that is alive."""
        model, x, live = self._model.eval(), self.x, self._live()
        with torch.no_grad(), live:
            rows = _copied(x) if is_copied else x
            state = model.begin(rows)
            del rows
            for index, (block, halo) in enumerate(zip(self.blocks, self._halo, strict=True)):
                before, state = state, model.layer(index, block, state)
                if index + 1 < len(self.blocks) and halo:
                    leaving = [value.new_zeros(int(halo), *value.shape[1:]) for value in state.values()]
                    state = {name: _joined(value, int(halo)) for name, value in state.items()}
                    del leaving
                del before
            model.finish(state)
        return float(live.most)


@dataclass(frozen=True)
class _Ways:
    """As strategy ``halo`` goes about it by default."""

    halo: str = "exact"
    halo_sums: bool = True
    naive_halo: bool = False


_WAYS = _Ways()


def _spread(edges: int, rows: int) -> Tensor:
    """int64 [rows]: as even as it goes."""
    if rows == 0:
        return torch.empty(0, dtype=torch.int64)
    return edges // rows + (torch.arange(rows) < edges % rows).long()


def _rows(count: int, inputs: Inputs, dtype: torch.dtype, made: torch.Generator) -> Tensor | SparseRows:
    if inputs.row_length is None:
        return torch.rand(count, inputs.num_features, dtype=dtype, generator=made)
    each = max(1, min(inputs.num_features, round(inputs.row_length)))
    columns = torch.randint(inputs.num_features, (count, each), generator=made).sort(1).values
    return SparseRows(
        torch.arange(0, count * each + 1, each),
        columns.flatten().int(),
        torch.ones(count * each, dtype=dtype),
        inputs.num_features,
    )


def _copied(x: Tensor | SparseRows) -> Tensor | SparseRows:
    if isinstance(x, Tensor):
        return x.clone()
    return replace(x, indptr=x.indptr.clone(), indices=x.indices.clone(), values=x.values.clone(), _cache={})


def _joined(rows: Tensor, count: int) -> Tensor:
    """With so many rows of others behind them."""
    return torch.cat([rows, rows.new_zeros(count, *rows.shape[1:])])


def _tensors(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    return [value for value in vars(held).values() if isinstance(value, Tensor)]


def _pieces(block: Block) -> list[Block]:
    return [block.central, block.marginal] if isinstance(block, HaloBlock) else []
