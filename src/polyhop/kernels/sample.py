"""Neighbour sampling of a whole mini-batch: which in-edges each layer keeps, and the rows of its nodes.

The draw of a node is a pure function of (key of the hop, node, its in-edge list, fan-out), so batches do not depend on
threads, order or process. Uniform draws follow Floyd's algorithm over the node's Philox words; LABOR-0 gives every source
one number per hop and keeps the smallest. ``csrc/ops/sample.cpp`` and the torch reference here give the same bits.

Legend: N nodes, E edges, D destinations, S sources, L layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError, KernelError, unknown
from polyhop.kernels import checks, device, native, reference
from polyhop.kernels.variates import packed_keys

__all__ = [
    "METHODS",
    "Sampled",
    "SampledLayer",
    "Sampler",
    "check_fanouts",
    "has_device_kernel",
    "sample_reference",
]

METHODS = reference.DRAW_METHODS
_TABLES = ("auto", "dense", "hash")
_SEED_RANGE, _SEED_TWICE, _MEMORY, _TOO_MANY, _BAD_ROW, _BAD_SOURCE = -1, -2, -3, -4, -5, -6


@dataclass(frozen=True, eq=False)
class SampledLayer:
    """Drawn in-edges of D destinations, which are the first D of its sources."""

    indptr: Tensor  # int64 [D + 1]
    indices: Tensor  # int32 [E]: row of each source
    edge: Tensor | None  # int64 [E]: position of each edge in the graph
    num_src: int


@dataclass(frozen=True, eq=False)
class Sampled:
    """One mini-batch. The sources of a layer are the first ``num_src`` nodes, and the destinations of the next."""

    src_ids: Tensor  # int64 [S]: seeds first, then nodes by first appearance
    in_degree: Tensor  # int32 [S]: in-edges in the graph
    layers: tuple[SampledLayer, ...]  # from the seeds outward


class Sampler:
    """Draws mini-batches from one graph; owns the native tables and buffers, so it serves one thread at a time.

    indptr int64 [N + 1], indices int32 or int64 [E]: in-edges in CSC. ``keep_edges`` also returns edge positions. ``table``
    is how nodes get their rows: ``dense`` (4 bytes per node of the graph), ``hash`` (memory follows the batch), ``auto``.
    With indptr on a CUDA device, indices may be there too or in pinned memory of the host.
    """

    _first_mark = 0  # tests begin close to where the tables' marks run out

    def __init__(
        self, indptr: Tensor, indices: Tensor, *, keep_edges: bool = False, table: str = "auto"
    ) -> None:
        checks.csr("sample", indptr, indices, indptr.numel() - 1)
        if table not in _TABLES:
            raise ConfigError(unknown("sampler table", table, _TABLES))
        self._indptr, self._indices = indptr.contiguous(), indices.contiguous()
        self._keep_edges, self._table = keep_edges, table
        self._handle = 0
        self._rows: Any = None  # on a CUDA device: the table of nodes' rows

    def sample(
        self,
        seeds: Tensor,
        fanouts: Sequence[int],
        keys: Sequence[int],
        *,
        method: str = "uniform",
        are_checked: bool = False,
    ) -> Sampled:
        """The layers that reach distinct ``seeds`` (int64 [B]).

        One fan-out (-1 = all) and one 64-bit key per hop (or ``Variates``), from the seeds outward. ``are_checked``: seeds
        are known to be distinct nodes of the graph, so that a device need not be waited for.
        """
        fanouts = check_fanouts(fanouts)
        checks.require(
            len(keys) == len(fanouts), f"sample: {len(fanouts)} fan-outs need as many keys, got {len(keys)}"
        )
        checks.require(
            seeds.dim() == 1 and seeds.dtype == torch.int64,
            f"sample: seeds must be int64 [B], got {seeds.dtype} {list(seeds.shape)}",
        )
        if method not in METHODS:
            raise ConfigError(unknown("sampling method", method, METHODS))
        is_apart = self._indptr.is_cuda and self._indices.is_cpu
        if device.serves(self._indptr, None if is_apart else self._indices, seeds):
            if not are_checked:
                _check_seeds(seeds, self._indptr.numel() - 1)
            return self._sample_device(seeds.contiguous(), fanouts, keys, method)
        if not native.serves(self._indptr, self._indices, seeds, op="ph_sample_hops"):
            keep = self._keep_edges
            return sample_reference(
                self._indptr, self._indices, seeds, fanouts, keys, method=method, keep_edges=keep
            )
        return self._sample_native(seeds.contiguous(), fanouts, keys, METHODS.index(method))

    def _sample_device(
        self, seeds: Tensor, fanouts: Sequence[int], keys: Sequence[int], method: str
    ) -> Sampled:
        from polyhop.kernels.triton import relabel, sample

        rows, self._rows = self._rows, None  # kept below, once it is free again
        if rows is None:
            rows = relabel.Table(self._indptr.numel() - 1, seeds.device)
        size = (self._indptr.numel() - 1, self._indices.numel())
        if method == "uniform" and sample.serves_hops(seeds.numel(), fanouts, *size):
            src_ids, in_degree, drawn = sample.draw_hops(
                self._indptr,
                self._indices,
                seeds,
                fanouts,
                keys,
                table=rows.first,
                keep_edges=self._keep_edges,
            )
            self._rows = rows
            return Sampled(src_ids, in_degree, tuple(SampledLayer(*layer) for layer in drawn))
        ids, layers = seeds, []
        for fanout, key in zip(fanouts, keys, strict=True):
            if method == "uniform" and 0 < fanout <= sample.MOST:
                ends, edge = sample.draw(self._indptr, ids, fanout, key, ids)
            else:
                ends, edge = reference.draw(
                    self._indptr, self._indices, ids, fanout, key, ids=ids, method=method
                )
            ids, local = rows.relabel(ids, self._sources(edge).long())
            layers.append(SampledLayer(ends, local, edge if self._keep_edges else None, ids.numel()))
        self._rows = rows
        return Sampled(ids, (self._indptr[ids + 1] - self._indptr[ids]).to(torch.int32), tuple(layers))

    def _sources(self, edge: Tensor) -> Tensor:
        """[E]: sources of edges, each read alone where they are in memory of the host."""
        if self._indices.device == edge.device:
            return self._indices[edge]
        from polyhop.kernels.triton import gather

        found = torch.empty(edge.numel(), 1, dtype=self._indices.dtype, device=edge.device)
        gather.gather_rows(self._indices[:, None], None, edge, None, found)
        return found[:, 0]

    def _sample_native(
        self, seeds: Tensor, fanouts: Sequence[int], keys: Sequence[int], method: int
    ) -> Sampled:
        hops = len(fanouts)
        given = torch.tensor(fanouts, dtype=torch.int64)
        sizes = torch.zeros(2 * hops, dtype=torch.int64)
        status = native.call(
            "ph_sample_hops", self._native(), self._indptr, self._indices, native.id_code(self._indices), seeds,
            seeds.numel(), given, packed_keys(keys), hops, method, int(checks.is_debug()), sizes,
        )  # fmt: skip
        if status < 0:
            raise self._failure(status, int(sizes[0]), seeds)
        return self._copy(seeds.numel(), sizes.tolist())

    def _native(self) -> int:
        """The native sampler, made at the first call and freed with this object."""
        if not self._handle:
            nodes, edges, table = self._indptr.numel() - 1, self._indices.numel(), _TABLES.index(self._table)
            keep = int(self._keep_edges)
            self._handle = native.call("ph_sampler_new", nodes, edges, table, keep, self._first_mark)
            if not self._handle:
                raise KernelError("sample: no memory for a sampler")
            # Not at exit: a loader's thread may still be inside the library then.
            weakref.finalize(self, native.call, "ph_sampler_free", self._handle).atexit = False
        return self._handle

    def _copy(self, num_dst: int, sizes: list[int]) -> Sampled:
        layers = []
        for hop, (edges, num_src) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
            indptr = torch.empty(num_dst + 1, dtype=torch.int64)
            indices = torch.empty(edges, dtype=torch.int32)
            edge = torch.empty(edges, dtype=torch.int64) if self._keep_edges else None
            native.call("ph_sample_copy", self._handle, hop, indptr, indices, edge)
            layers.append(SampledLayer(indptr, indices, edge, num_src))
            num_dst = num_src
        src_ids, in_degree = torch.empty(num_dst, dtype=torch.int64), torch.empty(num_dst, dtype=torch.int32)
        native.call("ph_sample_ids", self._handle, self._indptr, src_ids, in_degree)
        return Sampled(src_ids, in_degree, tuple(layers))

    def _failure(self, status: int, where: int, seeds: Tensor) -> Exception:
        nodes = self._indptr.numel() - 1
        if status == _SEED_RANGE:
            return _outside(seeds, where, nodes)
        if status == _SEED_TWICE:
            return _twice(seeds, where)
        if status == _BAD_ROW:
            return KernelError(f"sample: indptr[{where}] .. indptr[{where + 1}] is not a range of the edges")
        if status == _BAD_SOURCE:
            return KernelError(
                f"sample: indices[{where}] = {int(self._indices[where])}, outside 0 .. {nodes - 1}"
            )
        if status == _TOO_MANY:
            return InputError(
                "sample: this mini-batch reaches more than 2^31 nodes; use fewer seeds or smaller fan-outs"
            )
        return KernelError(
            f"sample: out of memory for a mini-batch of {seeds.numel()} seeds; use fewer or smaller fan-outs"
        )


def has_device_kernel(fanouts: Sequence[int], method: str) -> bool:
    """Whether a CUDA device draws such mini-batches by kernels; others it draws in plain torch."""
    if method != "uniform" or not device.has_kernels():
        return False
    from polyhop.kernels.triton.sample import MOST

    return all(0 < fanout <= MOST for fanout in fanouts)


def check_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    """The fan-outs; ConfigError unless there is at least one and each is a whole number >= 1, or -1 for all."""
    if len(fanouts) == 0:
        raise ConfigError(
            "num_neighbors is empty: give one fan-out per layer, from the seeds outward, e.g. [15, 10, 5]"
        )
    for at, fanout in enumerate(fanouts):
        is_whole = hasattr(fanout, "__index__")
        if not is_whole or (fanout < 1 and fanout != -1):
            raise ConfigError(
                f"num_neighbors[{at}] = {fanout!r}: expected a whole number of at least 1, or -1 for all"
            )
    return tuple(index(fanout) for fanout in fanouts)


def _outside(seeds: Tensor, at: int, nodes: int) -> InputError:
    return InputError(
        f"seeds[{at}] = {int(seeds[at])}: this graph has {nodes} nodes, expected ids in 0 .. {nodes - 1}"
    )


def _twice(seeds: Tensor, at: int) -> InputError:
    return InputError(
        f"seeds[{at}] = {int(seeds[at])} appears before: seeds of one mini-batch must be distinct"
    )


def sample_reference(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    keys: Sequence[int],
    *,
    method: str = "uniform",
    keep_edges: bool = False,
) -> Sampled:
    """The same mini-batch in plain torch, on any device."""
    _check_seeds(seeds, indptr.numel() - 1)
    ids, layers = seeds, []
    for fanout, key in zip(fanouts, keys, strict=True):
        ends, edge = reference.draw(indptr, indices, ids, fanout, key, ids=ids, method=method)
        ids, local = reference.relabel(ids, indices[edge].long())
        layers.append(SampledLayer(ends, local, edge if keep_edges else None, ids.numel()))
    return Sampled(ids, (indptr[ids + 1] - indptr[ids]).to(torch.int32), tuple(layers))


def _check_seeds(seeds: Tensor, nodes: int) -> None:
    bad = ((seeds < 0) | (seeds >= nodes)).nonzero()
    if bad.numel():
        raise _outside(seeds, int(bad[0]), nodes)
    order = torch.sort(seeds, stable=True).indices
    again = order[1:][seeds[order[1:]] == seeds[order[:-1]]]
    if again.numel():
        raise _twice(seeds, int(again.min()))
