"""Mini-batches of a partitioned graph: sampled by the owners, rows fetched from them, ahead of training.

All ranks shuffle one global list of training nodes, a pure function of (seed, epoch), and cut it into the same global
batches; each rank's mini-batch is what it owns of them. So the global batch of a step is that of a single process. One
thread per rank works ahead, on a line of its own: its exchanges overlap the step before.

Legend: T training nodes of all ranks, B seeds of a rank's mini-batch, S its input nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.comm.collective import slices
from polyhop.errors import ConfigError
from polyhop.exchange.features import NodeFacts, RowFetch
from polyhop.graph import Block, PooledRows, SparseRows
from polyhop.kernels import Key, Purpose, random_u32
from polyhop.sample import MiniBatch
from polyhop.sample.ahead import ahead
from polyhop.sample.part import Drawn, PartSampler
from polyhop.trace import NO_TRACE, Trace

__all__ = ["PartBatch", "PartLoader", "Seeds", "blocks_of"]


@dataclass(frozen=True, eq=False)
class PartBatch:
    """What one rank trains in one step."""

    batch: MiniBatch  # by the user's ids; its seeds may be none
    x: Tensor | SparseRows | PooledRows  # [S, F], or what the first block's ``rows`` point into
    y: Tensor  # labels of the seeds
    num_global: int  # seeds of all ranks in this step


class Seeds:
    """The training nodes of all ranks, in the order of an epoch. Made by all ranks together (ids are exchanged).

    Where several groups of ranks hold the whole graph each, ``group`` (of how many) takes its slice of every global batch.
    """

    def __init__(
        self,
        user_ids: Tensor,
        new_ids: Tensor,
        line: Collective,
        *,
        seed: int,
        batch_size: int,
        group: tuple[int, int] = (0, 1),
    ) -> None:
        counts = [
            int(n)
            for n in line.all_gather(
                torch.tensor([user_ids.numel()]), kind="sizes", counts=[1] * line.num_ranks
            )
        ]
        everyone = torch.cat(line.all_gather(user_ids, kind="ids", counts=counts))
        theirs = torch.cat(line.all_gather(new_ids, kind="ids", counts=counts))
        order = torch.sort(everyone, stable=True).indices
        owner = torch.repeat_interleave(torch.arange(line.num_ranks), torch.tensor(counts))
        self._user_ids, self._new_ids = everyone[order], theirs[order]
        self._is_own = owner[order] == line.rank
        self.seed, self.batch_size = seed, batch_size
        self._group, self.num_groups = group

    def __len__(self) -> int:
        return self._user_ids.numel()

    @property
    def num_steps(self) -> int:
        return -(-len(self) // self.batch_size)

    def own(self, epoch: int) -> list[Tensor]:
        """int64 [B] for each step: the new ids of this rank's seeds, in the order of the global batch."""
        words = random_u32(Key(self.seed, epoch).at(Purpose.SHUFFLE), self._user_ids)
        order = torch.sort(words[:, 0] << 31 | words[:, 1] >> 1, stable=True).indices
        new_ids, is_own = self._new_ids[order], self._is_own[order]
        bounds = [self._slice(step) for step in range(self.num_steps)]
        return [new_ids[start:stop][is_own[start:stop]] for start, stop in bounds]

    def _slice(self, step: int) -> tuple[int, int]:
        """What the group takes of a step, in the order of the epoch."""
        start, cuts = step * self.batch_size, slices(self.count(step), self.num_groups)
        return start + cuts[self._group], start + cuts[self._group + 1]

    def count(self, step: int) -> int:
        """Seeds of all ranks in a step."""
        return min(self.batch_size, len(self) - step * self.batch_size)


class PartLoader:
    """The mini-batches of one rank, epoch by epoch."""

    def __init__(
        self,
        line: Collective,
        sampler: PartSampler,
        fetch: RowFetch,
        seeds: Seeds,
        *,
        prefetch: int = 2,
        trace: Trace = NO_TRACE,
    ) -> None:
        part = sampler.part
        if part.y is None:
            raise ConfigError("the graph has no labels: training needs y")
        self.line, self.sampler, self.fetch, self.seeds = line, sampler, fetch, seeds
        self.prefetch, self.trace = prefetch, trace
        self._y, self._start = part.y, part.start

    def __len__(self) -> int:
        return self.seeds.num_steps

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[PartBatch]:
        """The mini-batches from ``start_step`` on, in step order; all ranks take them together."""
        own = self.seeds.own(epoch)

        def load(step: int) -> PartBatch:
            return self._load(own[step], epoch, step)

        steps = range(start_step, len(self))
        if self.prefetch == 0:
            return map(load, steps)
        # What one rank has begun all finish, or the others would wait for it: close only when it is done.
        return ahead(load, steps, 1, self.prefetch, finish_begun=True)

    def _load(self, seeds: Tensor, epoch: int, step: int) -> PartBatch:
        with self.trace.span("sample", epoch=epoch, step=step):
            drawn = self.sampler.sample(self.line, seeds, epoch, step)
        with self.trace.span("load", epoch=epoch, step=step):
            fetched = self.fetch.fetch(self.line, drawn.ids)
            facts = fetched.facts
            blocks = blocks_of(drawn, facts)
            batch = MiniBatch(step, facts.user_ids[: seeds.numel()], blocks)
            return PartBatch(batch, fetched.x, self._y[seeds - self._start], self.seeds.count(step))


def blocks_of(drawn: Drawn, facts: NodeFacts, rows: Tensor | None = None) -> tuple[Block, ...]:
    """The drawn layers as Blocks, input layer first; ``facts`` of the input nodes, ``rows`` of theirs in a pool."""
    blocks = []
    for i, layer in enumerate(drawn.layers):
        known = facts.between(0, layer.num_src)
        blocks.append(
            Block(
                layer.indptr,
                layer.indices,
                layer.num_src,
                src_ids=known.user_ids,
                edge_weight=layer.edge_weight,
                in_degree=known.in_degree,
                in_weight=known.in_weight,
                loop_weight=known.loop_weight,
                rows=rows if i == 0 else None,
                is_sampled=layer.is_sampled,
            )
        )
    return tuple(blocks)
