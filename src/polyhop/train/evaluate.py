"""Exact evaluation and prediction, layer by layer over chunks of destinations, in bounded memory.

    for each layer: for each chunk of destinations: gather its sources' rows -> layer -> write the destinations' rows

So at most two layers' rows exist at a time, and the working set of a chunk stays within a byte budget. Nothing is
sampled: the numbers are those of one forward pass over the full graph, to rounding. Chunk bounds depend on sizes and the
budget only.

Legend: N nodes, C outputs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import PolyhopError
from polyhop.graph import Block, SparseRows
from polyhop.nn.rows import Rows
from polyhop.strategies import HeldPart, WholeGraph, as_layered, forward_of
from polyhop.strategies.step import LayeredModel

__all__ = ["DEFAULT_MEMORY_BYTES", "Chunk", "in_eval_mode", "layerwise"]

DEFAULT_MEMORY_BYTES = 2 << 30
_EDGE_BYTES = 48  # indices, their compaction, and per-edge scratch such as attention scores of 8 heads
_SLACK = 1.25  # the next chunk may share fewer sources than the last one did
_FIRST_WIDTH_BYTES = 1024  # assumed width of a layer's output until its first chunk is done

Chunk = tuple[int, int, Tensor]
"""(start, stop, logits [stop - start, C] of nodes start .. stop - 1)."""


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout inside; every module's own mode is put back after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def layerwise(
    model: nn.Module,
    whole: WholeGraph | HeldPart,
    *,
    memory_bytes: int | None = DEFAULT_MEMORY_BYTES,
    spill_dir: Path | None = None,
    wanted: Tensor | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[Chunk]:
    """Logits of all nodes (of a rank: its own), chunk by chunk in order; those without a node of ``wanted`` may be left out.

    ``wanted``: int64, sorted. ``memory_bytes`` bounds a chunk's working set (None: no bound). Two layers' rows come on top;
    where they exceed it too and ``spill_dir`` is given, they live in memory-mapped files there. ``poll`` runs between chunks
    and may raise. A model without begin/layer/finish is run on the full graph at once.
    """
    with in_eval_mode(model), whole.placement.context():
        layered = as_layered(model)
        if layered is None:
            logits = forward_of(model)(whole.x, whole.block, None)
            yield 0, logits.shape[0], logits
            return
        run = _Run(layered, whole, memory_bytes, spill_dir, poll)
        if run.num_src == 0:
            return  # a part without nodes: nobody reads from it, and it reads from nobody
        rows = run.begin()
        for index in range(layered.num_layers - 1):
            rows = run.complete(run.store(run.layer(index, rows), run.num_nodes))
        last = run.layer(layered.num_layers - 1, rows, wanted)
        yield from ((start, stop, layered.finish(state)) for start, stop, state in last)


State = dict[str, Any]
_Piece = tuple[int, int, State]


class _Input:
    """Rows as the feature store has them; ``begin`` runs on what is gathered."""

    def __init__(self, model: LayeredModel, whole: WholeGraph | HeldPart, is_plain: bool) -> None:
        self._model, self._whole = model, whole
        self._is_plain = is_plain  # begin changes nothing: the state is {"h": x}
        self.row_bytes = _bytes_per_row(whole)

    def all(self) -> State:
        return self._model.begin(self._whole.x)

    def gather(self, ids: Tensor, but: str = "") -> State:
        """The state of the given rows, without the entry named ``but``."""
        if but == "h" and self._is_plain:
            return {}
        return self._model.begin(self._whole.placement.rows(self._whole.features.gather(ids)))

    def pool(self) -> Tensor | None:
        """All rows of "h" where computing happens, if they are there without a copy."""
        values = getattr(self._whole.features, "values", None)
        place = self._whole.placement
        if not self._is_plain or not isinstance(values, Tensor):
            return None
        is_ready = values.dtype == place.dtype and values.device == place.device
        return values if is_ready and getattr(self._whole.features, "scale", None) is None else None


class _Stored:
    """Rows of one layer's output [N, ...], by name."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self.row_bytes = sum(_row_bytes(value) for value in tensors.values())

    def all(self) -> State:
        return {name: value.to(self._device) for name, value in self._tensors.items()}

    def mapped(self, function: Callable[[Tensor], Tensor]) -> _Stored:
        """Each entry put through a function."""
        return _Stored({name: function(value) for name, value in self._tensors.items()}, self._device)

    def gather(self, ids: Tensor, but: str = "") -> State:
        """The state of the given rows, without the entry named ``but``."""
        taken = {name: value for name, value in self._tensors.items() if name != but}
        here = {name: value.index_select(0, ids.to(value.device)) for name, value in taken.items()}
        return {name: value.to(self._device) for name, value in here.items()}

    def pool(self) -> Tensor | None:
        """All rows of "h" where computing happens, if they are there without a copy."""
        rows = self._tensors["h"]
        return rows if rows.device == self._device else None


