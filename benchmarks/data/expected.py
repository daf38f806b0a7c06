"""What the sides should have sent: accounted from mini-batches drawn by one process, and estimated before any was drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.data.workload import FAN_OUTS, SEED, SIDES, model_of
from polyhop.comm import Cost
from polyhop.exchange import RowFormat, bucket_sizes
from polyhop.graph import Graph, Part
from polyhop.partition import Partition
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import Facts, account, account_gradients, estimate

__all__ = ["Expected", "apart"]


class Expected:
    """For one graph cut into parts. ``cached``: new ids that each rank's cache holds, where a side has one."""

    def __init__(
        self, graph: Graph, made: Partition, part: Part, batch_size: int, cached: Sequence[Tensor]
    ) -> None:
        assert graph.split is not None
        self.graph, self.made, self.cached, self.batch_size = graph, made, cached, batch_size
        self.train = graph.split.train
        self.num_steps = -(-self.train.numel() // batch_size)
        self.bucket_sizes = bucket_sizes(list(model_of(graph.num_features, graph.num_classes).parameters()))
        plain = {side: bool(options.get("per_minibatch_rpc")) for side, options in SIDES.items()}
        self.wires = {side: Wire(graph.num_nodes, is_plain=plain[side]) for side in SIDES}
        self.layouts = {
            side: RowFormat.of(
                part,
                graph.num_nodes,
                "float32" if plain[side] else options.get("feature_dtype", "auto"),
                is_plain=plain[side],
            )
            for side, options in SIDES.items()
        }

    def accounted(self, epoch: int) -> dict[str, list[Cost]]:
        """Side -> what each rank sends in that epoch, to the byte."""
        ranks = range(self.made.num_parts)
        gradients = [account_gradients(self.bucket_sizes, 4, len(ranks), rank) for rank in ranks]
        totals = {side: [Cost() for _ in ranks] for side in SIDES}
        for step in range(self.num_steps):
            batches = self._batches(epoch, step)
            for side, found in totals.items():
                for rank in ranks:
                    found[rank] += self._account(side, batches, rank) + gradients[rank]
        return totals

    def _account(self, side: str, batches: Sequence[MiniBatch], rank: int) -> Cost:
        made, cached = self.made, self.cached if "cache" in SIDES[side] else None
        wire, layout = self.wires[side], self.layouts[side]
        return account(batches, made.new_ids, made.bounds, wire, layout, FAN_OUTS, rank, cached=cached)

    def _batches(self, epoch: int, step: int) -> list[MiniBatch]:
        """Every rank's mini-batch of a step, drawn from the whole graph."""
        loader = NeighborLoader(self.graph, FAN_OUTS, self.train, self.batch_size, seed=SEED)
        seeds = loader.order(epoch)[step * self.batch_size : (step + 1) * self.batch_size]
        sampler = NeighbourSampler(self.graph, FAN_OUTS, seed=SEED)
        owner = self.made.owner[seeds]
        return [sampler.sample(seeds[owner == rank], epoch, step) for rank in range(self.made.num_parts)]

    def estimated(self) -> dict[str, list[Cost]]:
        """Side -> what each rank is expected to send in an epoch, from inclusion probabilities alone."""
        made, num_ranks = self.made, self.made.num_parts
        start = torch.zeros(self.graph.num_nodes, num_ranks, dtype=torch.float64)
        start[self.train, made.owner[self.train].long()] = self.batch_size / self.train.numel()
        # Every edge of the generated graph has its reverse.
        hops = inclusion(full_block(self.graph), start, FAN_OUTS, is_symmetric=True)
        kept = [torch.zeros(self.graph.num_nodes, dtype=torch.bool) for _ in range(num_ranks)]
        for mask, ids in zip(kept, self.cached, strict=True):
            mask[made.user_ids[ids]] = True
        facts = Facts(
            made.owner.long(),
            [[hop[:, rank].contiguous() for hop in hops] for rank in range(num_ranks)],
            self.graph.in_degree,
            FAN_OUTS,
            self.wires["data"],
            self.layouts["data"],
            self.bucket_sizes,
        )
        found = {}
        for side, options in SIDES.items():
            cached = kept if "cache" in options else None
            of_side = replace(facts, wire=self.wires[side], layout=self.layouts[side], cached=cached)
            found[side] = [estimate(of_side, rank) * self.num_steps for rank in range(num_ranks)]
        return found


def apart(expected: Mapping[str, float], counted: Mapping[str, float]) -> tuple[float, str]:
    """The largest ratio of the two, either way up, over all kinds; and its kind."""
    found = [(1.0, "all")]
    for kind in {*expected, *counted}:
        a, b = expected.get(kind, 0), counted.get(kind, 0)
        found.append((max(a / b, b / a) if a and b else float("inf"), kind))
    return max(found)
