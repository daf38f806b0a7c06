"""Forecasts of ``pipeline``: layers over ranks, chunks streaming through, alone or with several ways to a stage.

The schedule that would run is played through (``pipeline_simulate``) with a time for every task, from the layers' counts on
a chunk, and for every message, from its bytes. Ranks that outnumber cores can compute no faster than the cores: an epoch
takes at least all computing over their number.

    exact          one chunk to a way: a stage waits for the one before it
    approximate    several chunks: history of those that come later, a sweep before every epoch where units are dropped

Legend: S stages, D ways, P = S D ranks, K chunks, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from polyhop.errors import PolyhopError
from polyhop.forecast.memory import stage_memory
from polyhop.forecast.question import Question
from polyhop.forecast.sight import Cut
from polyhop.graph import Sizes
from polyhop.nn.model import Model
from polyhop.plan import Prediction
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.pipeline_balance import balance
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_profile import cut_matters, is_measured
from polyhop.strategies.pipeline_schedule import Layout, Task, fill_drain, split_ways
from polyhop.strategies.pipeline_setup import checked_model, num_sweeps
from polyhop.strategies.pipeline_shared import divided
from polyhop.strategies.pipeline_simulate import simulate

__all__ = ["of_layout", "predictions"]

_FORWARD = 1 / 3  # of a layer's computing
_CHUNKS_PER_RANK = (4, 8)


def predictions(question: Question) -> Iterator[Prediction]:
    """Of every layout of the ranks that the model has layers for; none where its layers cannot be spread."""
    try:
        model = checked_model(question.training.model)
    except PolyhopError:
        return
    cut = question.sight.cut
    for stages in range(2, min(question.num_ranks, question.training.counts.num_layers) + 1):
        if question.num_ranks % stages == 0:
            layout = Layout(stages, question.num_ranks // stages)
            yield _prediction(question, model, cut, layout, layout.num_ways)
            for times in _CHUNKS_PER_RANK:
                yield _prediction(question, model, cut, layout, times * question.num_ranks)


def of_layout(
    question: Question, num_stages: int, num_chunks: int, layer_costs: str = "auto"
) -> Prediction | None:
    """One layout; None where the ranks or the model's layers cannot be spread so. ``layer_costs``: as runs are given it."""
    try:
        model = checked_model(question.training.model)
    except PolyhopError:
        return None
    if question.num_ranks % num_stages or num_stages > question.training.counts.num_layers:
        return None
    layout = Layout(num_stages, question.num_ranks // num_stages)
    if num_chunks < layout.num_ways:
        return None
    return _prediction(question, model, question.sight.cut, layout, num_chunks, layer_costs)


@dataclass(frozen=True)
class _Chunked:
    """An epoch's pieces."""

    layer_s: list[float]  # of each layer on one chunk, forward and backward
    bounds: tuple[int, ...]
    columns: list[int]  # that cross each boundary
    weights: list[int]  # values whose gradients the ways of each stage sum
    chunk_rows: float


def _prediction(
    question: Question, model: Model, cut: Cut, layout: Layout, num_chunks: int, layer_costs: str = "auto"
) -> Prediction:
    is_exact = num_chunks == layout.num_ways
    pieces = _pieces(question, model, cut, layout, num_chunks, layer_costs)
    sweeps = 0 if is_exact else num_sweeps("auto", model, 1, has_past_gradients=False)
    # Ways with as many chunks each do the same at the same time: one is played for all.
    played_ways = layout.num_ways if num_chunks % layout.num_ways else 1
    orders = split_ways(num_chunks * played_ways // layout.num_ways, played_ways)
    schedule = fill_drain(Layout(layout.num_stages, played_ways), pieces.bounds, orders)
    boundaries = [question.boundary(layout, at) for at in range(layout.num_stages - 1)]
    exchange = _exchange_s(question, cut, layout, pieces)
    size = pieces.chunk_rows * question.training.value_bytes
    hands = [_hands_s(question, size * columns) for columns in pieces.columns]

    def task_s(stage: int, task: Task) -> float:
        share = _FORWARD if task.direction == "forward" else 1 - _FORWARD
        layers = range(task.first, task.stop)
        computed = sum(pieces.layer_s[at] * share + (exchange[at] if at else 0.0) for at in layers)
        return computed + sum(hands[max(0, stage - 1) : stage + 1]) / 2  # one end of each message is here

    def message_s(stage: int, task: Task) -> float:
        at = stage if task.direction == "forward" else stage - 1
        return boundaries[at].latency_s + size * pieces.columns[at] / boundaries[at].bytes_per_s

    played = simulate(schedule, task_s, message_s)
    between = 0.0 if layout.num_ways == 1 else _between_s(question, cut, layout, pieces)
    computing = num_chunks * (sum(pieces.layer_s) + 2 * (sum(hands) + between)) * (1 + _FORWARD * sweeps)
    at_least = computing * max(question.crowding, 1e-9) / question.num_ranks
    seconds = max(played.seconds * (1 + _FORWARD * sweeps), at_least)
    sent = _sent(question, cut, layout, pieces, sweeps)
    options: dict[str, Any] = {"stages": layout.num_stages, "chunks": num_chunks}
    options |= {"layer_costs": layer_costs} if layer_costs != "auto" else {}
    ways = f" of {layout.num_ways} ways" if layout.num_ways > 1 else ""
    chunks = "one chunk a way" if is_exact else f"{num_chunks} chunks"
    return Prediction(
        strategy="pipeline",
        options=options,
        name=f"pipeline, {layout.num_stages} stages{ways}, {chunks}",
        is_exact=is_exact,
        epoch_s=seconds,
        parts={
            "compute": computing / question.num_ranks,
            "wait": max(0.0, seconds - computing / question.num_ranks),
        },
        memory=stage_memory(question, pieces.bounds, layout.num_ways, num_chunks, has_history=not is_exact),
        sent=sent,
        evaluate_s=question.slowed * computing / 3 / question.num_ranks,
        bound="stages wait for one another" if played.idle_share > 0.4 else "the cores are busy",
        num_ranks=question.num_ranks,
    )


def _pieces(
    question: Question, model: Model, cut: Cut, layout: Layout, num_chunks: int, layer_costs: str
) -> _Chunked:
    training = question.training
    rows = training.num_nodes / num_chunks
    edges = training.num_edges / num_chunks
    grown = cut.replicas_of(num_chunks)
    others = rows * min(grown, training.num_edges / max(1, training.num_nodes))
    sizes = Sizes(round(rows + others), round(rows), round(edges))
    layer_s = [
        question.law.seconds(layer.of(sizes, rows if at else None))
        for at, layer in enumerate(question.training.counts.layers)
    ]
    layer_s[0] += question.law.seconds(training.counts.before(rows))
    layer_s[-1] += question.law.seconds(training.counts.after(training.num_train / num_chunks))
    model_pieces, balanced_by = _divided(question, model, layout), layer_s
    counted = model_pieces.costs(
        training.inputs.num_features, training.num_nodes, training.num_edges, training.inputs.row_length
    )
    if not is_measured(layer_costs, counted, num_chunks, cut_matters=cut_matters(model_pieces, 32)):
        balanced_by = counted  # as the run does
    crossing = [float(model_pieces.columns(layer)) for layer in range(model_pieces.num_layers)]
    bounds = balance(balanced_by, layout.num_stages, crossing)
    named = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    spans = [model_pieces.of_span(first, stop) for first, stop in pairwise(bounds)]
    weights = [sum(named[name] for name in span if name in named) for span in spans]
    return _Chunked(layer_s, bounds, [model_pieces.columns(at) for at in bounds[1:-1]], weights, rows)


def _divided(question: Question, model: Model, layout: Layout) -> Pieces:
    """The model in pieces, as a run has them: what crosses between layers, and whose weights are whose."""
    training = question.training
    pieces = Pieces.of(model, training.inputs.num_features)
    return divided(
        pieces, model, training.num_nodes, training.inputs.num_features, "auto", 32, layout.num_ways
    )


def _exchange_s(question: Question, cut: Cut, layout: Layout, pieces: _Chunked) -> list[float]:
    """Of each layer: rows that the ways of a stage read of each other, of one chunk each."""
    if layout.num_ways == 1:
        return [0.0] * len(pieces.layer_s)
    link = question.inside_stage(layout)
    sizes = _sizes_between(question, cut, layout, pieces)
    return [
        link.latency_s
        + size / link.bytes_per_s
        + question.slowed * _hands_s(question, size, layout.num_ways - 1)
        for size in sizes
    ]


def _sizes_between(question: Question, cut: Cut, layout: Layout, pieces: _Chunked) -> list[float]:
    """Bytes of those rows."""
    rows = pieces.chunk_rows * cut.replicas_of(layout.num_ways)
    return [rows * width * question.training.value_bytes for width in _given_columns(question)]


def _between_s(question: Question, cut: Cut, layout: Layout, pieces: _Chunked) -> float:
    """What it takes to hand them out and to take them in, of all layers but the first."""
    sizes = _sizes_between(question, cut, layout, pieces)[1:]
    return sum(_hands_s(question, size, layout.num_ways - 1) for size in sizes)


def _hands_s(question: Question, num_bytes: float, num_messages: int = 1) -> float:
    """Of the processors at both ends of such messages, which leave together."""
    machine = question.machine
    return question.exchange_s / 2 + num_messages * machine.message_s + num_bytes * machine.byte_s


def _sent(question: Question, cut: Cut, layout: Layout, pieces: _Chunked, sweeps: int) -> dict[str, float]:
    """Bytes of the rank that sends most: rows to the next stage, gradients to the one before, rows between ways."""
    training, last = question.training, layout.num_stages - 1
    row_bytes = training.num_nodes / layout.num_ways * training.value_bytes
    share = 0.0 if layout.num_ways == 1 else cut.replicas_of(layout.num_ways)

    def sent_by(stage: int) -> dict[str, float]:
        forward = pieces.columns[stage] if stage < last else 0
        backward = pieces.columns[stage - 1] if stage else 0
        between = share * sum(_given_columns(question)[pieces.bounds[stage] : pieces.bounds[stage + 1]])
        summed = account_gradients([pieces.weights[stage]], training.value_bytes, layout.num_ways, 0)
        return {
            "hidden": row_bytes * ((1 + sweeps) * (forward + between) + backward + between),
            "gradients": float(summed.bytes.get("gradients", 0)),
        }

    most = max((sent_by(stage) for stage in range(layout.num_stages)), key=lambda each: sum(each.values()))
    return {kind: count for kind, count in most.items() if count or kind == "hidden"}


def _given_columns(question: Question) -> list[int]:
    """Of each layer: what a row has that another way reads. The first layer's inputs are there from the start."""
    return [0, *(layer.in_columns for layer in question.training.counts.layers[1:])]
