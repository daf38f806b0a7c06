"""NeighborLoader: mini-batches sampled and gathered ahead of training, by threads that run native code.

Threads suffice because the native calls release the GIL; results come in step order and do not depend on how many threads
there are. At most ``prefetch`` mini-batches exist beside the one in use.

With ``device``, mini-batches come on that device, ready for what the caller launches there: of a graph that lies there they
are drawn and gathered by it, of others copied to it, on a stream of their own while the step before is computed.

Legend: N nodes, B seeds of a step, S input nodes of a mini-batch, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError
from polyhop.graph.block import Block
from polyhop.graph.features import DenseFeatures, FeatureStore, SparseRows
from polyhop.graph.graph import Graph
from polyhop.kernels import Key, Purpose, gather_rows, random_u32
from polyhop.sample.ahead import ahead
from polyhop.sample.batch import MiniBatch
from polyhop.sample.lane import Lane
from polyhop.sample.neighbour import NeighbourSampler
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Loaded", "NeighborLoader"]

T = TypeVar("T")
R = TypeVar("R", Block, SparseRows)


@dataclass(frozen=True, eq=False)
class Loaded:
    """A mini-batch with what its step reads."""

    batch: MiniBatch
    x: (
        Tensor | SparseRows | None
    )  # float [S, F]: rows of batch.input_ids, or the pool [N, F] (in_place); None without features or with gather=False
    y: Tensor | None  # int64 [B], or float32 [B, C] for multi-label: labels of batch.seeds


class NeighborLoader:
    """Mini-batches of ``input_nodes`` (ids, or a mask [N]; None = the training nodes, or all where there is no split).

    ``num_neighbors``: fan-outs from the seeds outward, -1 = all. The order of an epoch is a pure function of (seed, epoch),
    its mini-batches of (seed, epoch, step). ``num_workers`` threads work ahead; 0 works inside the caller's ``next``.
    ``device``: where mini-batches are wanted; None = where the graph is, which may be a device.
    ``in_place``: where the features are one float matrix in memory, x is that matrix and the first block's ``rows`` say
    which rows its sources are, so that the first layer reads them where they lie; elsewhere rows are gathered as usual.
    ``transposes``: also group the edges of all blocks but the first by source, as backward passes read them, ahead.
    """

    def __init__(
        self,
        graph: Graph,
        num_neighbors: Sequence[int],
        input_nodes: Tensor | None = None,
        batch_size: int = 1024,
        shuffle: bool = True,
        *,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 1,
        prefetch: int = 2,
        gather: bool = True,
        in_place: bool = False,
        method: str = "uniform",
        dependence: int = 1,
        device: torch.device | None = None,
        transposes: bool = False,
        trace: Trace = NO_TRACE,
    ) -> None:
        _at_least("batch_size", batch_size, 1)
        _at_least("num_workers", num_workers, 0)
        _at_least("prefetch", prefetch, 1)
        self.graph, self.batch_size, self.shuffle, self.seed = graph, batch_size, shuffle, seed
        self.drop_last, self.num_workers, self.prefetch, self.gather = (
            drop_last,
            num_workers,
            prefetch,
            gather,
        )
        self.pool = _pool(graph) if in_place else None
        self.sampler = NeighbourSampler(graph, num_neighbors, seed=seed, method=method, dependence=dependence)
        self.input_nodes = _input_nodes(graph, input_nodes).to(graph.indptr.device)
        self.trace = trace
        self.transposes = transposes
        self._lane = None if device is None else Lane(device, prefetch + 1)
        x = graph.x
        if isinstance(x, DenseFeatures) and device is not None and x.num_rows < graph.num_nodes:
            raise InputError(
                f"graph {graph.name!r} has {graph.num_nodes} nodes, ids of which are outside the {x.num_rows} stored rows"
            )

    def __len__(self) -> int:
        """Steps of one epoch."""
        nodes, size = self.input_nodes.numel(), self.batch_size
        return nodes // size if self.drop_last else (nodes + size - 1) // size

    def order(self, epoch: int) -> Tensor:
        """int64: the input nodes in the order of this epoch."""
        if not self.shuffle:
            return self.input_nodes
        words = random_u32(Key(self.seed, epoch).at(Purpose.SHUFFLE), self.input_nodes)
        rank = words[:, 0] << 31 | words[:, 1] >> 1  # 63 random bits
        return self.input_nodes[torch.sort(rank, stable=True).indices]

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Loaded]:
        """The mini-batches of one epoch from ``start_step`` on, in step order."""
        if not 0 <= start_step <= len(self):
            raise ConfigError(f"start_step = {start_step}: this epoch has steps 0 .. {len(self) - 1}")
        order = self.order(epoch)

        def load(step: int) -> Loaded:
            return self._load(order[step * self.batch_size : (step + 1) * self.batch_size], epoch, step)

        steps = range(start_step, len(self))
        if self._lane is not None:
            return self._handed_over(load, steps, self._lane, order)
        return self._ahead(load, steps)

    def _ahead(self, load: Callable[[int], T], steps: range) -> Iterator[T]:
        if self.num_workers == 0:
            return map(load, steps)
        return ahead(load, steps, self.num_workers, self.prefetch)

    def _handed_over(
        self, load: Callable[[int], Loaded], steps: range, lane: Lane, order: Tensor
    ) -> Iterator[Loaded]:
        """The same, made beside what the caller launches."""
        lane.follow()
        lane.reads(order)

        def launched(step: int) -> tuple[Loaded, Any]:
            lane.keep_step()
            with lane.work():
                made = _brought(load(step), lane.device)
                if self.transposes:
                    for block in made.batch.blocks[1:]:
                        block.transposed()
                return made, lane.mark()

        with closing(_closable(self._ahead(launched, steps))) as source:
            for made, mark in source:
                lane.hand_over(mark, _tensors(made))
                yield made

    def _load(self, seeds: Tensor, epoch: int, step: int) -> Loaded:
        with self.trace.span("sample", epoch=epoch, step=step):
            batch = self.sampler.sample(seeds, epoch, step, are_checked=True)
        with self.trace.span("load", epoch=epoch, step=step):
            graph = self.graph
            x: Tensor | SparseRows | None = self.pool
            if x is not None:
                batch = batch.from_pool()
            elif self.gather and graph.x is not None:
                x = self._gathered(graph.x, batch.input_ids)
            if graph.y is None:
                return Loaded(batch, x, None)
            is_matrix = graph.y.dim() == 2 and graph.y.is_floating_point()
            y = gather_rows(graph.y, seeds, are_checked=True) if is_matrix else graph.y[seeds]
            return Loaded(batch, x, y)

    def _gathered(self, x: FeatureStore, ids: Tensor) -> Tensor | SparseRows:
        if (
            isinstance(x, DenseFeatures) and self._lane is not None
        ):  # the ids are good, and a device is not waited for
            return gather_rows(x.values, ids, scale=x.scale, are_checked=True)
        return x.gather(ids)


def _pool(graph: Graph) -> Tensor | None:
    """The features as a pool that a first layer can read: float32 or float64, unscaled, in memory."""
    x = graph.x
    if not isinstance(x, DenseFeatures) or x.scale is not None or x.is_mapped:
        return None
    return x.values if x.values.dtype in (torch.float32, torch.float64) else None


def _brought(loaded: Loaded, device: torch.device) -> Loaded:
    """The same on a device, by copies that nobody waits for."""

    def brought(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    batch = loaded.batch
    blocks = tuple(_each(block, brought) for block in batch.blocks)
    x = loaded.x
    if x is not None:
        x = brought(x) if isinstance(x, Tensor) else _each(x, brought)
    y = None if loaded.y is None else brought(loaded.y)
    return Loaded(MiniBatch(batch.step, brought(batch.seeds), blocks), x, y)


def _each(record: R, brought: Callable[[Tensor], Tensor]) -> R:
    """A record (Block, SparseRows) of other tensors; itself, and what it keeps, if they are the same."""
    given = {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}
    moved: dict[str, Any] = {name: brought(value) for name, value in given.items()}
    if all(moved[name] is given[name] for name in given):
        return record
    return replace(record, **moved, _cache={})


def _tensors(loaded: Loaded) -> Iterator[Tensor]:
    turned = (block._cache.get("t") for block in loaded.batch.blocks)
    for record in (*loaded.batch.blocks, *turned, loaded.batch, loaded, loaded.x):
        yield from (value for value in getattr(record, "__dict__", {}).values() if isinstance(value, Tensor))


def _closable(source: Iterator[T]) -> Any:
    """The iterator, with a ``close`` even if it has none."""
    return source if hasattr(source, "close") else (each for each in source)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value}: expected a whole number of at least {least}")


def _input_nodes(graph: Graph, given: Tensor | None) -> Tensor:
    """int64 ids, checked."""
    if given is None:
        given = torch.arange(graph.num_nodes) if graph.split is None else graph.split.train
    if given.dtype == torch.bool:
        if list(given.shape) != [graph.num_nodes]:
            raise InputError(f"input_nodes mask: expected [{graph.num_nodes}], got {list(given.shape)}")
        given = given.nonzero()[:, 0]
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"input_nodes: expected ids [n] or a mask [N], got {given.dtype} {list(given.shape)}"
        )
    if given.numel() == 0:
        raise InputError("input_nodes is empty: there is nothing to load")
    given = given.long().contiguous()
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= graph.num_nodes:
        wrong = low if low < 0 else high
        raise InputError(f"input_nodes holds {wrong}: this graph has nodes 0 .. {graph.num_nodes - 1}")
    if torch.unique(given).numel() != given.numel():
        raise InputError("input_nodes holds a node twice: give each id once")
    return given