class _Run:
    """One pass over the graph."""

    def __init__(
        self,
        model: LayeredModel,
        whole: WholeGraph | HeldPart,
        memory_bytes: int | None,
        spill_dir: Path | None,
        poll: Callable[[], None],
    ) -> None:
        self.model, self.whole, self.poll = model, whole, poll
        self.memory_bytes, self.spill_dir = memory_bytes, spill_dir
        self.features = whole.features  # of a part: all ranks fetch together, also those without nodes
        self.num_nodes, self.num_src = whole.host_block.num_dst, whole.host_block.num_src
        self.device = whole.placement.device
        self._local: Tensor | None = None

    def begin(self) -> _Input | _Stored:
        """The input rows: as they are where ``begin`` changes nothing or keeps them sparse, else begun once and stored."""
        probe: Rows = self.whole.placement.rows(self.whole.features.gather(torch.zeros(1, dtype=torch.int64)))
        state = self.model.begin(probe)
        is_plain = state.keys() == {"h"} and state["h"] is probe
        source = _Input(self.model, self.whole, is_plain)
        if is_plain or any(isinstance(value, SparseRows) for value in state.values()):
            return source
        return self.store(self._begun(source), self.num_src)

    def _begun(self, source: _Input) -> Iterator[_Piece]:
        rows = self.num_src
        if self.memory_bytes is not None:
            rows = max(1, min(rows, self.memory_bytes // (2 * source.row_bytes + _FIRST_WIDTH_BYTES)))
        for start in range(0, self.num_src, rows):
            self.poll()
            stop = min(start + rows, self.num_src)
            is_all = stop - start == self.num_src
            yield start, stop, source.all() if is_all else source.gather(torch.arange(start, stop))

    def layer(self, index: int, rows: _Input | _Stored, wanted: Tensor | None = None) -> Iterator[_Piece]:
        """Output rows of one layer, chunk by chunk."""
        budget = _Budget(self.memory_bytes, self.num_nodes, self.num_src, rows.row_bytes)
        start = 0
        while start < self.num_nodes:
            self.poll()
            stop = budget.stop(self.whole.host_block.indptr, start)
            if wanted is not None and not _holds_any(wanted, start, stop):
                start = stop
                continue
            stop, state = self._chunk(index, rows, start, stop, budget)
            budget.learn_width(sum(_row_bytes(value) for value in state.values()))
            yield start, stop, state
            start = stop

    def _chunk(
        self, index: int, rows: _Input | _Stored, start: int, stop: int, budget: _Budget
    ) -> tuple[int, State]:
        """Run one chunk, cut shorter if its sources turn out too many; returns where it ended."""
        if stop - start == self.num_nodes:
            return stop, self.model.layer(index, self.whole.block, rows.all())
        block, ids = self._slice(start, stop)
        while stop - start > 1 and not budget.fits(ids.numel(), block.num_edges, stop - start):
            stop = start + (stop - start) // 2
            block, ids = self._slice(start, stop)
        budget.learn_sharing(ids.numel(), block.num_edges, stop - start)
        block = self.whole.placement.block(block)
        pool = rows.pool() if getattr(self.model, "takes_pool", False) else None
        if pool is None:
            return stop, self.model.layer(index, block, rows.gather(ids))
        # The layer reads the rows where they are, and copies them only if it maps before it aggregates.
        state = rows.gather(ids, but="h") | {"h": pool}
        return stop, self.model.layer(index, replace(block, rows=ids.to(self.device), _cache={}), state)

    def _slice(self, start: int, stop: int) -> tuple[Block, Tensor]:
        """The block of destinations start .. stop with only the sources that they read; those sources' ids, ascending."""
        full = self.whole.host_block
        first, last = int(full.indptr[start]), int(full.indptr[stop])
        indices = full.indices[first:last].long()
        if self._local is None:
            self._local = torch.zeros(self.num_src, dtype=torch.int32)
        is_source = torch.zeros(self.num_src, dtype=torch.bool)
        is_source[indices] = True
        is_source[start:stop] = True
        ids = is_source.nonzero().squeeze(1)
        self._local[ids] = torch.arange(ids.numel(), dtype=torch.int32)
        per_source = {
            name: getattr(full, name)
            for name in ("src_ids", "in_degree", "in_weight", "out_degree", "loop_weight")
        }
        taken = {name: value[ids] for name, value in per_source.items() if value is not None}
        block = replace(
            full,
            indptr=full.indptr[start : stop + 1] - first,
            indices=self._local[indices],
            num_src=ids.numel(),
            dst_start=int(self._local[start]),
            edge_weight=None if full.edge_weight is None else full.edge_weight[first:last],
            **({"src_ids": ids} | taken),
            _cache={},
        )
        return block, ids

    def complete(self, rows: _Stored) -> _Stored:
        """A layer's rows with those of the halo. All ranks call it together: one without a halo may still have to give."""
        return rows.mapped(self.whole.complete)

    def store(self, pieces: Iterator[_Piece], num_rows: int) -> _Stored:
        """Collect rows: in memory where computing happens, or in files where they are too many for the budget."""
        tensors: dict[str, Tensor] = {}
        for start, stop, state in pieces:
            if stop - start == num_rows:
                return _Stored(state, self.device)
            if not tensors:
                tensors = self._allocate(state, num_rows)
            for name, value in state.items():
                tensors[name][start:stop] = value
        return _Stored(tensors, self.device)

    def _allocate(self, state: State, num_rows: int) -> dict[str, Tensor]:
        shapes = {name: (num_rows, *value.shape[1:]) for name, value in state.items()}
        total = num_rows * sum(_row_bytes(value) for value in state.values())
        is_large = self.memory_bytes is not None and 2 * total > self.memory_bytes
        if is_large and self.spill_dir is not None:
            return {name: _mapped(shapes[name], value.dtype, self.spill_dir) for name, value in state.items()}
        device = torch.device("cpu") if is_large else self.device
        return {
            name: torch.empty(shapes[name], dtype=value.dtype, device=device) for name, value in state.items()
        }


class _Budget:
    """How many destinations one chunk of a layer may have. Learns, from the chunks done, how wide output rows are and how
    many sources the destinations share; what it says depends on the graph and the budget only.
    """

    def __init__(self, memory_bytes: int | None, num_nodes: int, num_src: int, in_bytes: int) -> None:
        self.memory_bytes, self.num_nodes, self.in_bytes = memory_bytes, num_nodes, in_bytes
        self.num_src = num_src
        self.out_bytes = max(in_bytes, _FIRST_WIDTH_BYTES)
        self.sources_per_reference = 1.0  # distinct sources / (edges + destinations)

    def learn_width(self, out_bytes: int) -> None:
        self.out_bytes = out_bytes

    def learn_sharing(self, sources: int, edges: int, rows: int) -> None:
        self.sources_per_reference = min(1.0, _SLACK * sources / (edges + rows))

    def fits(self, sources: float, edges: int, rows: int) -> bool:
        """Whether the working set of such a chunk is within the budget: rows gathered, scaled or projected, and written."""
        if self.memory_bytes is None:
            return True
        source_bytes = 2 * self.in_bytes + self.out_bytes
        return sources * source_bytes + edges * _EDGE_BYTES + rows * self.out_bytes <= self.memory_bytes

    def stop(self, indptr: Tensor, start: int) -> int:
        """The largest stop that should fit; at least one row."""
        low, high = start + 1, self.num_nodes
        if self.memory_bytes is None:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            edges, rows = int(indptr[middle]) - int(indptr[start]), middle - start
            sources = min(self.num_src, self.sources_per_reference * (rows + edges))
            low, high = (middle, high) if self.fits(sources, edges, rows) else (low, middle - 1)
        return low


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """A tensor in a new file under the folder; the file has no name any more, so it goes with the tensor."""
    size = int(torch.Size(shape).numel())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".tmp-rows-", dir=folder)
        try:
            # Claimed now: a disk that fills up later would end the process at a write to mapped memory.
            os.posix_fallocate(handle, 0, size * dtype.itemsize)
            return torch.from_file(name, shared=True, size=size, dtype=dtype).view(shape)
        finally:
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        raise PolyhopError(
            f"cannot spill {size * dtype.itemsize:,} bytes of hidden rows to {folder}: {error.strerror or error}"
        ) from error


def _holds_any(wanted: Tensor, start: int, stop: int) -> bool:
    low, high = torch.searchsorted(wanted, torch.tensor([start, stop])).tolist()
    return bool(high > low)


def _row_bytes(rows: Tensor) -> int:
    return rows[:1].numel() * rows.element_size()


def _bytes_per_row(whole: WholeGraph | HeldPart) -> int:
    size = whole.placement.dtype.itemsize
    rows = getattr(whole.features, "rows", None)
    if isinstance(rows, SparseRows):
        return max(1, (size + 8) * rows.values.numel() // max(whole.features.num_rows, 1))
    return max(1, whole.features.num_features * size)
