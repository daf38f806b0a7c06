"""Nodes of several mini-batches by who owns them, as they are asked for: a part of a graph is a range of ids.

Legend: n nodes, k mini-batches, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhop.errors import InputError, KernelError
from polyhop.kernels import checks, native

__all__ = ["by_owner"]


def by_owner(
    ids: Tensor, cuts: Sequence[int], bounds: Tensor, own: int, *, is_sorted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(order int64 [n], rows int64 [n], counts int64 [P, k]) of mini-batches ids[cuts[m] : cuts[m + 1]], int64 [n].

    ids[order] are by owner (part q owns bounds[q] .. bounds[q + 1] - 1, bounds int64 [P + 1]), then by mini-batch, then
    ascending if ``is_sorted``, else as they came. In that order ``rows`` are row numbers within the owner; for owners other
    than ``own`` those of mini-batch m are shifted by m * (nodes of the owner), so that one list tells them apart.
    """
    checks.require(
        ids.dim() == 1 and ids.dtype == bounds.dtype == torch.int64,
        f"by_owner: ids and bounds must be int64 [n], got {ids.dtype} {list(ids.shape)} and {bounds.dtype}",
    )
    checks.require(
        len(cuts) > 1 and cuts[0] == 0 and cuts[-1] == ids.numel() and list(cuts) == sorted(cuts),
        f"by_owner: cuts must ascend from 0 to the {ids.numel()} ids, got {list(cuts)}",
    )
    if not native.serves(ids, bounds, op="ph_by_owner"):
        return _reference(ids, cuts, bounds, own, is_sorted)
    num_parts, num_batches = bounds.numel() - 1, len(cuts) - 1
    order, rows = torch.empty_like(ids), torch.empty_like(ids)
    counts = torch.empty(num_parts, num_batches, dtype=torch.int64)
    bad = native.call(
        "ph_by_owner", ids.contiguous(), torch.tensor(cuts), num_batches, bounds.contiguous(), num_parts, own,
        int(is_sorted), order, rows, counts,
    )  # fmt: skip
    if bad >= 0:
        raise _outside(ids, bad, bounds)
    if bad < -1:
        raise KernelError(f"by_owner: out of memory for {ids.numel()} ids; use smaller windows")
    return order, rows, counts


def _reference(
    ids: Tensor, cuts: Sequence[int], bounds: Tensor, own: int, is_sorted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    bad = ((ids < bounds[0]) | (ids >= bounds[-1])).nonzero()
    if bad.numel():
        raise _outside(ids, int(bad[0]), bounds)
    num_parts, num_batches = bounds.numel() - 1, len(cuts) - 1
    sizes = torch.tensor(cuts, device=ids.device).diff()
    batch = torch.repeat_interleave(torch.arange(num_batches, device=ids.device), sizes)
    order = (
        torch.sort(ids, stable=True).indices if is_sorted else torch.arange(ids.numel(), device=ids.device)
    )
    owner = torch.searchsorted(bounds[1:], ids, right=True)
    place = owner * num_batches + batch
    order = order[torch.sort(place[order], stable=True).indices]
    shift = torch.where(owner == own, 0, batch * bounds.diff()[owner])
    counts = torch.bincount(place, minlength=num_parts * num_batches).view(num_parts, num_batches)
    return order, (ids - bounds[owner] + shift)[order], counts


def _outside(ids: Tensor, at: int, bounds: Tensor) -> InputError:
    return InputError(
        f"by_owner: ids[{at}] = {int(ids[at])}, outside {int(bounds[0])} .. {int(bounds[-1]) - 1}: no part owns it"
    )
