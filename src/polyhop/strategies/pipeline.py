"""Training on the full graph with the layers spread over ranks: chunks of the graph stream through stages of layers, and
only what is between two stages crosses the network (GNNPipe, Chen et al., 2023). One step an epoch.

    rank s     layers of stage s, their weights and optimiser state; tables of the rows that its layers read
    forward    a chunk's rows come from rank s - 1, go through the layers, leave for rank s + 1; chunks one after another
    backward   the same in reverse, gradients of rows going down; then one step of the optimiser, all ranks at once

A chunk reads rows of this epoch of chunks before it, in an order drawn anew each epoch, and history of those after it, at
most ``history_period`` epochs old (``pipeline_history``). Gradients go back to chunks before it, times ``history_gamma``: 1
is the exact gradient of what was computed, with history as constants; 2 makes up for what the order cut off, on average over
orders, where a path goes from one chunk to another once. With one chunk, or with ``exact_layers`` (all chunks through a
layer before any goes on, stages one after another), weights are those of one process on the full graph, to rounding, dropout
included: it is keyed by the user's ids. Chunks are a function of the graph and the seed, so results do not depend on how
many ranks share the layers.

With ``stages`` = S fewer than ranks, the D = ranks / S ranks of a stage are its *ways* (``pipeline_ways``): each has the
chunks of one part of the graph, and at every layer they exchange rows of the chunks that they work on. Rank = D stage + way.

Every rank holds all edges of its way's chunks; those of the first stage have the input rows, those of the last the labels.
Weights move only when somebody asks for the whole model: evaluation, checkpoints; and gradients between ways.

Bytes a step between stages s and s + 1 (n nodes, C_s columns of the rows and of what is carried along, b bytes a value), and
among the ways of a stage of W weights (R rows that ways read of one another per node, H_l columns of layer l):

    hidden     b n C_s a direction, whatever the depth and the chunks; with ``bits`` below 32 ceil(C_s bits / 8) n, and up to
               8 bits 4 n more (of each thing carried); b n R H_l a direction for each layer l > 0
    gradients  3 values to every rank: loss, wish to stop, squared norm; and weights that several stages use; 2 (D - 1) b W

Legend: S stages, D ways, K chunks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import CheckpointError, ConfigError, UnsupportedError
from polyhop.exchange import RowFetch, RowFormat
from polyhop.exchange.gathered import gather_tensors
from polyhop.graph import Graph, SharedGraph
from polyhop.kernels.keys import Key
from polyhop.nn.counts import quiet
from polyhop.nn.model import Model
from polyhop.sample.wire import Wire
from polyhop.strategies.held import HeldPart
from polyhop.strategies.pipeline_balance import balance
from polyhop.strategies.pipeline_check import check
from polyhop.strategies.pipeline_chunks import cut_chunks, gather_block
from polyhop.strategies.pipeline_cost import Between, Boundary, Facts, account, estimate
from polyhop.strategies.pipeline_fallback import Fallback
from polyhop.strategies.pipeline_history import History, Meter
from polyhop.strategies.pipeline_inputs import input_rows, target_of
from polyhop.strategies.pipeline_lane import Lane
from polyhop.strategies.pipeline_memory import ledger_of
from polyhop.strategies.pipeline_memory import note as memory_note
from polyhop.strategies.pipeline_messages import WIDTHS, Messages
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_schedule import (
    Schedule,
    chunk_order,
    fill_drain,
    grouped,
    layer_by_layer,
)
from polyhop.strategies.pipeline_setup import (
    checked_model,
    layer_costs,
    line_of_stage,
    note,
    num_sweeps,
    shared_owner,
)
from polyhop.strategies.pipeline_shared import divided
from polyhop.strategies.pipeline_stage import Stage
from polyhop.strategies.pipeline_ways import (
    Meeting,
    Ways,
    WayStage,
    lay_out,
)
from polyhop.strategies.pipeline_weights import StageWeights
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "account", "build", "estimate", "hold"]

NAME = "pipeline"
_CHUNKS_PER_RANK = 4


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # must be None: every step is on the full graph
    feature_dtype: str = "auto"  # of the input rows, which cross once
    stages: int | None = None  # of layers; None: one for each rank
    chunks: int | None = None  # pieces of the graph; None: 4 for each rank
    chunk_order: str = "shuffled"  # of an epoch: shuffled | paired | fixed
    history_period: int = 1  # epochs between refreshes of the history
    history_gamma: float = 1.0  # factor of gradients between chunks
    history_gradients: bool = False  # of the epoch before, where the order cuts off this one's
    history_sweeps: int | str = (
        0  # forward passes before an epoch, for fresher history; auto: 1 where units are dropped
    )
    history_bound: float | None = None  # relative error of history above which chunks go together
    exact_layers: bool = False  # layer by layer over all chunks: no history
    bits: int | str = 32  # of a value between stages: 1 | 2 | 4 | 8 | 16 | 32
    recompute: bool = False  # layers again in the backward pass, for memory
    layer_costs: str = "auto"  # by which stages are balanced: counted | measured | auto
    shared_rows: str = "auto"  # what begin gives to all layers: send | recompute (on every stage) | auto
    seed: int = 0


def hold(graph: SharedGraph, placement: Placement, team: Team, config: Config) -> HeldPart:
    """What evaluation needs of this rank's part."""
    return HeldPart(graph, placement, team.line, _fetch(graph, config))


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
    if team is None or not isinstance(graph, SharedGraph) or not isinstance(whole, HeldPart):
        raise ConfigError(
            f"strategy {NAME!r} runs on ranks: give --workers N, or start it with torchrun (one process: strategy 'single')"
        )
    if config.num_neighbors is not None:
        raise ConfigError(
            f"strategy {NAME!r} trains on the full graph, and num_neighbors={list(config.num_neighbors)} asks for "
            "mini-batches: leave it out (--fanout), or use strategy 'data' or 'macro'"
        )
    if str(config.bits) not in map(str, WIDTHS):
        raise UnsupportedError(
            f"strategy {NAME!r} sends every value in as many bits: one of {', '.join(map(str, WIDTHS))}, and "
            f"bits={config.bits} is for strategy 'halo'"
        )
    layout = lay_out(team.line.num_ranks, config.stages)
    if layout.num_stages > getattr(model, "num_layers", layout.num_stages):
        given = f"{layout.num_ranks} ranks" if layout.num_ways == 1 else f"{layout.num_stages} stages"
        raise ConfigError(
            f"{given}, and {type(model).__name__} has {model.num_layers} layers: every stage needs one; use fewer stages "
            "(--stages), fewer ranks (--workers), a deeper model, or strategy 'halo'"
        )
    return _PipelineStep(
        checked_model(model), graph, whole, config, train_ids, (loss, terms_per_row), trace, team
    )


