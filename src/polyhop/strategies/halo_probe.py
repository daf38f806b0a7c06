"""What autograd keeps of a model's layers over a halo, found by running it on parts of a few rows.

Every layer's bytes are a line through what six such parts show, in rows central and marginal, halo rows, edges and sums that
cross.

Legend: n own rows, c central rows, m marginal ones, H halo rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.graph import Block, HaloBlock, Reader, Sizes, SparseRows, Sums
from polyhop.graph.aggregated import AggregatedRows
from polyhop.kernels.keys import Key
from polyhop.nn.rows import Rows
from polyhop.strategies.inputs import summed_once
from polyhop.strategies.step import as_layered, forward_of

__all__ = ["Kept", "LayerSizes", "kept_by_layers", "tensors_of"]

_PROBES = (  # c, n - c, H, further edges, sums among the H
    (8, 8, 8, 0, 2), (16, 8, 8, 0, 2), (8, 16, 8, 0, 2), (8, 8, 16, 0, 2), (8, 8, 8, 8, 2), (8, 8, 8, 0, 6),
)  # fmt: skip


@dataclass(frozen=True)
class LayerSizes:
    """One layer on one rank."""

    num_central: int
    num_marginal: int
    wanted: Sequence[int]  # rows that come from each rank; the halo's
    leaving: Sequence[int]  # rows that go to each rank
    num_edges: int
    columns: int = 0  # that cross; 0: the halo is made of input rows, which are here
    num_sums: int = 0  # of the rows that come, those that are sums


@dataclass(frozen=True)
class Kept:
    """Bytes that one layer makes autograd keep: a line in its sizes."""

    constant: float = 0.0
    per_central: float = 0.0
    per_marginal: float = 0.0
    per_halo: float = 0.0
    per_edge: float = 0.0
    per_sum: float = 0.0

    def of(self, sizes: LayerSizes) -> float:
        rows = self.per_central * sizes.num_central + self.per_marginal * sizes.num_marginal
        more = self.per_edge * sizes.num_edges + self.per_sum * sizes.num_sums
        return self.constant + rows + self.per_halo * sum(sizes.wanted) + more


def kept_by_layers(
    model: nn.Module,
    num_features: int,
    sizes: Sizes,
    *,
    num_plain: int,
    has_sums: Sequence[bool] = (),
    sends_narrow: bool = True,
    in_shards: bool = False,
    kind: type = Tensor,
    dtype: torch.dtype = torch.float32,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[list[Kept], list[Kept], list[bool]]:
    """Of each layer: what autograd keeps (and last, what it does before and after all layers), what it is given, whether its
    backward pass sums along edges. ``has_sums``: of each layer, whether sums of rows cross; none given: none do.
    ``kind`` of input rows: Tensor, SparseRows or AggregatedRows.

    The model runs in training mode on parts of a few rows; it is left as it was.
    """
    facts, saved, carried, grouped = [], [], [], list[bool]()
    for counts in _PROBES:
        probe = _Probe(model, num_plain, counts, has_sums, sizes, sends_narrow, in_shards)
        with _untouched(model), context(), probe.noted():
            given = _input_rows(probe.rows, num_features, kind, dtype, probe.device)
            is_summed = kind is AggregatedRows
            rows, first = (
                summed_once(model, given, probe.blocks[0]) if is_summed else (given, probe.blocks[0])
            )
            probe.is_input |= {t.untyped_storage().data_ptr() for t in tensors_of(rows)}
            out = forward_of(model)(rows, (first, *probe.blocks[1:]), Key(0))
        facts.append([1.0, *counts[:3], probe.blocks[0].num_edges, counts[4]])
        saved.append(probe.saved)
        carried.append(probe.carried)
        if not grouped:
            grouped = probe.grouped(out, model)
    equations = torch.tensor(facts, dtype=torch.float64)
    lines = [
        torch.linalg.solve(equations, torch.tensor(each, dtype=torch.float64)) for each in (saved, carried)
    ]
    found = [[Kept(*column.tolist()) for column in line.T] for line in lines]
    return found[0], found[1], grouped


class _Probe:
    """A part of a few rows, through which a model runs once."""

    def __init__(
        self,
        model: nn.Module,
        num_plain: int,
        counts: tuple[int, int, int, int, int],
        has_sums: Sequence[bool],
        sizes: Sizes,
        sends_narrow: bool,
        in_shards: bool,
    ) -> None:
        layered = as_layered(model)
        assert layered is not None, "the strategy asks for layers"
        self._model, self._layered = model, layered
        self.device = next(model.parameters()).device
        c, m, h, extra, num_sums = counts
        block = _few(c, m, h, extra, self.device)
        through = HaloBlock.of(
            block, c, _Mirror(h, m if in_shards else None), sizes, sends_narrow=sends_narrow,
            wanted=[h] if in_shards else None,
        )  # fmt: skip
        given = list(has_sums) or [False] * layered.num_layers
        summed = replace(through, sums=_sums(c + m, num_sums, self.device))
        blocks = [
            block if at < num_plain else summed if is_summed else through
            for at, is_summed in enumerate(given)
        ]
        self.blocks = tuple(blocks)
        self.rows = c + m + (h if num_plain else 0)
        self.saved, self.carried = [0.0] * (layered.num_layers + 1), [0.0] * layered.num_layers
        self.is_input = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._alive: list[Any] = []  # so that no address comes twice

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, what autograd keeps is noted with the layer that made it."""
        seen: set[int] = set()
        given: set[int] = set()
        plain: Any = self._layered.layer

        def layer(index: int, block: Block, state: dict[str, Any], **options: Any) -> Any:
            for tensor in (t for rows in state.values() for t in tensors_of(rows)):
                self.carried[index] += self._new_bytes(tensor, given)
            with hooks(pack_for(index), lambda tensor: tensor):
                return plain(index, block, state, **options)

        def pack_for(index: int) -> Callable[[Tensor], Tensor]:
            def pack(tensor: Tensor) -> Tensor:
                self.saved[index] += self._new_bytes(tensor, seen)
                if index == self._layered.num_layers:
                    given.add(tensor.untyped_storage().data_ptr())  # kept in any case
                return tensor

            return pack

        hooks = torch.autograd.graph.saved_tensors_hooks
        vars(self._model)["layer"] = layer
        try:
            with hooks(pack_for(self._layered.num_layers), lambda tensor: tensor):
                yield
        finally:
            del vars(self._model)["layer"]

    def _new_bytes(self, tensor: Tensor, seen: set[int]) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.data_ptr() in self.is_input:
            return 0
        seen.add(storage.data_ptr())
        self._alive.append(tensor)
        return storage.nbytes()

    def grouped(self, out: Tensor, model: nn.Module) -> list[bool]:
        """Of each layer, whether edges are grouped by source when gradients are made."""
        weights = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(out.float().square().sum(), weights, allow_unused=True)
        return ["t" in getattr(block, "central", block)._cache for block in self.blocks]


