"""One mini-batch split over all ranks (GSplit): every node of it belongs to one rank, which draws its neighbours, loads its
features and computes its rows. Nothing is sampled, loaded or computed twice.

    sampling   owners draw; ids of sources elsewhere go to their owners (``exchange/split.py``); one step ahead of training
    training   before each layer rows cross to the ranks that asked for them; backward their gradients return and are
               added at the owner; all in-edges of a node are at its owner, so attention needs nothing else
    all ranks  loss of the own seeds over the number of all seeds; gradients summed in rank order

Weights are those of one process on the same mini-batches, to rounding: the same seeds, neighbours and dropped units. A layer
that narrows maps rows before they cross; input rows are fixed, so unmapped ones send no gradients back, and cross while they
are loaded, ahead of the step.

Options: ``split_depth`` k: only the k layers nearest the inputs are split, ranks compute those above for their own seeds
("auto": as many as are expected to take least time, ``strategies/split_auto.py``);
``cache_bytes``: input rows of the nodes elsewhere that are read most are copied to every reader at the start;
``device_cache_bytes``: own input rows that are read most stay on the device (``exchange/hot.py``); ``bits``: rows
between layers, and their gradients, as unbiased integers of so many bits; ``split_sums``: where a layer sums what it reads,
a destination's sum over rows of one rank crosses in place of the rows wherever that is fewer bytes, lists of them included.
``split_groups``: the team's ranks form G groups (hosts) that hold all parts each; a group takes a slice of every
mini-batch's seeds and splits that, all as above with P / G ranks, and nothing leaves it but sums of gradients, one part in
P / G of them.

Bytes a rank sends per step (P ranks, L layers, k_hq ids that it asks of rank q at hop h, s_lr rows of layer l that rank r
asked of it, D_l columns that cross at layer l):

    ids        sum_h sum_q varint(k_hq)
    hidden     sum_l sum_r s_lr * 4 D_l  forward  +  sum_l sum_q k_lq * 4 D_l  backward (not of unmapped input rows);
               with sums, k_lq in ``ids`` has their entries too, and here it is the rows and sums that cross
    gradients  as ``data``
    sizes      8 (P - 1) a hop

With a depth k, hops above are as in ``data``; where the two meet, ids and facts (8 bytes a node) of what ranks read of each
other, and those rows, cross once.

Legend: P ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.errors import ConfigError, unknown
from polyhop.exchange import Crossing, GradientSum, RowFetch, RowFormat, Seeds, Spans
from polyhop.exchange.crossing import Lists, Messages, matrix
from polyhop.exchange.hot import HotRows
from polyhop.exchange.quantised import QuantisedMessages
from polyhop.exchange.split import Copies, Joint, SharedBatch, SharedLayer, SharedLoader, SharedSampler
from polyhop.exchange.wanted import Price
from polyhop.graph import Block, Graph, HaloBlock, SharedGraph, Sizes, SparseRows
from polyhop.kernels.keys import Key
from polyhop.sample.wire import Wire
from polyhop.strategies.halo_cost import Seen, crossings
from polyhop.strategies.held import HeldPart
from polyhop.strategies.part_step import checked_fan_outs, halo_inclusion, own_inclusion
from polyhop.strategies.split_auto import choose
from polyhop.strategies.split_cost import account, estimate
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph, as_layered, forward_of
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "account", "build", "estimate", "hold"]

NAME = "split"
BITS = ("1", "2", "4", "8", "16", "32")


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # from the seeds outward, -1 = all
    batch_size: int = 1024  # of all ranks together
    sampler: str = "uniform"
    labor_dependence: int = 1  # steps over which LABOR's draws turn from one to the next
    prefetch: int = 2
    seed: int = 0
    feature_dtype: str = "auto"  # of rows that evaluation fetches; training fetches none
    bits: int | str = 32  # of a value between layers: 1 | 2 | 4 | 8 | 16 | 32
    split_depth: int | str | None = None  # layers that are split, from the inputs; None: all; "auto": chosen
    cache_bytes: int = 0  # of input rows of other ranks' nodes that are copied here
    device_cache_bytes: int = 0  # of own input rows that stay where computing happens
    split_sums: bool = False  # sums of rows cross where they are fewer bytes


def hold(graph: SharedGraph, placement: Placement, team: Team, config: Config) -> HeldPart:
    """What evaluation needs of this rank's part."""
    return HeldPart(graph, placement, team.group, _fetch(graph, config))


