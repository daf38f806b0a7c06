"""The in-edges that given rows draw: one hop of sampling over a part of a graph, for whoever asks.

A row draws under the id it is given, not under its number, so a part draws what the whole graph would: for the same key and
the same in-edge lists, ``kernels/sample.py`` and this give the same edges bit for bit.

Legend: N rows of the graph, E edges, S sources, k rows that draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index

import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError, KernelError, unknown
from polyhop.kernels import checks, device, native, reference
from polyhop.kernels.variates import packed_keys

__all__ = ["draw"]

_ANY_ID = 1 << 62


def draw(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    fanout: int,
    key: int | Sequence[int],
    *,
    ids: Tensor,
    source_ids: Tensor | None = None,
    method: str = "uniform",
    cuts: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(ends int64 [k + 1], position int64 [ends[k]]): row i draws indices[position[ends[i] : ends[i + 1]]], ascending.

    indptr int64 [N + 1], indices int32 or int64 [E]: in-edges in CSC. ``rows`` int64 [k], in any order, repeats allowed;
    ``fanout`` at least 1, or -1 for all; ``key`` 64 bits, or ``Variates``. ``ids`` int64 [N] keys the draw of each
    row: the node's id in the whole graph. For ``labor``, ``source_ids`` int64 [S] is the same for the sources that indices
    name (None: indices are such ids). A row outside 0 .. N-1 is an InputError naming its position. With several keys, rows
    cuts[m] .. cuts[m + 1] - 1 draw under key[m].
    """
    fanout = _check(indptr, indices, rows, fanout, ids, source_ids, method)
    keys, cuts = _segments(key, cuts, rows.numel())
    given = (indptr, indices, rows, ids, source_ids)
    if device.serves(*given) or not native.serves(*given, op="ph_draw_rows"):
        num_rows = indptr.numel() - 1
        bad = ((rows < 0) | (rows >= num_rows)).nonzero()
        if bad.numel():
            raise _outside(rows, int(bad[0]), num_rows)
        drawn = [
            _draw_plain(indptr, indices, some, fanout, each, ids[some], source_ids, method)
            for each, some in zip(keys, torch.split(rows, [b - a for a, b in pairwise(cuts)]), strict=True)
        ]
        counts = torch.cat([rows.new_zeros(1), *(ends.diff() for ends, _ in drawn)])
        return counts.cumsum(0), torch.cat([position for _, position in drawn])
    return _draw_native(
        indptr.contiguous(), indices.contiguous(), rows.contiguous(), fanout, keys, cuts, ids.contiguous(),
        None if source_ids is None else source_ids.contiguous(), reference.DRAW_METHODS.index(method),
    )  # fmt: skip


def _segments(
    key: int | Sequence[int], cuts: Sequence[int] | None, num_rows: int
) -> tuple[Sequence[int], Sequence[int]]:
    if isinstance(key, int):
        return [key], [0, num_rows]
    is_cut = cuts is not None and len(cuts) == len(key) + 1 and cuts[0] == 0 and cuts[-1] == num_rows
    if cuts is None or not is_cut or any(b < a for a, b in pairwise(cuts)):
        raise InputError(
            f"draw: {len(key)} keys need ascending cuts of {num_rows} rows, from 0: one more than keys"
        )
    return key, cuts


def _draw_plain(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    fanout: int,
    key: int,
    ids: Tensor,
    source_ids: Tensor | None,
    method: str,
) -> tuple[Tensor, Tensor]:
    """By the Triton kernel where there is one: uniform draws of some edges on a CUDA device. Else in plain torch."""
    if method == "uniform" and fanout > 0 and device.serves(indptr, rows, ids):
        from polyhop.kernels.triton import sample

        if fanout <= sample.MOST:
            return sample.draw(indptr.contiguous(), rows.contiguous(), fanout, key, ids.contiguous())
    return reference.draw(indptr, indices, rows, fanout, key, ids=ids, source_ids=source_ids, method=method)


def _draw_native(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    fanout: int,
    keys: Sequence[int],
    cuts: Sequence[int],
    ids: Tensor,
    source_ids: Tensor | None,
    method: int,
) -> tuple[Tensor, Tensor]:
    num_rows, k, threads = indptr.numel() - 1, rows.numel(), native.num_threads()
    ends = torch.empty(k + 1, dtype=torch.int64)
    bad = native.call("ph_draw_ends", indptr, num_rows, rows, k, fanout, ends, threads)
    if bad >= 0:
        raise _outside(rows, bad, num_rows)
    position = torch.empty(int(ends[k]), dtype=torch.int64)
    status = native.call(
        "ph_draw_rows", indptr, indices, native.id_code(indices), indices.numel(), rows, ends, fanout,
        packed_keys(keys), torch.tensor(cuts), len(keys), method, ids, source_ids, position, threads,
    )  # fmt: skip
    if status < 0:
        raise KernelError(
            f"draw: out of memory for {k} rows that draw {position.numel()} edges; ask for fewer"
        )
    return ends, position


def _check(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    fanout: int,
    ids: Tensor,
    source_ids: Tensor | None,
    method: str,
) -> int:
    """The fan-out as a whole number; ConfigError or InputError where an argument is wrong."""
    checks.csr("draw", indptr, indices, _ANY_ID if source_ids is None else source_ids.numel())
    for name, given in (("rows", rows), ("ids", ids), ("source_ids", source_ids)):
        checks.require(
            given is None or (given.dim() == 1 and given.dtype == torch.int64),
            f"draw: {name} must be int64 [n], got {None if given is None else (given.dtype, list(given.shape))}",
        )
    checks.vector("draw", "ids", ids, indptr.numel() - 1)
    checks.same_device("draw", indptr=indptr, indices=indices, rows=rows, ids=ids, source_ids=source_ids)
    if method not in reference.DRAW_METHODS:
        raise ConfigError(unknown("sampling method", method, reference.DRAW_METHODS))
    if not hasattr(fanout, "__index__") or (fanout < 1 and fanout != -1):
        raise ConfigError(f"draw: fanout = {fanout!r}, expected a whole number of at least 1, or -1 for all")
    return index(fanout)


def _outside(rows: Tensor, at: int, num_rows: int) -> InputError:
    return InputError(
        f"draw: rows[{at}] = {int(rows[at])}, outside the {num_rows} rows (0 .. {num_rows - 1})"
    )
