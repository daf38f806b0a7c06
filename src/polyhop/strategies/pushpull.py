"""Push-pull (P3): features are cut by columns, the first layer is computed where its columns are, data parallelism above.

    build      rank k gets its columns x[:, k] of all nodes, and what is known of them (``exchange/columns.py``), once
    push       every rank draws the mini-batch of its seeds, as ``data`` does; ids and edges of its first layer go to all
    compute    rank k makes, of every rank p's first layer, the part that its columns give:
                   Z_pk = AGG(block_p, x[V_p, k]) W[k]         sums and means (GCN, SAGE with its own rows' weight, GIN)
                   Z_pk = x[V_p, k] W[k]                       attention (GAT), which is not linear: of sources, not edges
    pull       Z_p = sum_k Z_pk at rank p, in rank order; then bias (once), attention, activation and the layers above
    backward   the gradient of Z_p goes to all ranks; each has the gradient of its columns of W from all mini-batches

No feature row crosses in training. Weights are those of one process on the same global batches, to rounding. Parameters are
replicated; a rank computes gradients of the first weights for its columns alone, so those are gathered, not summed.

Bytes a rank k sends per step (P ranks; of rank p's first layer S_p sources, D_p destinations, E_p edges, R_p = D_p mapped
rows, S_p for attention, of W columns; b(n) bytes hold numbers below n; c_k columns of rank k):

    ids        sampling as ``data``  +  (P - 1) (S_k b(N) + E_k b(S_k) + D_k), for attention (P - 1) S_k b(N)
    hidden     4 W sum_{p != k} R_p  forward  +  4 W (P - 1) R_k  backward
    gradients  (P - 1) 4 c_k out  of the first weights, which have ``out`` outputs; the others as ``data``
    sizes      24 (P - 1), and as ``data`` for the hops

and once, before the first step, its n rows: n (4 (F - c_k) + 8 (P - 1)) of kind features. Ranks without columns (F < P) get
no edges and no gradients, and send no parts. What is not linear before the first product (dropout of inputs, an encoder, a
maximum, another library's layer) is refused.

Legend: N nodes, P ranks, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.exchange import GradientSum, RowFetch, RowFormat
from polyhop.exchange.columns import Columns, spread_columns
from polyhop.exchange.pushpull import Pull, PushBatch, Pushed, PushLoader, PushWire, gather_slices
from polyhop.graph import Graph, SharedGraph
from polyhop.graph.sliced import MappedRows, SlicedMap
from polyhop.kernels.keys import Key
from polyhop.sample.wire import Wire
from polyhop.strategies.held import HeldPart
from polyhop.strategies.part_step import part_work
from polyhop.strategies.pushpull_cost import account, estimate, sliced_map, summed_parameters
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph, forward_of
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "account", "build", "estimate", "hold"]

NAME = "pushpull"


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # from the seeds outward, -1 = all
    batch_size: int = 1024  # of all ranks together
    sampler: str = "uniform"
    labor_dependence: int = 1  # steps over which LABOR's draws turn from one to the next
    prefetch: int = 2
    seed: int = 0
    feature_dtype: str = "auto"  # of the columns that ranks hold: auto | float32 | bfloat16
    aggregate_inputs: bool = False  # refused


def hold(graph: SharedGraph, placement: Placement, team: Team, config: Config) -> HeldPart:
    """What evaluation needs of this rank's part."""
    layout = RowFormat.of(graph.part, graph.num_nodes, config.feature_dtype)
    return HeldPart(graph, placement, team.line, RowFetch(graph.part, layout, Wire(graph.num_nodes)))


def build(
    model: nn.Module,
    graph: Graph | SharedGraph,
    config: Config,
    *,
    train_ids: Tensor,
    whole: WholeGraph | HeldPart,
    loss: Loss,
    terms_per_row: int = 1,
    trace: Trace = NO_TRACE,
    team: Team | None = None,
) -> Step:
    """This rank's step; ``train_ids`` are local rows of its labelled train nodes. All ranks build together."""
    if config.aggregate_inputs:
        raise UnsupportedError(
            "aggregate_inputs does not go with strategy 'pushpull', which sums inputs where their columns are: use it with "
            "'single', 'data' or 'macro'"
        )
    work = part_work(NAME, model, graph, config, train_ids, whole.placement.dtype, team)
    assert team is not None, "part_work asks for a team"
    sliced, sampler = sliced_map(model), work.sampler
    columns = spread_columns(work.graph.part, work.graph.num_nodes, team.line, config.feature_dtype)
    counted = sampler.wire.count_dtype(sampler.num_neighbors[-1])
    push = PushWire(work.graph.num_nodes, counted, sampler.wire.is_weighted, sliced.reads_edges)
    loader = PushLoader(
        team.line.fork(), sampler, columns, work.seeds, push, prefetch=config.prefetch, trace=trace
    )
    return _PushPullStep(model, sliced, loader, whole.placement, (loss, terms_per_row), team)