def _fetch(graph: SharedGraph, config: Config) -> RowFetch:
    layout = RowFormat.of(graph.part, graph.num_nodes, config.feature_dtype)
    return RowFetch(graph.part, layout, Wire(graph.num_nodes))


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
    if team is None or not isinstance(graph, SharedGraph):
        raise ConfigError(
            f"strategy {NAME!r} runs on ranks: give --workers N, or start it with torchrun (one process: strategy 'single')"
        )
    fan_outs = checked_fan_outs(model, config.num_neighbors, NAME)
    if str(config.bits) not in BITS:
        raise ConfigError(
            f"{unknown('bits', str(config.bits), BITS)} (widths that follow rows over epochs, such as adaptive, are for "
            "strategy 'halo': mini-batches have other rows each time)"
        )
    depth = len(fan_outs) if config.split_depth is None else config.split_depth
    if depth != "auto" and not (isinstance(depth, int) and 1 <= depth <= len(fan_outs)):
        raise ConfigError(
            f"split_depth={config.split_depth}: expected 1 .. {len(fan_outs)}, the layers of the model that are split, from "
            "the inputs, or 'auto' (no layer split is strategy 'data')"
        )
    part = graph.stored(f"strategy {NAME!r}")
    seeds = Seeds(
        part.facts_of(train_ids)[0],
        train_ids + part.start,
        team.group,
        seed=config.seed,
        batch_size=config.batch_size,
        group=(team.group_index, team.num_groups),
    )
    if len(seeds) == 0:
        raise ConfigError(
            "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
        )
    fetch = _fetch(graph, config)
    copies = _copies(graph, train_ids, seeds, fan_outs, config, fetch, team.group)
    hot = _hot(graph, train_ids, seeds, fan_outs, config, fetch, whole.placement, team.group)
    chosen, wire = None, Wire(graph.num_nodes, part.edge_weight is not None)
    if isinstance(depth, str):
        chosen = choose(
            model, graph, team.group, whole.placement, train_ids=train_ids, num_neighbors=fan_outs,
            batch_size=config.batch_size * team.group.num_ranks // team.line.num_ranks, prefetch=config.prefetch,
            cache_bytes=config.cache_bytes, must_copy=True, feature_dtype=config.feature_dtype,
            bits=int(config.bits), strategies=(NAME,),
        )  # fmt: skip
        # Groups measure their own links; one depth is kept for all of them.
        depth = int(team.line.broadcast(torch.tensor([chosen.options["split_depth"]]), kind="sizes"))
    prices = _prices(model, graph, config, whole.placement) if config.split_sums else None

    def sampler(depth: int) -> SharedSampler:
        return SharedSampler(
            part, fan_outs, wire, seed=config.seed, method=config.sampler, depth=depth,
            copies=None if copies is None else copies.rows, prices=prices, dependence=config.labor_dependence,
        )  # fmt: skip

    loader = SharedLoader(
        team.group.fork(),
        sampler(depth),
        fetch,
        seeds,
        prefetch=config.prefetch,
        copies=copies,
        hot=hot,
        trace=trace,
        brings=whole.placement.dtype if _crosses_as_stored(model, graph, config, whole.placement) else None,
    )
    step = _SplitStep(model, loader, whole.placement, (loss, terms_per_row), int(config.bits), trace, team)
    if chosen is not None:
        step.choose_depth(depth, sampler, chosen.reason)
    if hot is not None:
        kept = f"{hot.x.shape[0]:,} of {part.num_nodes:,} own input rows"
        step.notes.append(f"{kept} stay on {whole.placement.device} ({hot.num_bytes:,} bytes)")
    return step


