"""Forecasts of training on the full graph: ``single`` in one process, ``halo`` on ranks, exact or approximate.

A step of ``halo``, layer by layer, forward and then backward, all ranks keeping step (c ranks to a core):

    hands   c * CPU of messages and their bytes
    layer   c * (central + marginal + exchange_s) + max(hands, latency + bytes / bandwidth - c * central)
    after   gradients of weights: c * exchange_s + latency + bytes / bandwidth; those of the first layer come last

Rows and edges of each layer are those that ranks would lay out: what the loss does not read is neither sent nor summed, and
dense inputs are summed once, before the first step.

Legend: P ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from polyhop.errors import UnsupportedError
from polyhop.forecast.memory import halo_memory, single_memory
from polyhop.forecast.question import Question
from polyhop.forecast.sight import LayerCut
from polyhop.graph import Sizes
from polyhop.nn.counts import Counts, LayerCounts
from polyhop.nn.model import Model
from polyhop.plan import Prediction
from polyhop.strategies import halo_cost
from polyhop.strategies.halo import Config
from polyhop.strategies.halo_estimate import facts_of_rows
from polyhop.strategies.halo_plan import Plan

__all__ = ["halo_prediction", "halo_predictions", "single_prediction"]

_FORWARD = 1 / 3  # of a layer's computing
_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": True},
    {"bits": 8},
    {"bits": 4},
    {"bits": "adaptive"},
    {"halo": "stale"},
)


def single_prediction(question: Question) -> Prediction:
    """One process: every layer over all rows."""
    training = question.training
    each = Sizes(training.num_nodes, training.num_nodes, training.num_edges)
    taken = question.step_s + question.law.seconds(training.counts.of([each] * training.counts.num_layers))
    return Prediction(
        strategy="single",
        options={},
        name="single",
        is_exact=True,
        epoch_s=taken,
        parts={"compute": taken},
        memory=single_memory(question),
        evaluate_s=_FORWARD * taken,
        bound="the cores are busy",
    )


def halo_predictions(question: Question) -> Iterator[Prediction]:
    """Exact; with layers computed again, for memory; approximate ways."""
    for options in _WAYS:
        yield halo_prediction(question, options)


def halo_prediction(question: Question, options: Mapping[str, Any]) -> Prediction:
    """``options``: those that are not as usual, of those that ``given.FORESEEN`` has."""
    training, config = question.training, Config(**options)
    plan = Plan.of(training.model, config, training.graph_sizes)
    rows = _rows(question, config, plan)
    facts = facts_of_rows(training.model, config, plan, rows, is_alike=question.sight.is_alike)
    costs = [halo_cost.estimate(facts, rank) for rank in question.ranks]
    found = _epoch(question, plan, facts, config)
    parts = {"compute": found.compute_s, "wait": found.wait_s, "quantise": found.quantise_s}
    return Prediction(
        strategy="halo",
        options=dict(options),
        name=_name(config),
        is_exact=config.bits == 32 and config.halo == "exact",
        epoch_s=found.total_s,
        parts={part: value for part, value in parts.items() if value},
        memory=halo_memory(question, config, plan),
        sent=dict(max(costs, key=lambda cost: cost.total_bytes).bytes),
        evaluate_s=_FORWARD * found.compute_s,
        bound="the links are busy" if found.wait_s > found.compute_s else "the cores are busy",
        num_ranks=question.num_ranks,
    )


def _rows(question: Question, config: Config, plan: Plan) -> list[Tensor]:
    """float64 [P, P] of each layer: that rank i sends to rank j. Without sums all that parts read of one another."""
    whole = question.sight.cut.halo if config.naive_halo or not config.halo_sums else None
    return [
        (layer.rows if whole is None else whole) * bool(seen.columns)
        for layer, seen in zip(question.sight.layers, plan.seen, strict=True)
    ]


def _name(config: Config) -> str:
    """What sets it apart."""
    told = ["halo"]
    if config.bits != 32:
        told.append(f"{config.bits} bits")
    told += [] if config.halo == "exact" else [config.halo]
    told += ["layers computed again"] if config.recompute else []
    told += ["sends everything"] if config.naive_halo else [] if config.halo_sums else ["no sums"]
    told += [] if config.overlap else ["nothing hidden"]
    return ", ".join(told)


@dataclass(frozen=True)
class _Epoch:
    """Seconds of a step, one thing after the other."""

    compute_s: float = 0.0
    wait_s: float = 0.0  # for rows that computing does not hide
    quantise_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.wait_s + self.quantise_s

    def __add__(self, other: _Epoch) -> _Epoch:
        return _Epoch(
            self.compute_s + other.compute_s, self.wait_s + other.wait_s, self.quantise_s + other.quantise_s
        )


def _epoch(question: Question, plan: Plan, facts: halo_cost.Facts, config: Config) -> _Epoch:
    """All ranks keep step: of each layer and direction the slowest counts."""
    training, cut = question.training, question.sight.cut
    around = training.counts.around(float(cut.nodes.max()), training.num_train / cut.num_parts)
    total = _Epoch(compute_s=question.slowed * (question.step_s + question.law.seconds(around)))
    messages = [halo_cost.expected(facts, rank) for rank in question.ranks]
    is_summed = bool(plan.num_plain) and training.inputs.row_length is None and _sums_once(training.model)
    for at, (counts, layer) in enumerate(zip(training.counts.layers, question.sight.layers, strict=True)):
        computing = _computing(question, counts, layer, at, has_edges=not (is_summed and at == 0))
        for direction, share in (("forward", _FORWARD), ("backward", 1 - _FORWARD)):
            sent = [[m for m in each if m.layer == at and m.direction == direction] for each in messages]
            here = [(share * central, share * marginal) for central, marginal in computing]
            total += _pass(question, here, sent, config, min(counts.in_columns, counts.mapped_columns))
    if config.recompute:
        total = replace(total, compute_s=total.compute_s * (1 + _FORWARD))
    if config.halo == "stale":  # rows of the step before are read: links are busy beside all computing
        total = replace(total, wait_s=max(0.0, total.wait_s - total.compute_s))
    return total + _Epoch(wait_s=_gradients_s(question, facts))


def _computing(
    question: Question, counts: LayerCounts, layer: LayerCut, at: int, *, has_edges: bool
) -> list[tuple[float, float]]:
    """(central, marginal) seconds of each rank, forward and backward, alone on its core."""
    found, cut = [], question.sight.cut
    for rank in question.ranks:
        nodes, halo = float(cut.nodes[rank]), float(layer.rows[:, rank].sum())
        edges = float(layer.edges[rank] + layer.marginal_edges[rank]) if has_edges else 0.0
        sizes = Sizes(round(nodes + halo), round(nodes), round(edges))
        total: Counts = counts.of(sizes, nodes if at else None)
        seconds = question.law.seconds(total)
        marginal = float(layer.marginal_edges[rank]) / max(edges, 1.0) if has_edges else 0.0
        found.append((seconds * (1 - marginal), seconds * marginal))
    return found


def _pass(
    question: Question,
    computing: Sequence[tuple[float, float]],
    sent: Sequence[Sequence[halo_cost.Crossed]],
    config: Config,
    columns: int,
) -> _Epoch:
    """One direction of one layer: the slowest rank's."""
    found = [
        _pass_of_rank(question, rank, central, marginal, sent, config, columns)
        for rank, (central, marginal) in enumerate(computing)
    ]
    return max(found, key=lambda each: each.total_s)


