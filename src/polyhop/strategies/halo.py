"""Training on the full graph, spread over ranks by parts: before each layer the rows that other parts read cross the cut,
after it, backward, their gradients return and are added at the owner. One step an epoch.

    layer 0    own input rows and the halo's, which came once: nothing crosses; where no parameter changes what it sums of
               them, they are summed once
    layer l    map own rows where that narrows -> boundary rows leave -> central rows -> halo arrives -> marginal rows
    backward   gradients of the halo's rows leave after the marginal rows, while those of the central rows are computed

The loss is the sum over all ranks' train nodes divided by their number; gradients of weights are summed in rank order while
the backward pass runs; BatchNorm has the statistics of all ranks' rows. With 32-bit messages the weights are those of one
process on the full graph, to rounding, dropout included: it is keyed by the user's ids. With fewer bits every message is
unbiased. ``halo`` other than "exact" is approximate; each file of ``exchange`` that does it states its bound.

Bytes a rank sends per step (s_lr rows of layer l that rank r reads, w_lr rows of rank r that it reads, D_l columns that
cross at layer l):

    hidden     sum over l >= 1, r of (s_lr + w_lr) * 4 D_l       or ceil(D_l b / 8) + 4 a row in b bits
    gradients  as ``data``

Legend: n own rows, H halo rows, P ranks, L layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.errors import CheckpointError, ConfigError, UnsupportedError
from polyhop.exchange import GradientSum, RowFetch, RowFormat, Spans, lay_out, layer_edges
from polyhop.exchange.batch_norm import KeptStatistics, shared_statistics
from polyhop.exchange.gathered import gather_tensors
from polyhop.graph import Block, Graph, HaloBlock, SharedGraph, SparseRows
from polyhop.graph.aggregated import AggregatedRows
from polyhop.kernels.keys import Key
from polyhop.nn.layer import Layer
from polyhop.nn.rows import Rows
from polyhop.sample.wire import Wire
from polyhop.strategies.halo_channels import DELTA_BITS, DEPTH, FIRST_BITS, Ends, Options, make_channels
from polyhop.strategies.halo_cost import account, estimate
from polyhop.strategies.halo_memory import Means, ledger_of
from polyhop.strategies.halo_memory import note as memory_note
from polyhop.strategies.halo_plan import BUCKET_BYTES, GraphSizes, Plan
from polyhop.strategies.halo_recompute import recomputed
from polyhop.strategies.held import HeldPart
from polyhop.strategies.inputs import summed_once
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph, as_layered, forward_of
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "account", "build", "estimate", "hold"]

NAME = "halo"


@dataclass(frozen=True)
class Config(Options):
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # must be None: every step is on the full graph
    feature_dtype: str = "auto"  # of the input rows of the halo, which cross once
    naive_halo: bool = (
        False  # input rows cross in every step, rows always unmapped, and all of them; no overlap
    )
    halo_sums: bool = True  # sums of rows cross where that makes fewer messages
    recompute: bool = False  # layers are computed again in the backward pass
    optimizer: Any = "adam"  # these two say how much is kept of each parameter
    momentum: float = 0.0


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
    if team is None or not isinstance(graph, SharedGraph) or not isinstance(whole, HeldPart):
        raise ConfigError(
            f"strategy {NAME!r} runs on ranks: give --workers N, or start it with torchrun (one process: strategy 'single')"
        )
    if config.num_neighbors is not None:
        raise ConfigError(
            f"strategy {NAME!r} trains on the full graph, and num_neighbors={list(config.num_neighbors)} asks for "
            "mini-batches: leave it out (--fanout), or use strategy 'data' or 'macro'"
        )
    layered = as_layered(model)
    if layered is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no begin/layer/finish, so it cannot be run layer by layer over parts: build it "
            "from polyhop.nn (GCN, GraphSAGE, ..., or Stack for your own layers)"
        )
    if config.halo == "sampled":
        _refuse_attention(model)
    if config.halo == "sequential" and config.naive_halo:
        raise ConfigError(
            "halo='sequential' is a way to bring rows, naive_halo a baseline of another: give one"
        )
    count = _total(train_ids.numel(), team.line) * terms_per_row
    if count == 0:
        raise ConfigError(
            "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
        )
    keeps = config.halo in ("stale", "skipping") or config.bits in ("adaptive", "delta", "random")
    kind = _KeepingStep if keeps else _HaloStep
    return kind(model, graph, whole, config, train_ids, (loss, count), trace, team)


class _HaloStep:
    num_steps = 1

    def __init__(
        self,
        model: nn.Module,
        graph: SharedGraph,
        whole: HeldPart,
        config: Config,
        train_ids: Tensor,
        loss: tuple[Loss, int],
        trace: Trace,
        team: Team,
    ) -> None:
        part, placement = graph.stored(f"strategy {NAME!r}"), whole.placement
        assert part.y is not None, "the trainer checks that labels are there"
        self._line, self._gathered = team.line, dict[str, Tensor]()
        self._model, self._placement, (self._loss, self._count) = model, placement, loss
        layout = lay_out(part)
        rows = layout.place[train_ids]
        self._rows, self._y = rows.to(placement.device), part.y[train_ids].to(placement.device)
        is_sparse = isinstance(whole.own_rows(torch.empty(0, dtype=torch.int64)), SparseRows)
        if is_sparse and config.naive_halo:
            raise UnsupportedError(
                f"graph {graph.name!r}: naive_halo sends input rows in every step, and these are sparse: give dense features"
            )
        whole_graph = GraphSizes(graph.num_nodes, graph.num_edges, graph.num_features, is_sparse)
        plan = Plan.of(model, config, whole_graph)
        layers = layer_edges(layout, part, team.line, plan.read(rows, layout.num_own), plan.sums)
        self._channels = make_channels(
            [Ends.of(index, layer, layout.num_own) for index, layer in enumerate(layers)][plan.num_plain :],
            replace(config, overlap=config.overlap and not config.naive_halo),
            team.line,
            lambda index: Spans(trace, index),
        )
        blocks: list[Block] = [placement.block(layer.block) for layer in layers]
        for at, channel in enumerate(self._channels.channels, start=plan.num_plain):
            sums = layers[at].sums
            blocks[at] = HaloBlock.of(
                blocks[at],
                layout.num_central,
                channel,
                plan.sizes,
                sends_narrow=not config.naive_halo,
                sums=None if sums is None else sums.to_device(placement.device, placement.dtype),
                wanted=layers[at].lists.wanted if config.halo == "sequential" else None,
            )
            channel.keeps = config.recompute
        self._x: Rows | AggregatedRows
        self._parts = _fingerprint(part.src_ids)
        self._by_layer = dict(enumerate(self._channels.channels, start=plan.num_plain))
        self._kept = KeptStatistics(model) if config.recompute else None
        if plan.num_plain:
            ids = torch.cat([layout.order, layout.num_own + layers[0].halo])
            x = placement.rows(whole.features.gather(ids))
            self._x, blocks[0] = summed_once(model, x, blocks[0])
        else:
            self._x = placement.rows(whole.own_rows(layout.order))
        self._blocks = tuple(blocks)
        self._forward = forward_of(model)
        self._statistics_line = team.line.fork() if plan.has_batch_norm else None
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._sum = GradientSum(
            parameters, team.line, asks_to_stop=team.asks_to_stop, bucket_bytes=BUCKET_BYTES
        )
        lists, means = [layer.lists for layer in layers], _means(config, list(model.parameters()))
        self.memory = ledger_of(model, self._x, self._blocks, lists, plan.columns, means, placement.context)
        is_summed = isinstance(self._x, AggregatedRows)
        self._notes = [
            _note(layout.marginal_share, plan, team.line, is_summed=is_summed),
            memory_note(self.memory, team.line),
        ]

    @property
    def notes(self) -> list[str]:
        """What people should know, growing."""
        return [*self._notes, *self._channels.notes]

    @property
    def is_stop_agreed(self) -> bool:
        return self._sum.is_stop_agreed

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(range(start, 1))

    def gradients(self, batch: Any, key: Key) -> Tensor:
        self._sum.begin()
        self._channels.begin_step(key)
        with self._statistics():
            with self._placement.context(), self._recomputed():
                logits = self._forward(self._x, self._blocks, key)
            loss = self._loss(logits.index_select(0, self._rows), self._y) / self._count
            # Virtual ranks on one device share torch's backward thread, and this pass waits for the other ranks.
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()  # type: ignore[no-untyped-call]
        self._channels.end_step(key)
        return self._sum.end(loss.detach())

    def _statistics(self) -> AbstractContextManager[Any]:
        if self._statistics_line is None:
            return nullcontext()
        return shared_statistics(self._model, self._statistics_line, self._kept)

    def _recomputed(self) -> AbstractContextManager[Any]:
        if self._kept is None:
            return nullcontext()
        return recomputed(self._model, self._by_layer, self._kept)

    def close(self) -> None:
        """Let go of the lines, with the other ranks."""
        self._channels.close()
        if self._statistics_line is not None:
            self._statistics_line.close()

    def state(self) -> dict[str, Tensor]:
        return self._gathered

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._gathered = tensors
        if tensors and int(tensors["ranks"]) != self._line.num_ranks:
            raise CheckpointError(
                f"the run was saved by {int(tensors['ranks'])} ranks, which keep something of each other from step to step, "
                f"and this one has {self._line.num_ranks}: continue with as many, or start afresh"
            )
        own = f"rank{self._line.rank}."
        if tensors and f"{own}parts" in tensors and int(tensors[f"{own}parts"]) != self._parts:
            raise CheckpointError(
                "the run was saved with other parts, and ranks keep rows of each other's nodes from step to step: go on "
                "with the same parts (--parts, or the same partitioner and seed), or start afresh"
            )
        mine = {name.removeprefix(own): value for name, value in tensors.items() if name.startswith(own)}
        if mine:
            self._channels.restore({name: value for name, value in mine.items() if name != "parts"})


class _KeepingStep(_HaloStep):
    """A step whose ranks keep something from one to the next."""

    def gather_state(self) -> None:
        """Rank 0 gets what all ranks keep."""
        own = {name: value.cpu().contiguous() for name, value in self._channels.state().items()}
        own["parts"] = torch.tensor(self._parts)
        self._gathered = {"ranks": torch.tensor(self._line.num_ranks), **gather_tensors(own, self._line)}


def _refuse_attention(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Layer) and (not module.has_pieces or type(module).edge is not Layer.edge):
            raise UnsupportedError(
                f"{type(module).__name__} weighs neighbours by what it learns, so rows that were not drawn cannot be "
                "counted as zero: halo='sampled' needs GCN, SAGE, GIN or GCN2 layers"
            )


def _means(config: Config, parameters: Sequence[Tensor]) -> Means:
    """What the options mean for memory."""
    first = {"adaptive": FIRST_BITS, "random": FIRST_BITS, "delta": DELTA_BITS}
    return Means(
        bits=int(config.bits) if str(config.bits).isdecimal() else first[str(config.bits)],
        value_bytes=parameters[0].element_size(),
        depth=DEPTH if config.halo == "sequential" else None,
        recompute=config.recompute,
        holds=config.bits == "delta",
        num_parameters=sum(p.numel() for p in parameters),
        states=int(config.momentum > 0) if config.optimizer == "sgd" else 2,
    )


def _note(marginal_share: float, plan: Plan, line: Collective, *, is_summed: bool) -> str:
    shares = line.all_gather(
        torch.tensor([marginal_share], device=line.device), kind="sizes", counts=[1] * line.num_ranks
    )
    text = f"up to {100 * float(torch.cat(shares).max()):.0f} % of a part's rows read from other parts"
    text += f"; the halo's input rows cross {'once' if plan.num_plain else 'in every step'}"
    text += " and are summed once" if is_summed else ""
    return text + ("; BatchNorm needs all rows, so none is skipped" if plan.has_batch_norm else "")


def _fingerprint(ids: Tensor) -> int:
    """By which a part's nodes and halo, in their order, are recognised."""
    digest = hashlib.blake2b(ids.cpu().contiguous().numpy().tobytes(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _total(count: int, line: Collective) -> int:
    counts = line.all_gather(
        torch.tensor([count], device=line.device), kind="sizes", counts=[1] * line.num_ranks
    )
    return int(torch.cat(counts).sum())