def _crosses_as_stored(model: nn.Module, graph: SharedGraph, config: Config, placement: Placement) -> bool:
    """Whether the first layer reads input rows as they are, each by itself: then they can cross before the step."""
    if int(config.bits) < 32 or config.split_sums:
        return False
    first = _seen(model, graph, placement)[0]
    return first.columns == graph.num_features and not first.has_gradient


def _seen(model: nn.Module, graph: SharedGraph, placement: Placement) -> list[Seen]:
    """What crosses at each layer."""
    sizes = Sizes.of_many(graph.num_nodes)
    with placement.context():
        return crossings(model, graph.num_features, sizes, num_plain=0, returns_inputs=False)


def _prices(model: nn.Module, graph: SharedGraph, config: Config, placement: Placement) -> list[Price | None]:
    """Of a row at each layer; None where a layer does more than sum what it reads."""
    weight_bytes = 0 if graph.part.edge_weight is None else 4
    return [
        Price(each.columns, each.value_bytes, int(config.bits), each.has_gradient, weight_bytes)
        if each.is_linear
        else None
        for each in _seen(model, graph, placement)
    ]


def _copies(
    graph: SharedGraph,
    train_ids: Tensor,
    seeds: Seeds,
    fan_outs: Sequence[int],
    config: Config,
    fetch: RowFetch,
    line: Collective,
) -> Copies | None:
    """Input rows of the halo's nodes that the last hop of a mini-batch asks for most, as many as fit."""
    if not config.cache_bytes:
        return None
    most = config.cache_bytes // (8 + 4 * max(1, graph.num_features))
    part = graph.stored(f"strategy {NAME!r}")
    likely = halo_inclusion(graph, train_ids, seeds, fan_outs, line)
    best = torch.sort(likely, descending=True, stable=True).indices[:most]
    best = best[likely[best] > 0].sort().values
    x = fetch.fetch(line, part.halo[best]).x
    return Copies(best + part.num_nodes, x.dense() if isinstance(x, SparseRows) else x)


def _hot(
    graph: SharedGraph,
    train_ids: Tensor,
    seeds: Seeds,
    fan_outs: Sequence[int],
    config: Config,
    fetch: RowFetch,
    placement: Placement,
    line: Collective,
) -> HotRows | None:
    """Own input rows that a mini-batch reads most, as many as fit."""
    if not config.device_cache_bytes:
        return None
    likely = own_inclusion(graph, train_ids, seeds, fan_outs, line)
    budget = config.device_cache_bytes
    return HotRows.of(likely, graph.num_features, budget, fetch.own, placement.device, placement.dtype)