class _PipelineStep:
    num_steps = 1

    def __init__(
        self,
        model: Model,
        graph: SharedGraph,
        whole: HeldPart,
        config: Config,
        train_ids: Tensor,
        loss: tuple[Loss, int],
        trace: Trace,
        team: Team,
    ) -> None:
        part, placement = graph.stored(f"strategy {NAME!r}"), whole.placement
        self._line, self._team, self._config, self._model = team.line, team, config, model
        self._placement = placement
        self._layout = layout = lay_out(team.line.num_ranks, config.stages)
        self._wanted_sweeps = num_sweeps(
            config.history_sweeps, model, config.history_period, config.history_gradients
        )
        stage, way = layout.stage(team.line.rank), layout.way(team.line.rank)
        self._near = line_of_stage(layout, team.line)
        block, new_ids = gather_block(part, team.line)
        wanted = config.chunks or _CHUNKS_PER_RANK * layout.num_ranks
        owner, counts = shared_owner(block, wanted, layout, config.seed, team.line)
        self.ways = Ways.of(block, owner, counts, way)
        self.chunks = cut_chunks(block, owner, self.ways.chunks[way]).on(placement.device)
        self.pieces = divided(
            Pieces.of(model, graph.num_features, placement.context),
            model,
            graph.num_nodes,
            graph.num_features,
            config.shared_rows,
            int(config.bits),
            layout.num_ways,
        )
        costs = layer_costs(
            config.layer_costs, model, self.pieces, graph, self.chunks, int(config.bits), layout, placement, team.line
        )  # fmt: skip
        crossing = [float(self.pieces.columns(layer)) for layer in range(model.num_layers)]
        entering = self.chunks.ids if stage == 0 else self.chunks.ids[: self.chunks.num_own]
        order = new_ids[entering] if stage == 0 or self.pieces.local else None
        x = input_rows(part, team.line, _fetch(graph, config), order)
        self._rows = None if x is None else placement.rows(x)
        judges = layout.rank(layout.num_stages - 1) + self.ways.of_chunks()[owner.long()]
        self._target = target_of(part, train_ids, loss, self.chunks, judges, team.line, placement.device)
        self._trace = trace
        self._is_exact = config.exact_layers or self.ways.num_ticks == 1
        self._gathered: dict[str, Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self.is_stop_agreed = False
        bound = None if config.exact_layers else config.history_bound
        self.fallback = Fallback(bound, self.ways.num_ticks, len(self.ways))
        self._lay_out(balance(costs, layout.num_stages, crossing))
        self.notes.append(memory_note(self.memory, team.line))

    def _lay_out(self, bounds: Sequence[int]) -> None:
        """Stages of these layers, with nothing in their tables."""
        config, line, placement = self._config, self._line, self._placement
        self.bounds = tuple(bounds)
        stage = self._layout.stage(line.rank)
        first, stop = span = self.bounds[stage], self.bounds[stage + 1]
        self.weights = StageWeights(self._model, self.pieces, self.bounds, line, self._near)
        tables = {layer: self.pieces.states[layer]["h"] for layer in range(max(first, 1), stop)}
        self.history = History(
            self.chunks,
            tables,
            config.history_period,
            config.history_gamma,
            placement.device,
            replays=config.recompute and not self._is_exact,
            compensates=config.history_gradients and not self._is_exact,
        )
        self._meeting = None
        if len(self.ways) > 1:
            self._meeting = Meeting(self.ways, self.history, self._near, self._trace)
        options: dict[str, Any] = {} if self._meeting is None else {"meeting": self._meeting}
        self._stage = (Stage if self._meeting is None else WayStage)(
            self._model,
            span,
            self.chunks,
            self.history,
            placement,
            x=self._rows,
            target=self._target,
            recompute=config.recompute,
            local=self.pieces.local,
            **options,
        )
        own = sorted(self.pieces.of_span(first, stop))
        by_layer = config.exact_layers or self._stage.has_ways
        self.memory = ledger_of(self._stage, self.pieces, self._model, own, layer_by_layer=by_layer)
        self._messages = Messages(self.pieces, self.chunks, int(config.bits))
        self._lane = Lane(self._stage, self._messages, line, self._trace)
        self.notes = [note(self.chunks, self.ways, self.bounds, self._is_exact)]

    # A step

    def schedule(self, epoch: int) -> Schedule:
        """What all ranks do in an epoch."""
        given = self._layout, self.bounds, self._orders(epoch)
        is_grouped = self._config.exact_layers or self._together > 1
        made = grouped(*given, self._together) if is_grouped else fill_drain(*given)
        if epoch == 0:
            check(made)
        return made

    @property
    def _together(self) -> int:
        """Ticks that go through a layer before any goes on."""
        return self.ways.num_ticks if self._config.exact_layers else self.fallback.together

    def _orders(self, epoch: int) -> list[tuple[int, ...]]:
        seed, kind = self._config.seed, self._config.chunk_order
        return [chunk_order(chunks, seed, epoch, kind) for chunks in self.ways.chunks]

    @property
    def boundaries(self) -> list[Boundary]:
        """What crosses between stages."""
        return [self._messages.boundary(layer) for layer in self.bounds[1:-1]]

    @property
    def between(self) -> Between | None:
        """What ways exchange; None where there is one."""
        if len(self.ways) == 1:
            return None
        rows = [state["h"] for state in self.pieces.states[: self.pieces.num_layers]]
        sizes = self.chunks.sizes
        return Between(
            self.ways.num_read.tolist(),
            [math.prod(shape) * dtype.itemsize if layer else 0 for layer, (shape, dtype) in enumerate(rows)],
            self.weights.num_own,
            self.ways.chunks,
            [sum(sizes[chunk] for chunk in chunks) for chunks in self.ways.chunks],
        )

    def facts(self) -> Facts:
        """From which what ranks send is estimated."""
        return Facts(
            self._layout,
            self.chunks.num_nodes,
            len(self.chunks),
            self.boundaries,
            self._placement.dtype.itemsize,
            self.weights.num_shared,
            self.between,
            self.bounds,
            self._num_sweeps,
        )

    @property
    def _num_sweeps(self) -> int:
        """Before every epoch."""
        is_exact = self._is_exact or self._together >= self.ways.num_ticks
        return 0 if is_exact else self._wanted_sweeps

    @property
    def meter(self) -> Meter:
        """What this stage read in its last epoch."""
        return self.history.meter

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(range(start, 1))

    def gradients(self, batch: Any, key: Key) -> Tensor:
        if not self._is_exact and not self.history.is_filled:
            self._sweep(key.epoch)
        schedule, orders = self.schedule(key.epoch), self._orders(key.epoch)
        for _ in range(self._num_sweeps):
            self._freshen(schedule, key)
        self._begin(key.epoch, orders, self._together, at_once=self._config.exact_layers)
        self._stage.begin(key)
        self._messages.begin(key)
        # Virtual ranks on one device share torch's backward thread.
        with torch.autograd.set_multithreading_enabled(False):
            self._lane.run(schedule.lanes[self._line.rank])
            loss = self._stage.end()
        self.history.end()
        if told := self.fallback.look(key.epoch, self.meter, self._line):
            self.notes.append(told)
        found, self.is_stop_agreed = self.weights.end(loss, self._team.asks_to_stop() or self.is_stop_agreed)
        return found

    def _begin(self, epoch: int, orders: Sequence[Sequence[int]], together: int, *, at_once: bool) -> None:
        """``at_once``: nothing that is read counts as history."""
        self.history.begin(epoch, *([] if at_once else orders), together=together)
        if self._meeting is not None:
            self._meeting.begin(orders, together)

    def _sweep(self, epoch: int) -> None:
        """Fill the tables: every layer on all rows, without dropout, with the weights as they are."""
        schedule = layer_by_layer(self._layout, self.bounds, self.ways.chunks)
        forward = [action for action in schedule.lanes[self._line.rank] if action.task.direction == "forward"]
        with torch.no_grad(), quiet(self._model):
            self._begin(epoch, self.ways.chunks, self.ways.num_ticks, at_once=True)
            self._stage.begin(None, is_sweep=True)
            self._messages.begin(None)
            self._lane.run(forward)
            self._stage.end()
        self.history.fill(epoch)

    def _freshen(self, schedule: Schedule, key: Key) -> None:
        """All rows go through the pipeline once, dropped as in this epoch: one more layer of history becomes exact."""
        forward = [action for action in schedule.lanes[self._line.rank] if action.task.direction == "forward"]
        with torch.no_grad():
            self._begin(key.epoch, self._orders(key.epoch), self._together, at_once=True)
            self._stage.begin(key, is_sweep=True)
            self._messages.begin(key)
            self._lane.run(forward)
            self._stage.end()
        self.history.freshen(key.epoch)

    # What the loop and the trainer ask for

    def clip(self, max_norm: float) -> None:
        """Scale all ranks' gradients so that their norm together is at most ``max_norm``."""
        self.weights.clip(max_norm)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser whose state is to be saved."""
        self._optimizer = optimizer

    def complete_model(self) -> None:
        """Give every rank all weights. All ranks call it together."""
        self.weights.share()

    def gather_state(self) -> None:
        """Rank 0 gets all weights, the optimiser's state of them, and what all ranks keep."""
        self.weights.share()
        if self._optimizer is not None:
            self.weights.gather_optimizer(self._optimizer)
        own = (
            {}
            if self._is_exact
            else {name: value.cpu().contiguous() for name, value in self.history.state().items()}
        )
        own["together"] = torch.tensor(self.fallback.together)
        own["bounds"] = torch.tensor(self.bounds)
        own["chunks"] = torch.tensor(self.chunks.sizes)
        own["ways"] = torch.tensor(len(self.ways))
        self._gathered = gather_tensors(own, self._line)

    def close(self) -> None:
        """Let go of the line between ways."""
        if self._meeting is not None:
            self._near.close()

    def state(self) -> dict[str, Tensor]:
        return self._gathered

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._gathered = tensors
        own = f"rank{self._line.rank}."
        mine = {name.removeprefix(own): value for name, value in tensors.items() if name.startswith(own)}
        if not tensors:
            return
        is_same = (
            mine
            and mine["bounds"].numel() == len(self.bounds)
            and mine["chunks"].tolist() == self.chunks.sizes
            and int(mine.get("ways", 1)) == len(self.ways)
        )
        if is_same and mine["bounds"].tolist() != list(self.bounds):
            self._lay_out(mine["bounds"].tolist())  # costs are measured anew, and may differ
        if not is_same:
            raise CheckpointError(
                "the run was saved with other stages or chunks, and ranks keep rows of them from epoch to epoch: go on with "
                "as many ranks, the same --stages, --chunks and parts, or start afresh"
            )
        self.fallback.together = int(mine.get("together", torch.tensor(1)))
        if "made" in mine:
            self.history.restore(mine)
