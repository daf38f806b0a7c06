"""Sampled neighbourhoods: seeds to one Block per layer, a pure function of (seed, epoch, step, hop, node).

Legend: N nodes, B seeds, S sources, E edges of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from polyhop.errors import ConfigError, unknown
from polyhop.graph.block import Block
from polyhop.graph.graph import Graph
from polyhop.kernels import Key, gather_rows
from polyhop.kernels.sample import METHODS, Sampled, Sampler, check_fanouts
from polyhop.kernels.variates import check_dependence, sample_key
from polyhop.sample.batch import MiniBatch

__all__ = ["NeighbourSampler"]


class NeighbourSampler:
    """Draws in-edges without replacement, layer by layer from the seeds outward.

    ``num_neighbors`` has one fan-out per layer, from the seeds outward; -1 takes all. ``uniform`` draws every subset with
    the same probability; ``labor`` (LABOR-0) lets the nodes of a layer share their draws, so that they reach fewer
    distinct sources. ``dependence``: steps over which the draws of ``labor`` turn from one to the next, so that mini-batches
    that follow each other reach much the same nodes (1: each draws anew). Safe to call from several threads: each running
    call has a native sampler of its own.
    """

    def __init__(
        self,
        graph: Graph,
        num_neighbors: Sequence[int],
        *,
        seed: int = 0,
        method: str = "uniform",
        dependence: int = 1,
    ) -> None:
        if method not in METHODS:
            raise ConfigError(unknown("sampling method", method, METHODS))
        self.graph, self.seed, self.method = graph, seed, method
        self.dependence = check_dependence(dependence, method)
        self.num_neighbors = check_fanouts(num_neighbors)
        self._in_weight, self._loop_weight = graph.in_weight, graph.loop_weight
        self._idle: deque[Sampler] = deque()

    def sample(self, seeds: Tensor, epoch: int, step: int, *, are_checked: bool = False) -> MiniBatch:
        """The mini-batch of distinct ``seeds`` (int64 [B]) at this epoch and step; ``are_checked``: they are known to be."""
        key = Key(self.seed, epoch, step)
        keys = [sample_key(key, hop, self.dependence) for hop in range(len(self.num_neighbors))]
        sampler = self._take()
        drawn = sampler.sample(seeds, self.num_neighbors, keys, method=self.method, are_checked=are_checked)
        self._idle.append(sampler)
        return MiniBatch(step, seeds, tuple(reversed(self._blocks(drawn))))

    def _take(self) -> Sampler:
        """A sampler that no other thread uses."""
        try:
            return self._idle.pop()
        except IndexError:
            graph = self.graph
            return Sampler(graph.indptr, graph.indices, keep_edges=graph.edge_weight is not None)

    def _blocks(self, drawn: Sampled) -> list[Block]:
        in_weight = _values(self._in_weight, drawn.src_ids)
        loop_weight = _values(self._loop_weight, drawn.src_ids)
        return [
            Block(
                layer.indptr,
                layer.indices,
                layer.num_src,
                src_ids=drawn.src_ids[: layer.num_src],
                edge_weight=None if layer.edge is None else _values(self.graph.edge_weight, layer.edge),
                in_degree=drawn.in_degree[: layer.num_src],
                in_weight=None if in_weight is None else in_weight[: layer.num_src],
                loop_weight=None if loop_weight is None else loop_weight[: layer.num_src],
                is_sampled=fanout > 0,
            )
            for layer, fanout in zip(drawn.layers, self.num_neighbors, strict=True)
        ]


def _values(values: Tensor | None, at: Tensor) -> Tensor | None:
    """values[at], by the row gather: torch's own would start threads beside the loader's."""
    return None if values is None else gather_rows(values.view(-1, 1), at, are_checked=True).view(-1)