class _PushPullStep:
    """Every rank computes its columns' part of all first layers, and the rest of its own mini-batch."""

    def __init__(
        self,
        model: nn.Module,
        sliced: SlicedMap,
        loader: PushLoader,
        placement: Placement,
        loss: tuple[Loss, int],
        team: Team,
    ) -> None:
        self._forward, self._sliced, self.loader, self._placement = (
            forward_of(model),
            sliced,
            loader,
            placement,
        )
        self._loss, self._terms_per_row = loss
        self._line = team.line.fork()
        self._sum = GradientSum(summed_parameters(model, sliced), team.line, asks_to_stop=team.asks_to_stop)
        self.notes = [_note(loader.columns)]

    @property
    def num_steps(self) -> int:
        return len(self.loader)

    @property
    def is_stop_agreed(self) -> bool:
        return self._sum.is_stop_agreed

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self.loader.batches(epoch, start)

    def gradients(self, batch: PushBatch, key: Key) -> Tensor:
        self._sum.begin()
        own = self.loader.columns.own
        weights = tuple(
            weight.detach()[:, own].contiguous().requires_grad_(weight.requires_grad)
            for weight in self._sliced.weights
        )
        z = self._pulled(batch, weights)
        total = torch.zeros((), dtype=z.dtype, device=z.device)
        if batch.batch.seeds.numel():
            blocks = tuple(self._placement.block(block) for block in batch.batch.blocks)
            with self._placement.context():
                logits = self._forward(MappedRows(z), blocks, key)
            y = batch.y.to(self._placement.device)
            loss = self._loss(logits, y) / (batch.num_global * self._terms_per_row)
            self._backward(loss)
            total = loss.detach()
        elif z.requires_grad:  # others have seeds, and parts of theirs were made here
            self._backward(z.sum())
        return self._summed(weights, total)

    def _backward(self, scalar: Tensor) -> None:
        # In this thread: ranks that are threads with one device would wait for each other in the one that torch has for it.
        with torch.autograd.set_multithreading_enabled(False):
            scalar.backward()  # type: ignore[no-untyped-call]

    def _pulled(self, batch: PushBatch, weights: tuple[Tensor, ...]) -> Tensor:
        """[R, W]: mapped rows of the own first layer; parts of the others' leave before the own part is made."""
        line, columns = self._line, self.loader.columns
        like = torch.empty(0, self._sliced.width, dtype=self._placement.dtype, device=self._placement.device)
        parts = [self._part(batch.pushed[p], weights, like) for p in range(line.num_ranks) if p != line.rank]
        num_rows = [self._sliced.num_rows(*sizes) for sizes in batch.sizes]
        if line.num_ranks == 1:
            return self._part(batch.pushed[0], weights, like)
        pull = Pull(line, columns.holders, num_rows, like)
        token = pull.leave(parts, returns=self._sliced.returns)
        return pull.arrive(token, self._part(batch.pushed[line.rank], weights, like))

    def _part(self, pushed: Pushed | None, weights: tuple[Tensor, ...], like: Tensor) -> Tensor:
        """What the own columns give of a rank's mapped rows; none where there are none."""
        if pushed is None:
            return like
        x = self._placement.rows(pushed.x)
        assert isinstance(x, Tensor), "columns are dense"
        with self._placement.context():
            part = self._sliced.apply(self._placement.block(pushed.block), x, weights)
        return part.to(like.dtype)

    def _summed(self, weights: tuple[Tensor, ...], loss: Tensor) -> Tensor:
        """Gradients of all ranks are in ``.grad``; gives the sum of losses."""
        learnt = [
            (whole, own)
            for whole, own in zip(self._sliced.weights, weights, strict=True)
            if own.requires_grad
        ]
        grads = [torch.zeros_like(own) if own.grad is None else own.grad for _, own in learnt]
        gathered = gather_slices(grads, self.loader.columns.bounds, self._line) if learnt else None
        total = self._sum.end(loss)
        if gathered is not None:
            for (whole, _), grad in zip(learnt, gathered.wait(), strict=True):
                whole.grad = grad
        return total

    def close(self) -> None:
        """Let go of the lines, with the other ranks."""
        self.loader.close()
        self._line.close()

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        assert not tensors, "batches are pure functions of (seed, epoch, step): nothing is kept"


def _note(columns: Columns) -> str:
    """What a run's first lines say of it."""
    values = columns.x.values
    size = values.numel() * values.element_size() / 1e6
    return (
        f"features by columns: rank {columns.rank} holds {columns.num_own:,} of {columns.bounds[-1]:,} for all "
        f"{columns.x.num_rows:,} nodes ({size:,.1f} MB)"
    )
