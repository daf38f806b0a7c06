"""What strategy ``halo`` needs of memory on one rank, from shapes: known before the first step.

    edges         of all layers' blocks, also grouped by source where the backward pass sums along them
    inputs        input rows, those of the halo with them
    halo          rows of other ranks that are here at a time; with ``recompute`` what is kept of all layers' messages
    activations   what autograd keeps at the end of the forward pass
    weights       parameters, gradients and what the optimiser keeps
    buffers       messages that leave and arrive in one exchange, and gradients on their way

What autograd keeps follows from the model: it is run on six parts of a few rows, and every layer's bytes are a line through
what they show, in rows central and marginal, halo rows, edges and sums that cross. Not counted: what lives for a moment
inside an operation, the loss, evaluation, and the libraries themselves.

Legend: n own rows, c central rows, H halo rows, S sources, E edges, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.exchange import Lists
from polyhop.graph import Block, HaloBlock, Reader, Sizes, SparseRows, Sums
from polyhop.kernels.keys import Key
from polyhop.nn.rows import Rows
from polyhop.strategies.step import as_layered, forward_of

__all__ = [
    "Kept",
    "LayerSizes",
    "Ledger",
    "Means",
    "edge_bytes",
    "kept_by_layers",
    "ledger",
    "ledger_of",
    "note",
    "row_bytes",
]

_PROBES = (  # c, n - c, H, further edges, sums among the H
    (8, 8, 8, 0, 2), (16, 8, 8, 0, 2), (8, 16, 8, 0, 2), (8, 8, 16, 0, 2), (8, 8, 8, 8, 2), (8, 8, 8, 0, 6),
)  # fmt: skip
_EDGE_BYTES = 4  # of an edge's place, in edges grouped by source


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


@dataclass(frozen=True)
class Means:
    """How the run goes about it."""

    bits: int = 32  # of a value that crosses; the widest, where they differ
    value_bytes: int = 4
    depth: int | None = None  # of a sequential halo: rounds ahead; None: all ranks' rows come at once
    recompute: bool = False
    num_parameters: int = 0
    states: int = 2  # values that the optimiser keeps of each parameter


@dataclass(frozen=True)
class Ledger:
    """Bytes on one rank."""

    edges: float
    inputs: float
    halo: float
    activations: float
    weights: float
    buffers: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, each.name) for each in fields(self)))


def ledger(
    layers: Sequence[LayerSizes],
    saved: Sequence[Kept],
    carried: Sequence[Kept],
    means: Means,
    *,
    edges: float,
    inputs: float,
) -> Ledger:
    """``saved``: what autograd keeps of each layer, and last of what is before and after them; ``carried``: of the rows that
    a layer is given, input rows left out.
    """
    whole = [sum(each.wanted) * each.columns * means.value_bytes for each in layers]
    messages = [_largest(each, means) for each in layers]
    halo = float(max(whole, default=0))
    if means.depth is not None:
        shards = (max(each.wanted, default=0) * each.columns for each in layers)
        halo = float((1 + means.depth) * means.value_bytes * max(shards, default=0))
    *each_saved, around = saved
    kept = [kept.of(sizes) for kept, sizes in zip(each_saved, layers, strict=True)]
    beside = around.of(layers[0])
    activations = beside + sum(kept)
    if means.recompute:
        given = sum(kept.of(sizes) for kept, sizes in zip(carried, layers, strict=True))
        activations = beside + given + max(kept, default=0.0)
        halo += sum(_replayed(each, means) for each in layers)
    weights = means.num_parameters * means.value_bytes
    buffers = max(messages, default=0.0) + weights
    return Ledger(edges, inputs, halo, activations, weights * (2 + means.states), buffers)


def ledger_of(
    model: nn.Module,
    x: Rows,
    blocks: Sequence[Block],
    lists: Sequence[Lists],
    columns: Sequence[int],
    means: Means,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Ledger:
    """Of a step with these input rows, blocks and lists; ``columns`` cross at each layer, 0 at those that bring nothing."""
    plain = [not isinstance(block, HaloBlock) for block in blocks]
    through = next((block for block in blocks if isinstance(block, HaloBlock)), None)
    saved, carried, grouped = kept_by_layers(
        model,
        int(x.shape[1]),
        Sizes(0, 0, 0) if through is None else through.sizes,
        num_plain=sum(plain),
        has_sums=[_num_sums(block) > 0 for block in blocks],
        sends_narrow=through is None or through.sends_narrow,
        in_shards=means.depth is not None,
        is_sparse=isinstance(x, SparseRows),
        dtype=x.dtype,
        context=context,
    )
    layers = [
        LayerSizes(
            0 if is_plain else block.central.num_dst,  # type: ignore[attr-defined]
            block.num_dst if is_plain else block.marginal.num_dst,  # type: ignore[attr-defined]
            each.wanted,
            each.leaving("forward"),
            block.num_edges,
            width,
            _num_sums(block),
        )
        for is_plain, block, each, width in zip(plain, blocks, lists, columns, strict=True)
    ]
    return ledger(layers, saved, carried, means, edges=edge_bytes(blocks, grouped), inputs=_rows_bytes(x))


def _num_sums(block: Block) -> int:
    return block.sums.at.numel() if isinstance(block, HaloBlock) and block.sums is not None else 0


def row_bytes(columns: int, bits: int, value_bytes: int) -> int:
    """Of one row on its way."""
    if bits >= 32:
        return columns * value_bytes
    return -(-columns * bits // 8) + (4 if bits < 16 else 0)


def _largest(sizes: LayerSizes, means: Means) -> float:
    """Messages of one exchange: all ranks', or those of the rounds that are under way."""
    row = row_bytes(sizes.columns, means.bits, means.value_bytes) if sizes.columns else 0
    if means.depth is None:
        return float(row * (sum(sizes.wanted) + sum(sizes.leaving)))
    return float((1 + means.depth) * row * (max(sizes.wanted, default=0) + max(sizes.leaving, default=0)))


