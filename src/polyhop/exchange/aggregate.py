"""Sums over all in-edges of every node, once: in chunks of bounded memory, the halo's rows fetched from their owners.

    fetch    every halo row once, in rounds of bounded size; kept in memory, or in a file where they are too many
    sum      destinations in order, as many at a time as the memory allows; their sources' rows gathered in ascending order

The sum of a node is over its in-edges in the user's order, so neither parts nor chunks change it.

Legend: n own nodes, H halo nodes, S = n + H sources, F features, W columns of a stored row.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.comm.collective import slices
from polyhop.errors import PolyhopError
from polyhop.exchange.features import RowFetch, RowFormat
from polyhop.graph import Block, Part
from polyhop.graph.aggregated import FixedAggregate
from polyhop.kernels import Relabel, gather_rows
from polyhop.sample.wire import Wire

__all__ = ["MEMORY_BYTES", "PartRows", "filled", "rows_in_file", "stored_rows"]

MEMORY_BYTES = 1 << 28
"""Working memory of a sum, unless told otherwise."""

_EDGE_BYTES = 48  # of an edge while its chunk is summed: numbering its source, its place in the block


def stored_rows(
    block: Block,
    gather: Callable[[Tensor], Tensor],
    aggregate: FixedAggregate,
    num_features: int,
    dtype: torch.dtype,
    *,
    start: int = 0,
    stop: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[Tensor]:
    """Stored rows [k, W] of destinations ``start`` .. ``stop``, in order, chunk by chunk.

    ``block`` has all in-edges of its destinations, which are its first sources. ``gather`` gives rows of ascending sources
    (int64 [m]) as ``dtype`` [m, F]. A chunk takes about ``memory_bytes``, or what the in-edges of one node need.
    """
    most = max(1, memory_bytes // (3 * num_features * dtype.itemsize + _EDGE_BYTES))
    last = block.num_dst if stop is None else stop
    numbers = Relabel()
    while start < last:
        end = _chunk_end(block.indptr, start, last, most)
        with torch.no_grad():
            yield _summed(*_chunk(block, start, end, numbers), gather, aggregate)
        start = end


def _chunk_end(indptr: Tensor, start: int, last: int, most: int) -> int:
    """Where a chunk ends that has at most so many edges and nodes; at least one node."""
    begin = int(indptr[start])
    found = bisect_right(
        range(start + 1, last + 1), most, key=lambda node: int(indptr[node]) - begin + node - start
    )
    return start + max(1, found)


def _chunk(block: Block, start: int, end: int, numbers: Relabel) -> tuple[Block, Tensor]:
    """Destinations start .. end with the sources that they read alone; those sources, ascending: ``rows`` point at them."""
    first, last = int(block.indptr[start]), int(block.indptr[end])
    numbers.start(torch.arange(start, end))
    indices = numbers.add(block.indices[first:last].long())
    found = torch.sort(numbers.ids())
    rows = torch.empty_like(found.indices)
    rows[found.indices] = torch.arange(rows.numel())
    sources = found.values[rows]

    def at(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.index_select(0, sources)

    chunk = Block(
        block.indptr[start : end + 1] - first,
        indices,
        sources.numel(),
        edge_weight=None if block.edge_weight is None else block.edge_weight[first:last],
        in_degree=at(block.in_degree),
        in_weight=at(block.in_weight),
        loop_weight=at(block.loop_weight),
        rows=rows,
    )
    return chunk, found.values


def _summed(
    block: Block, sources: Tensor, gather: Callable[[Tensor], Tensor], aggregate: FixedAggregate
) -> Tensor:
    pool = gather(sources)
    z = aggregate.apply(block, pool)
    assert block.rows is not None, "a chunk's sources are rows of its pool"
    return aggregate.stored(gather_rows(pool, block.rows[: block.num_dst]), z) if aggregate.has_own else z


class PartRows:
    """Rows of a part's sources. Made by all ranks together; one that ``needs`` none still gives others what they need."""

    def __init__(
        self,
        part: Part,
        num_nodes: int,
        line: Collective,
        dtype: torch.dtype,
        *,
        needs: bool = True,
        memory_bytes: int = MEMORY_BYTES,
        scratch: Path | None = None,
    ) -> None:
        assert part.x is not None, "sums are of features"
        self._x, self._num_own, self._dtype = part.x, part.num_nodes, dtype
        fetch = RowFetch(part, RowFormat.of(part, num_nodes, "auto"), Wire(num_nodes))
        ids = part.halo if needs else part.halo[:0]
        shape = ids.numel(), self._x.num_features
        is_small = scratch is None or shape[0] * shape[1] * dtype.itemsize <= memory_bytes
        self._halo = rows_in_file(shape, dtype, None if is_small else scratch)
        self._fetch(fetch, ids, line, max(1, memory_bytes // (4 * self._x.num_features * dtype.itemsize)))

    def _fetch(self, fetch: RowFetch, ids: Tensor, line: Collective, most: int) -> None:
        """Every halo row once: a slice of each owner's in every round, so that no owner is asked by all at once."""
        sizes = line.all_gather(torch.tensor([ids.numel()]), kind="sizes", counts=[1] * line.num_ranks)
        num_rounds = -(-max(int(size) for size in sizes) // most)
        owned = list(pairwise(torch.searchsorted(ids, fetch.part.bounds).tolist()))
        cuts = [[low + cut for cut in slices(high - low, num_rounds)] for low, high in owned if num_rounds]
        for at in range(num_rounds):
            spans = [(cut[at], cut[at + 1]) for cut in cuts]
            got = fetch.fetch(line, torch.cat([ids[low:high] for low, high in spans])).x
            assert isinstance(got, Tensor), "sparse rows are refused before"
            taken = 0
            for low, high in spans:
                self._halo[low:high] = got[taken : taken + high - low]
                taken += high - low

    def gather(self, sources: Tensor) -> Tensor:
        """[m, F] of ascending sources (int64 [m])."""
        num_own = int(torch.searchsorted(sources, self._num_own))
        own = self._x.gather(sources[:num_own])
        assert isinstance(own, Tensor), "sparse rows are refused before"
        out = torch.empty(sources.numel(), own.shape[1], dtype=self._dtype)
        out[:num_own] = own
        gather_rows(self._halo, sources[num_own:] - self._num_own, out=out[num_own:])
        return out


def rows_in_file(shape: tuple[int, int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Rows to be filled, in a file of ``folder`` that has no name, so it goes with them; None: in memory."""
    if folder is None or 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = shape[0] * shape[1] * dtype.itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a disk that fills up later would end the process
            kind = torch.empty(0, dtype=dtype).numpy().dtype
            return torch.from_numpy(np.memmap(file, kind, "r+", shape=shape))
    except OSError as error:
        raise PolyhopError(
            f"cannot keep {size:,} bytes of rows in {folder}: {error.strerror or error}"
        ) from error


def filled(rows: Tensor, pieces: Iterable[Tensor]) -> Tensor:
    """The rows, filled with pieces from the first to the last."""
    done = 0
    for piece in pieces:
        rows[done : done + piece.shape[0]] = piece
        done += piece.shape[0]
    assert done == rows.shape[0], f"{done} rows of {rows.shape[0]}"
    return rows