class _Mirror:
    """A channel that brings nothing but zeros, tied to the rows that leave as what arrives is."""

    def __init__(self, num_halo: int, num_sums: int | None) -> None:
        self._count = num_halo if num_sums is None else num_sums

    def leave(
        self, rows: Tensor, first: int, reader: Reader | None = None, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        count = self._count
        return rows, rows[first:], lambda: (rows.sum() * 0).expand(count, *rows.shape[1:]).contiguous()


def _few(c: int, m: int, h: int, extra: int, device: torch.device) -> Block:
    """Central rows with an own edge each, marginal ones with an own edge and one of the halo, the last with more."""
    edges = [[i] for i in range(c)] + [[c + i, c + m + i % h] for i in range(m)]
    edges[-1] += [c + m + i % h for i in range(extra)]
    indptr = torch.tensor([0, *(len(each) for each in edges)]).cumsum(0)
    indices = torch.tensor([j for each in edges for j in each], dtype=torch.int32)
    degree = torch.full((c + m + h,), 2, dtype=torch.int32)
    ids = torch.arange(c + m + h)
    return Block(indptr, indices, c + m + h, src_ids=ids, in_degree=degree).to(device)


def _sums(num_own: int, count: int, device: torch.device) -> Sums:
    """Some of the rows that come are sums; none leaves."""
    some = torch.arange(count, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    return Sums(torch.zeros(1, dtype=torch.int64, device=device), none, None, num_own, some, some)


def _input_rows(count: int, num_features: int, kind: type, dtype: torch.dtype, device: torch.device) -> Rows:
    if kind is not SparseRows:
        return torch.zeros(count, num_features, dtype=dtype, device=device)
    columns = torch.zeros(count, dtype=torch.int32, device=device)
    values = torch.ones(count, dtype=dtype, device=device)
    return SparseRows(torch.arange(count + 1, device=device), columns, values, num_features)


def tensors_of(rows: Any) -> list[Tensor]:
    """What input rows are made of."""
    if isinstance(rows, Tensor):
        return [rows]
    return [value for value in vars(rows).values() if isinstance(value, Tensor)]


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Training mode inside; modes and buffers are as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