def _replayed(sizes: LayerSizes, means: Means) -> float:
    """What a channel keeps of a layer for a second forward pass: messages, or, of a sequential halo, their sums."""
    if not sizes.columns:
        return 0.0
    if means.depth is not None:
        return float(sizes.num_marginal * sizes.columns * means.value_bytes)
    return float(sum(sizes.wanted) * row_bytes(sizes.columns, means.bits, means.value_bytes))


def edge_bytes(blocks: Iterable[Block], grouped: Sequence[bool]) -> int:
    """Of the blocks' tensors and of their edges grouped by source, where ``grouped`` says that a layer needs these."""
    seen: dict[int, int] = {}
    more = 0
    for block, is_grouped in zip(blocks, grouped, strict=True):
        pieces: list[Any] = [block]
        if isinstance(block, HaloBlock):
            pieces += [block.central, block.marginal, block.sums, block.own, *(block.shards or ())]
        for piece in pieces:
            tensors = [] if piece is None else [t for t in vars(piece).values() if isinstance(t, Tensor)]
            seen |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        more += sum(_grouped_bytes(piece) for piece in _summed(block)) if is_grouped else 0
    return sum(seen.values()) + more


def _summed(block: Block) -> list[tuple[int, Tensor]]:
    """(sources, edges' sources) of everything that a layer sums along."""
    if not isinstance(block, HaloBlock):
        return [(block.num_src, block.indices)]
    found = [(block.central.num_src, block.central.indices)]
    if block.shards is None or block.own is None:
        found.append((block.marginal.num_src, block.marginal.indices))
    else:
        found.append((block.own.num_src, block.own.indices))
        found += [(each.stop - each.start, each.indices) for each in block.shards]
    if block.sums is not None:
        found.append((block.sums.num_own, block.sums.indices))
    return found


def _grouped_bytes(summed: tuple[int, Tensor]) -> int:
    num_src, indices = summed
    return 8 * (num_src + 1) + indices.numel() * (indices.element_size() + _EDGE_BYTES)


def kept_by_layers(
    model: nn.Module,
    num_features: int,
    sizes: Sizes,
    *,
    num_plain: int,
    has_sums: Sequence[bool] = (),
    sends_narrow: bool = True,
    in_shards: bool = False,
    is_sparse: bool = False,
    dtype: torch.dtype = torch.float32,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[list[Kept], list[Kept], list[bool]]:
    """Of each layer: what autograd keeps (and last, what it does before and after all layers), what it is given, whether its
    backward pass sums along edges. ``has_sums``: of each layer, whether sums of rows cross; none given: none do.

    The model runs in training mode on parts of a few rows; it is left as it was.
    """
    facts, saved, carried, grouped = [], [], [], list[bool]()
    for counts in _PROBES:
        probe = _Probe(model, num_plain, counts, has_sums, sizes, sends_narrow, in_shards)
        with _untouched(model), context(), probe.noted():
            rows = _input_rows(probe.rows, num_features, is_sparse, dtype, probe.device)
            probe.is_input |= {t.untyped_storage().data_ptr() for t in _tensors_of(rows)}
            out = forward_of(model)(rows, probe.blocks, Key(0))
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
            for tensor in (t for rows in state.values() for t in _tensors_of(rows)):
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


def _input_rows(
    count: int, num_features: int, is_sparse: bool, dtype: torch.dtype, device: torch.device
) -> Rows:
    if not is_sparse:
        return torch.zeros(count, num_features, dtype=dtype, device=device)
    columns = torch.zeros(count, dtype=torch.int32, device=device)
    values = torch.ones(count, dtype=dtype, device=device)
    return SparseRows(torch.arange(count + 1, device=device), columns, values, num_features)


def _rows_bytes(rows: Rows) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors_of(rows))


def _tensors_of(rows: Any) -> list[Tensor]:
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


def note(found: Ledger, line: Collective) -> str:
    """The rank that needs most, in words. All ranks call it together."""
    names = [each.name for each in fields(Ledger)]
    own = torch.tensor([[getattr(found, name) for name in names]], dtype=torch.float64, device=line.device)
    every = torch.cat(line.all_gather(own, kind="sizes", counts=[1] * line.num_ranks))
    most = every[int(every.sum(1).argmax())].tolist()
    parts = ", ".join(f"{name} {value / 1e6:.1f}" for name, value in zip(names, most, strict=True))
    return f"needs up to {sum(most) / 1e6:.1f} MB a rank ({parts})"
