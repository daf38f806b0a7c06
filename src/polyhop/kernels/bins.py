"""Edges that come a chunk at a time, because all do not fit in memory: counted, filed into bins, a bin's edges grouped.

Legend: n edges of this chunk or bin, N nodes, B bins, R rows of a bin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import KernelError
from polyhop.kernels import checks, native

__all__ = ["Bins", "bin_edges", "count_edges", "group_edges", "sum_lists", "unique_lists"]

_HINTS = (
    1 << 16
)  # entries of the table that says where to start looking for an id's bin: few enough to stay in cache


@dataclass(frozen=True, eq=False)
class Bins:
    """Contiguous ranges of ids: bin b holds bounds[b] .. bounds[b + 1] - 1."""

    bounds: Tensor  # int64 [B + 1]
    hint: Tensor  # int32: bin of the first id of every 2**shift ids
    shift: int

    @classmethod
    def of(cls, bounds: Tensor) -> Bins:
        """From rising bounds that start at 0; a bin may be empty."""
        num_ids = int(bounds[-1])
        shift = max(0, (num_ids // _HINTS).bit_length())
        first = torch.arange(0, max(num_ids, 1), 1 << shift)
        hint = torch.searchsorted(bounds[1:].contiguous(), first, right=True).to(torch.int32)
        return cls(bounds, hint, shift)

    def __len__(self) -> int:
        return self.bounds.numel() - 1


def count_edges(src: Tensor, dst: Tensor, in_degree: Tensor, out_degree: Tensor) -> None:
    """Add each edge's ends to int32 [N] counts. KernelError names the first edge with an id outside 0 .. N - 1."""
    _check_chunk("count_edges", src, dst)
    nodes = in_degree.numel()
    if native.serves(src, dst, op="ph_count_edges"):
        bad = native.call(
            "ph_count_edges", src, dst, native.id_code(src), src.numel(), nodes, in_degree, out_degree
        )
        _check_found("count_edges", bad, src, dst, nodes)
        return
    _check_ids("count_edges", src, dst, nodes)
    for ids, count in ((src, out_degree), (dst, in_degree)):
        count += torch.bincount(ids, minlength=nodes).to(torch.int32)


