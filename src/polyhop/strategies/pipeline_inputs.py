"""What enters a pipeline at its two ends: all input rows at the first stage (at all, where they make something of them),
labels of all train nodes at the last.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError
from polyhop.exchange import RowFetch
from polyhop.graph import Part, SparseFeatures, SparseRows
from polyhop.strategies.pipeline_chunks import Chunks
from polyhop.strategies.pipeline_stage import Target
from polyhop.strategies.step import Loss

__all__ = ["input_rows", "target_of"]


def input_rows(
    part: Part, line: Collective, fetch: RowFetch, order: Tensor, *, everywhere: bool = False
) -> Tensor | SparseRows | None:
    """On rank 0 (or ``everywhere``) the features of all nodes, in an order (int64 [N], new ids). All ranks call it together
    and give theirs.
    """
    is_wanted = everywhere or line.rank == 0
    start, stop, end = (int(part.bounds[at]) for at in (line.rank, line.rank + 1, -1))
    rest = torch.cat([torch.arange(start), torch.arange(stop, end)])
    fetched = fetch.fetch(line, rest if is_wanted else rest[:0]).x
    if not is_wanted:
        return None
    own = fetch.own(torch.arange(part.num_nodes))
    at = torch.empty(end, dtype=torch.int64)  # own rows first, then the others
    at[start:stop] = torch.arange(stop - start)
    at[rest] = torch.arange(stop - start, end)
    order = at[order]
    if isinstance(own, Tensor) and isinstance(fetched, Tensor):
        return torch.cat([own, fetched]).index_select(0, order)
    assert isinstance(own, SparseRows)
    assert isinstance(fetched, SparseRows)
    indptr = torch.cat([own.indptr, own.indptr[-1] + fetched.indptr[1:]])
    columns = torch.cat([own.indices.to(torch.int32), fetched.indices.to(torch.int32)])
    joined = SparseRows(indptr, columns, torch.cat([own.values, fetched.values]), own.num_columns)
    return SparseFeatures(joined).gather(order)


def target_of(
    part: Part,
    train_ids: Tensor,
    loss: tuple[Loss, int],
    chunks: Chunks,
    line: Collective,
    device: torch.device,
) -> Target | None:
    """On the last rank what is trained towards. ``train_ids``: local rows; ``loss``: its sum, and terms of a row."""
    assert part.y is not None, "the trainer checks that labels are there"
    last, everyone = line.num_ranks - 1, range(line.num_ranks)
    nodes, y = part.user_ids[train_ids].to(line.device), part.y[train_ids].to(line.device)
    ids = line.all_to_all([nodes if q == last else nodes[:0] for q in everyone], kind="ids")
    labels = line.all_to_all([y if q == last else y[:0] for q in everyone], kind="ids")
    own = torch.tensor([train_ids.numel()], device=line.device)
    count = int(torch.cat(line.all_gather(own, kind="sizes", counts=[1] * line.num_ranks)).sum())
    if count == 0:
        raise ConfigError(
            "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
        )
    if line.rank != last:
        return None
    place = torch.empty_like(chunks.ids)
    place[chunks.ids] = torch.arange(place.numel())
    rows, order = place[torch.cat(ids).cpu()].sort()
    found = torch.cat(labels).cpu()[order]
    starts = torch.tensor([0, *(chunk.stop for chunk in chunks.chunks)])
    cuts = list(pairwise(torch.searchsorted(rows, starts).tolist()))
    return Target(
        [(rows[a:b] - chunk.start).to(device) for (a, b), chunk in zip(cuts, chunks.chunks, strict=True)],
        [found[a:b].to(device) for a, b in cuts],
        loss[0],
        count * loss[1],
    )
