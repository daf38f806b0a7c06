"""What every strategy offers the training loop, and how a model is called: the ground of this folder.

A strategy turns (model, graph) into a ``Step``. The loop asks it for the batches of an epoch and for the gradient of each;
optimiser, schedule, evaluation and checkpoints are the loop's. So a strategy file holds only what it distributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast, overload

import torch
from torch import Tensor, nn

from polyhop.comm import Collective, GroupLine, TieredLine, group_size
from polyhop.errors import ConfigError, UnsupportedError, unknown
from polyhop.graph import Block, FeatureStore, Graph, PooledRows, SparseRows
from polyhop.kernels.keys import Key
from polyhop.nn.layer import Layer
from polyhop.nn.model import Model
from polyhop.nn.rows import Rows, gathered
from polyhop.sample import full_block

__all__ = [
    "Forward",
    "LayeredModel",
    "Loss",
    "Placement",
    "Step",
    "Team",
    "WholeGraph",
    "as_layered",
    "forward_of",
    "place",
]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, C], labels of the same rows) -> scalar: the loss *summed* over the rows."""

Forward = Callable[[Any, Any, Key | None], Tensor]
"""(input rows or aggregated ones, a Block or one per layer, random key) -> logits of the last destinations [D, C]."""


class Step(Protocol):
    """One strategy at work on one model and one graph.

    A step may also have: ``notes``, a list of texts to show, which may grow; ``keep_records(folder)``, called before
    training where the run has a folder; ``watch(tell)``, which gives it something to call now and then while it waits, with
    a text and facts; ``summary()``, called by all ranks once training is over, what to add to the result; ``close()``.
    """

    @property
    def num_steps(self) -> int:
        """Steps in an epoch."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of steps ``start .. num_steps`` of an epoch: a pure function of (seed, epoch, step)."""
        ...

    def gradients(self, batch: Any, key: Key) -> Tensor:
        """Leave the gradient of the batch's global loss in the parameters' ``.grad``; return the loss, a detached scalar."""
        ...

    @property
    def is_stop_agreed(self) -> bool:
        """Whether all ranks know, since the last step, that one of them was asked to stop. One process knows by itself."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Buffers that a checkpoint must keep for a bit-identical continuation (history, stale rows); often empty.

        A step whose ranks each keep something also has ``gather_state()``, called by all ranks at the same step before rank
        0 calls this: then it must give the buffers of all.
        """
        ...

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``state`` gave."""
        ...


class LayeredModel(Protocol):
    """A model as three functions, so that it can be run layer by layer over pieces of the graph."""

    num_layers: int

    def begin(self, x: Any) -> dict[str, Any]: ...

    def layer(self, index: int, block: Block, state: dict[str, Any]) -> dict[str, Any]: ...

    def finish(self, state: dict[str, Any]) -> Tensor: ...


def as_layered(model: nn.Module) -> LayeredModel | None:
    """The model, if it offers begin, layer and finish (every model of ``polyhop.nn`` does)."""
    has_all = all(callable(getattr(model, name, None)) for name in ("begin", "layer", "finish"))
    return cast(LayeredModel, model) if has_all else None


_PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "64-true": (torch.float64, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
}


@dataclass(frozen=True)
class Placement:
    """Where and in which number format tensors are computed."""

    device: torch.device
    dtype: torch.dtype = torch.float32  # of parameters and input rows
    autocast: torch.dtype | None = None  # of matrix products, where it differs

    def make_current(self) -> None:
        """Kernels are launched on the calling thread's current device, whichever their tensors are on."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def context(self) -> AbstractContextManager[Any]:
        """Run a forward pass inside this."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    @overload
    def rows(self, x: Tensor | SparseRows) -> Tensor | SparseRows: ...

    @overload
    def rows(self, x: Rows) -> Rows: ...

    def rows(self, x: Rows) -> Rows:
        """Input rows on the device, in the input format."""
        if isinstance(x, SparseRows):
            return replace(x.to(self.device), values=x.values.to(self.device, self.dtype))
        if isinstance(x, PooledRows):
            if not self._fits(x):
                raise UnsupportedError(
                    f"rows in two places are {x.dtype} on {x.device}, computing is in {self.dtype} on {self.device}: "
                    "gather them first (Placement.pooled)"
                )
            return x
        return x.to(self.device, self.dtype)

    def pooled(self, x: Rows, block: Block) -> tuple[Rows, Block]:
        """``rows`` for any input rows, and the block that goes with them.

        Rows in two places are left where they are if that is where, and how, computing happens; else those that the block
        reads are gathered there, and the block points into no pool any more.
        """
        if isinstance(x, PooledRows) and not self._fits(x):
            x, block = gathered(x, block)
        return self.rows(x), block

    def _fits(self, x: PooledRows) -> bool:
        return x.dtype == self.dtype and x.device == self.device

    def block(self, block: Block) -> Block:
        """A block on the device, its weights in the input format (their sums stay in double)."""
        if block.device != self.device:
            block = block.to(self.device)
        weights = {"edge_weight": block.edge_weight, "loop_weight": block.loop_weight}
        changed = {k: v.to(self.dtype) for k, v in weights.items() if v is not None and v.dtype != self.dtype}
        return replace(block, **changed) if changed else block  # type: ignore[arg-type]


class WholeGraph:
    """The full graph as one Block with all input rows, made once and shared by full-graph steps and evaluation."""

    def __init__(self, graph: Graph, placement: Placement) -> None:
        if graph.x is None:
            raise ConfigError(
                f"graph {graph.name!r} has no features: give x [N, F] (for instance degrees or a one-hot id)"
            )
        self.features: FeatureStore = graph.x
        self.placement = placement
        self.graph = graph
        if graph.edge_weight is not None and graph.edge_weight.dtype != placement.dtype:
            # Cast before anything is summed, so that degrees have the precision asked for.
            self.graph = replace(graph, edge_weight=graph.edge_weight.to(placement.dtype))

    @cached_property
    def host_block(self) -> Block:
        """All edges, in memory beside the graph."""
        return full_block(self.graph)

    @cached_property
    def block(self) -> Block:
        """All edges, where computing happens."""
        return self.placement.block(self.host_block)

    @cached_property
    def x(self) -> Rows:
        """All input rows, where computing happens."""
        return self.placement.rows(self.features.all())

    def complete(self, rows: Tensor) -> Tensor:
        """Rows of all nodes need nothing from elsewhere."""
        return rows


@dataclass(frozen=True)
class Team:
    """The other ranks, for strategies that work with them."""

    line: Collective  # of the thread that trains
    asks_to_stop: Callable[[], bool] = lambda: False  # has this rank been asked to stop?
    num_groups: int = 1  # of consecutive ranks; each group holds all parts of the graph

    def __post_init__(self) -> None:
        group_size(self.line.num_ranks, self.num_groups)

    @property
    def group(self) -> Collective:
        """The line to the ranks that hold the graph together with this one."""
        return self.line if self.num_groups == 1 else GroupLine.of(self.line, self.num_groups)

    @property
    def group_index(self) -> int:
        return self.line.rank // group_size(self.line.num_ranks, self.num_groups)

    @property
    def summing(self) -> Collective:
        """The line to all ranks, for sums: inside groups first, where there are several."""
        return self.line if self.num_groups == 1 else TieredLine(self.line, self.num_groups)


def place(device: str, precision: str) -> Placement:
    """The placement for an option pair such as ("auto", "bf16-mixed")."""
    if precision not in _PRECISIONS:
        raise ConfigError(unknown("precision", precision, _PRECISIONS))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"device={device!r} is not a device: use 'auto', 'cpu', 'cuda' or 'cuda:1'"
        ) from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA device: use device='cpu' or 'auto'")
    if device == "cuda":
        target = torch.device("cuda", torch.cuda.current_device())
    return Placement(target, *_PRECISIONS[precision])


def forward_of(model: nn.Module) -> Forward:
    """How to call the model on Blocks.

    Models of ``polyhop.nn`` take Blocks and a key. A plain module ``forward(x, edge_index[, edge_weight])`` gets the full
    graph: as a Block where all its graph layers are ours (they take one, and it is faster), else as int64 [2, E].
    """
    if isinstance(model, Model) and type(model).forward is Model.forward:
        return lambda x, blocks, key: cast(Tensor, model(x, blocks, key=key))
    if as_layered(model) is not None:
        return lambda x, blocks, key: cast(Tensor, model(*_together(x, blocks), key=key))
    takes_block = _has_only_our_layers(model)
    takes_weight = "edge_weight" in inspect.signature(model.forward).parameters
    seen: dict[str, Any] = {}  # the last block and rows, and what was made of them

    def call(x: Rows, block: Any, key: Key | None) -> Tensor:
        if not isinstance(block, Block):
            raise UnsupportedError(
                f"{type(model).__name__} has no begin/layer/finish, so it cannot train on sampled neighbours: "
                "build it from polyhop.nn (for instance polyhop.nn.Stack) or train on the full graph (num_neighbors=None)"
            )
        x, block = _together(x, block)
        if takes_block:
            logits: Tensor = model(x, block)
            return logits
        if seen.get("block") is not block or seen.get("x") is not x:
            rows = x.dense() if isinstance(x, SparseRows) else x
            seen.update(block=block, x=x, rows=rows, edges=_edge_index(block))
        weight = {"edge_weight": block.edge_weight} if takes_weight and block.edge_weight is not None else {}
        logits = model(seen["rows"], seen["edges"], **weight)
        return logits

    return call


def _together(x: Any, blocks: Any) -> tuple[Any, Any]:
    """Rows in two places brought together, for a model that may do anything with its input."""
    if not isinstance(x, PooledRows):
        return x, blocks
    if isinstance(blocks, Block):
        return gathered(x, blocks)
    x, first = gathered(x, blocks[0])
    return x, (first, *blocks[1:])


def _has_only_our_layers(model: nn.Module) -> bool:
    ours = [module for module in model.modules() if isinstance(module, Layer)]
    foreign = any("MessagePassing" in (base.__name__ for base in type(m).__mro__) for m in model.modules())
    return bool(ours) and not foreign


def _edge_index(block: Block) -> Tensor:
    """int64 [2, E] of a full block."""
    rows = torch.arange(block.dst_start, block.dst_start + block.num_dst, device=block.device)
    return torch.stack([block.indices.long(), torch.repeat_interleave(rows, block.drawn)])