def bin_edges(
    key: Tensor, value: Tensor, bins: Bins, *, to: Tensor | None = None, weight: Tensor | None = None,
    dtype: torch.dtype = torch.int32, apart: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(place in its bin int32 [m], value of ``dtype`` [m], weight float32 [m], count of each bin int64 [B]), bin after bin.

    Records (key, value) go where the key lies, in their order within a bin. ``to`` (of ``dtype``) renames both ends first;
    ``apart`` leaves out records whose ends are then the same. KernelError names the first record with an id that is no
    place in ``to``, or in no bin.
    """
    _check_chunk("bin_edges", key, value)
    n, limit = key.numel(), int(bins.bounds[-1]) if to is None else to.numel()
    if not native.serves(key, value, weight, op="ph_bin_edges"):
        return _bin_reference(key, value, bins, to, weight, dtype, apart)
    out = torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=dtype)
    out_weight = None if weight is None else torch.empty(n, dtype=torch.float32)
    counts = torch.empty(len(bins), dtype=torch.int64)
    bad = native.call(
        "ph_bin_edges", key, value, native.id_code(key), weight, n, limit, to, int(apart), bins.bounds, len(bins),
        bins.hint, bins.shift, out[0], out[1], native.id_code(out[1]), out_weight, counts,
    )  # fmt: skip
    _check_found("bin_edges", bad, key, value, limit)
    kept = int(counts.sum())
    return out[0][:kept], out[1][:kept], None if out_weight is None else out_weight[:kept], counts


def group_edges(
    key: Tensor, value: Tensor | None, num_rows: int, weight: Tensor | None = None, *, dtype: torch.dtype = torch.int32
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(indptr int64 [R + 1], value [n], weight [n]): records grouped by key int32 [n], in their order within a row.

    ``value`` None = the record's own position, of ``dtype``.
    """
    n = key.numel()
    given = torch.empty(n, dtype=dtype if value is None else value.dtype)
    if native.serves(key, value, weight, op="ph_group_edges"):
        indptr = torch.empty(num_rows + 1, dtype=torch.int64)
        out_weight = None if weight is None else torch.empty(n, dtype=torch.float32)
        bad = native.call(
            "ph_group_edges",
            key,
            value,
            native.id_code(given),
            weight,
            n,
            num_rows,
            indptr,
            given,
            out_weight,
        )
        if bad >= 0:
            raise KernelError(
                f"group_edges: key[{bad}] = {int(key[bad])}, expected 0 .. {num_rows - 1} of {num_rows} rows"
            )
        return indptr, given, out_weight
    checks.bounds("group_edges", "key", key, num_rows)
    order = torch.sort(key, stable=True).indices
    indptr = torch.zeros(num_rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(key, minlength=num_rows), 0, out=indptr[1:])
    return (
        indptr,
        order.to(dtype) if value is None else value[order],
        None if weight is None else weight[order],
    )


def unique_lists(indptr: Tensor, values: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(indptr int64 [R + 1], values): each list ascending and without repeats, first + r left out of list r.

    The given tensors are the scratch: both change, and the values returned are a view of those given.
    """
    rows = indptr.numel() - 1
    if native.serves(indptr, values, op="ph_unique_lists"):
        kept = native.call("ph_unique_lists", indptr, values, native.id_code(values), rows, first)
        return indptr, values[:kept]
    lists = [torch.unique(values[indptr[r] : indptr[r + 1]]) for r in range(rows)]
    lists = [one[one != first + r] for r, one in enumerate(lists)]
    lengths = torch.tensor([0, *(one.numel() for one in lists)])
    return lengths.cumsum(0), torch.cat([values[:0], *lists])


def sum_lists(indptr: Tensor, values: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr int64 [R + 1], values int32 [m], float32 [m]): equal values of a list as one, where the first stood.

    ``weight`` float32 [n] (None = 1 each) is summed. The given tensors are the scratch, and what is returned views of them.
    """
    rows = indptr.numel() - 1
    if native.serves(indptr, values, weight, op="ph_sum_lists"):
        total = torch.empty(values.numel(), dtype=torch.float32) if weight is None else weight
        kept = native.call("ph_sum_lists", indptr, values, weight, rows, total)
        return indptr, values[:kept], total[:kept]
    pulls = [1.0] * values.numel() if weight is None else weight.tolist()
    lists: list[dict[int, float]] = [{} for _ in range(rows)]
    for r, found in enumerate(lists):
        for at in range(int(indptr[r]), int(indptr[r + 1])):
            found[int(values[at])] = found.get(int(values[at]), 0.0) + pulls[at]
    lengths = torch.tensor([0, *(len(one) for one in lists)])
    sums = [pull for one in lists for pull in one.values()]
    return (
        lengths.cumsum(0),
        torch.tensor([v for one in lists for v in one], dtype=values.dtype),
        torch.tensor(sums, dtype=torch.float32),
    )


def _bin_reference(
    key: Tensor, value: Tensor, bins: Bins, to: Tensor | None, weight: Tensor | None, dtype: torch.dtype, apart: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    _check_ids("bin_edges", key, value, int(bins.bounds[-1]) if to is None else to.numel())
    if to is not None:
        key, value = to[key.long()], to[value.long()]
    kept = (key != value).nonzero()[:, 0] if apart else torch.arange(key.numel())
    at = torch.searchsorted(bins.bounds[1:].contiguous(), key.long(), right=True)
    order = kept[torch.sort(at[kept], stable=True).indices]
    local = (key.long() - bins.bounds[at])[order].to(torch.int32)
    counts = torch.bincount(at[kept], minlength=len(bins))
    return local, value[order].to(dtype), None if weight is None else weight[order], counts


def _check_chunk(op: str, a: Tensor, b: Tensor) -> None:
    checks.vector(op, "the other end", b, a.numel())
    checks.require(
        a.dtype == b.dtype and a.dtype in (torch.int32, torch.int64) and a.is_contiguous() and b.is_contiguous(),
        f"{op}: ends must be contiguous, both int32 or both int64, got {a.dtype} and {b.dtype}",
    )  # fmt: skip


def _check_ids(op: str, a: Tensor, b: Tensor, nodes: int) -> None:
    bad = np.flatnonzero(((a < 0) | (a >= nodes) | (b < 0) | (b >= nodes)).numpy())
    _check_found(op, int(bad[0]) if bad.size else -1, a, b, nodes)


def _check_found(op: str, bad: int, a: Tensor, b: Tensor, nodes: int) -> None:
    if bad >= 0:
        raise KernelError(
            f"{op}: record {bad} is ({int(a[bad])}, {int(b[bad])}), expected ids in 0 .. {nodes - 1}"
        )