class _SplitStep:
    """Every rank computes its nodes of one mini-batch; rows cross between layers."""

    def __init__(
        self,
        model: nn.Module,
        loader: SharedLoader,
        placement: Placement,
        loss: tuple[Loss, int],
        bits: int,
        trace: Trace,
        team: Team,
    ) -> None:
        self._model, self._forward = as_layered(model), forward_of(model)
        self.loader, self._placement = loader, placement
        (self._loss, self._terms_per_row), self._bits, self._trace = loss, bits, trace
        self._line = team.group.fork()
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._sum = GradientSum(parameters, team.summing, asks_to_stop=team.asks_to_stop)
        self.columns: list[int] = []  # that cross at each layer, once a step was made
        self.notes: list[str] = []
        self._depth: int | None = None  # that was chosen
        self._sampler: Callable[[int], SharedSampler]

    @property
    def num_steps(self) -> int:
        return len(self.loader)

    @property
    def is_stop_agreed(self) -> bool:
        return self._sum.is_stop_agreed

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self.loader.batches(epoch, start)

    def gradients(self, batch: SharedBatch, key: Key) -> Tensor:
        self._sum.begin()
        num_here = int(self.loader.brings is not None)  # layers whose sources are all here
        blocks = [self._placement.block(layer.block) for layer in batch.layers[:num_here]]
        channels = list[Crossing]()
        for index, layer in enumerate(batch.layers[num_here:], start=num_here):
            channels.append(self._channel(index, layer.lists, layer.block.src_ids, key))
            blocks.append(self._block(index, layer, channels[-1]))
        x = self._placement.rows(batch.x)
        x = x.dense() if isinstance(x, SparseRows) else x
        with self._trace.span("forward", step=batch.step), self._placement.context():
            if batch.drawn.joint is None:
                logits = self._forward(x, tuple(blocks), key)
            else:
                logits = self._joined(x, blocks, batch.drawn.joint, channels, key)
        y = batch.y.to(self._placement.device)
        loss = self._loss(logits, y) / (batch.num_global * self._terms_per_row)
        # Virtual ranks on one device share torch's backward thread, and this pass waits for the other ranks.
        with (
            self._trace.span("backward", step=batch.step),
            torch.autograd.set_multithreading_enabled(False),
        ):
            loss.backward()  # type: ignore[no-untyped-call]
        self.columns = [x.shape[1]] * num_here + [channel.num_columns or 0 for channel in channels]
        with self._trace.span("sum", step=batch.step):
            return self._sum.end(loss.detach())

    def _joined(
        self, x: Tensor, blocks: Sequence[Block], joint: Joint, channels: list[Crossing], key: Key
    ) -> Tensor:
        """Owners compute the layers below, then all rows that a rank reads come to it, and it computes the rest alone."""
        model: Any = self._model
        state = model.begin(x, ids=blocks[0].src_ids, key=key)
        for index, block in enumerate(blocks):
            state = model.layer(index, block, state, key=key)
        channel = self._channel(len(blocks), joint.lists, None, key)
        channels.append(channel)
        widths = [matrix(rows).shape[1] for rows in state.values()]
        own, _, arrive = channel.leave(torch.cat([matrix(rows) for rows in state.values()], dim=1), 0)
        rows = torch.cat([own, arrive()]).index_select(0, joint.place.to(own.device))
        shapes = [given.shape[1:] for given in state.values()]
        pieces = rows.split(widths, dim=1)  # type: ignore[no-untyped-call]
        state = {
            name: piece.view(-1, *shape) for name, piece, shape in zip(state, pieces, shapes, strict=True)
        }
        above = [self._placement.block(block) for block in joint.above]
        for index, block in enumerate(above, start=len(blocks)):
            state = model.layer(index, block, state, key=key)
        logits: Tensor = model.finish(state, ids=above[-1].dst_ids(), key=key)
        return logits

    def _channel(self, index: int, lists: Lists, ids: Tensor | None, key: Key) -> Crossing:
        spans = Spans(self._trace, index)
        messages = Messages(lists, spans)
        if self._bits < 32:
            if ids is None:  # where rows that were computed are not finite is told by their place
                ids = torch.arange(lists.num_own + lists.num_halo)
            both = ids[: lists.num_own], ids[lists.num_own :]
            messages = QuantisedMessages(lists, self._bits, both, spans)
        channel = Crossing(messages, self._line)
        channel.begin_step(key)
        return channel

    def _block(self, index: int, layer: SharedLayer, channel: Crossing) -> Block:
        complete = self._placement.block(layer.block)
        sizes = Sizes.of_many(complete.num_src)
        sums = layer.sums and layer.sums.to_device(self._placement.device, self._placement.dtype)
        num_own = layer.lists.num_own
        return HaloBlock.of(complete, 0, channel, sizes, returns=index > 0, num_own=num_own, sums=sums)

    def close(self) -> None:
        """Let go of the lines, with the other ranks."""
        self.loader.close()
        self._line.close()

    def choose_depth(self, depth: int, sampler: Callable[[int], SharedSampler], reason: str) -> None:
        """The depth was chosen, and why; ``sampler``: of any depth."""
        self._depth, self._sampler = depth, sampler
        self.notes.append(reason)

    def state(self) -> dict[str, Tensor]:
        """A chosen depth: another one would round differently. Batches are pure functions of (seed, epoch, step)."""
        return {} if self._depth is None else {"split_depth": torch.tensor([self._depth])}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if self._depth is None or "split_depth" not in tensors:
            assert not tensors, "nothing else is kept"
            return
        depth = int(tensors["split_depth"])
        if depth != self._depth:
            self._depth, self.loader.sampler = depth, self._sampler(depth)
            self.notes.append(f"split depth {depth}, with which the run began")