def _pass_of_rank(
    question: Question,
    rank: int,
    central: float,
    marginal: float,
    sent: Sequence[Sequence[halo_cost.Crossed]],
    config: Config,
    columns: int,
) -> _Epoch:
    slowed, machine, link = question.slowed, question.machine, question.link
    leaves = sum(m.num_bytes for m in sent[rank])
    comes = sum(m.num_bytes for each in sent for m in each if m.peer == rank)
    if not leaves and not comes:
        return _Epoch(slowed * (central + marginal))
    hands = slowed * (len(sent[rank]) * machine.message_s + leaves * machine.byte_s)
    moving = link.latency_s + max(leaves, comes) / link.bytes_per_s
    hidden = slowed * central if config.overlap and not config.naive_halo else 0.0
    wait = max(0.0, moving - hands) if config.halo == "stale" else max(hands, moving - hidden)
    values = 2 * columns * sum(m.num_rows for m in sent[rank]) if config.bits != 32 else 0
    compute = slowed * (central + marginal + question.exchange_s) + (hands if config.halo == "stale" else 0.0)
    return _Epoch(compute, wait, slowed * values * machine.quantise_s)


def _gradients_s(question: Question, facts: halo_cost.Facts) -> float:
    """Of summing the gradients of weights: those of the first layer, often most of them, are known last of all."""
    ranks = question.num_ranks
    size = sum(facts.bucket_sizes) * facts.value_bytes * 2 * (ranks - 1) / ranks
    return question.slowed * question.exchange_s + question.link.latency_s + size / question.link.bytes_per_s


def _sums_once(model: nn.Module) -> bool:
    """Whether no parameter changes what the first layer sums of its inputs."""
    if not isinstance(model, Model):
        return False
    try:
        model.fixed_aggregate()
    except UnsupportedError:
        return False
    return True
