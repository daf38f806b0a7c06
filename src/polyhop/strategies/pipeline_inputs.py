"""What enters a pipeline at its two ends: input rows at the first stage (at all, where they make something of them), labels
of train nodes at the last; of all nodes, or at each rank of several those of its way."""

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
    part: Part, line: Collective, fetch: RowFetch, order: Tensor | None
) -> Tensor | SparseRows | None:
    """The features of some nodes, in an order (int64, new ids); None: of no nodes. All ranks call it together."""
    first, stop = part.bounds[line.rank], part.bounds[line.rank + 1]
    wanted = torch.empty(0, dtype=torch.int64) if order is None else order
    is_own = (wanted >= first) & (wanted < stop)
    fetched = fetch.fetch(line, wanted[~is_own]).x
    if order is None:
        return None
    own = fetch.own(wanted[is_own] - first)
    place = torch.empty_like(wanted)
    place[torch.cat([is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]])] = torch.arange(wanted.numel())
    if isinstance(own, Tensor) and isinstance(fetched, Tensor):
        return torch.cat([own, fetched]).index_select(0, place)
    assert isinstance(own, SparseRows)
    assert isinstance(fetched, SparseRows)
    indptr = torch.cat([own.indptr, own.indptr[-1] + fetched.indptr[1:]])
    columns = torch.cat([own.indices.to(torch.int32), fetched.indices.to(torch.int32)])
    joined = SparseRows(indptr, columns, torch.cat([own.values, fetched.values]), own.num_columns)
    return SparseFeatures(joined).gather(place)


def target_of(
    part: Part,
    train_ids: Tensor,
    loss: tuple[Loss, int],
    chunks: Chunks,
    judges: Tensor,
    line: Collective,
    device: torch.device,
) -> Target | None:
    """On ranks of the last stage what is trained towards. ``train_ids``: local rows; ``loss``: its sum, and terms of a row.

    ``judges`` int64 [N]: the rank of the last stage that has a node, by the user's ids.
    """
    assert part.y is not None, "the trainer checks that labels are there"
    nodes, y = part.user_ids[train_ids], part.y[train_ids]
    sent = [judges[nodes] == q for q in range(line.num_ranks)]
    ids = line.all_to_all([nodes[each].to(line.device) for each in sent], kind="ids")
    labels = line.all_to_all([y[each].to(line.device) for each in sent], kind="ids")
    own = torch.tensor([train_ids.numel()], device=line.device)
    count = int(torch.cat(line.all_gather(own, kind="sizes", counts=[1] * line.num_ranks)).sum())
    if count == 0:
        raise ConfigError(
            "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
        )
    if not bool((judges == line.rank).any()):
        return None
    place = torch.empty_like(judges)
    num_own = chunks.num_own
    place[chunks.ids[:num_own]] = torch.arange(num_own)
    rows, order = place[torch.cat(ids).cpu()].sort()
    found = torch.cat(labels).cpu()[order]
    starts = torch.tensor([0, *(chunk.stop for chunk in chunks.chunks)])
    cuts = list(zip(chunks.numbers, pairwise(torch.searchsorted(rows, starts).tolist()), strict=True))
    return Target(
        {number: (rows[a:b] - chunks[number].start).to(device) for number, (a, b) in cuts},
        {number: found[a:b].to(device) for number, (a, b) in cuts},
        loss[0],
        count * loss[1],
    )
