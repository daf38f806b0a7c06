"""Epochs on 4 and 8 GPUs, foreseen from phases that virtual ranks took, by the formulas of ``polyhop plan --cluster``.

What is measured takes the place of what a device law would say; all else stays:

    compute    a law timed on this device (``plan/probe``), times what ranks took over what it says
    sample     seconds of a node and of an edge, times the same for sampling; load, quantise: their rates alike
    bytes      as forecasts count them of the real parts, times what counters had over that
    links      of presets; messages cost a GPU what ``plan/device`` has
    pipeline   on as many ranks as were measured: the schedule that ran, played through with its tasks as they took

Legend: P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from benchmarks.gpu.virtual import Seen, Way
from polyhop.cluster_planner import question_of_cluster
from polyhop.forecast import (
    GraphStatistics,
    Inputs,
    Question,
    Sight,
    Training,
    look_at,
    of_given,
)
from polyhop.forecast import (
    Seen as Looked,
)
from polyhop.forecast.alike import totals_of, way_of
from polyhop.forecast.survey import survey
from polyhop.graph import Graph
from polyhop.partition import Partition
from polyhop.plan import Cluster, Law, Link, Machine, Prediction
from polyhop.plan.cluster import presets
from polyhop.plan.machine import ANY_MODEL
from polyhop.plan.probe import Probe, measure_law
from polyhop.plan.topology import Topology
from polyhop.planner import PlanOptions, kind_of
from polyhop.strategies.pipeline_schedule import Task
from polyhop.strategies.pipeline_simulate import simulate
from polyhop.train.config import Config

__all__ = ["LINKS", "Device", "Foreseer", "Measured", "Rates", "cluster_of", "played", "rates_file"]

LINKS = {"nvlink": "p5.48xlarge", "pcie": "g5.48xlarge"}
"""Where each link's rate is taken from."""

_HOST = "p5.48xlarge"  # cores, memory and PCIe of the host, eight GPUs
_H200 = {"gpu_tflops": 66.9, "gpu_memory_gb": 141.0, "gpu_memory_gb_s": 4800.0}  # data sheet, SXM


def cluster_of(link: str) -> Cluster:
    """A host with eight H200 whose GPUs meet over a preset's link."""
    like = presets()[LINKS[link]]
    inside = {"inside_gb_s": like["inside_gb_s"], "inside_us": like["inside_us"]}
    return Cluster.from_json({"extends": _HOST, **_H200, **inside, "name": f"8 H200, {link}"})


@dataclass(frozen=True)
class Measured:
    """What all virtual ranks of a way took in a step."""

    way: Way
    ranks: Sequence[Seen]

    @property
    def busiest(self) -> int:
        """The rank whose steps are longest."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].step_s)

    def most(self, phase: str) -> float:
        return max(each.phases[phase] for each in self.ranks)

    def mean(self, phase: str) -> float:
        return sum(each.phases[phase] for each in self.ranks) / len(self.ranks)

    @property
    def sent_bytes(self) -> float:
        """Of a step, of the rank that sends most."""
        return max(sum(each.sent.values()) for each in self.ranks)


@dataclass(frozen=True)
class Device:
    """On what laws are timed. ``probes``: beside parts of the graph, of full-graph training."""

    name: str
    probes: Sequence[Probe]
    cache_bytes: float = math.inf


@dataclass(frozen=True)
class Rates:
    """What a device was measured to do, for one way."""

    law: Law
    machine: Machine
    off: Mapping[str, float] = field(default_factory=dict)  # phase -> measured over what was foreseen
    bytes_off: float = 1.0  # counted over expected


class Foreseer:
    """Of one graph and its partitions into numbers of parts."""

    def __init__(
        self,
        graph: Graph,
        partitions: Mapping[int, Partition],
        device: Device,
        fan_outs: Sequence[int],
        batch_size: int,
    ) -> None:
        self._graph, self._partitions, self._device = replace(graph, x=None), partitions, device
        self._drawn = {"num_neighbors": list(fan_outs), "batch_size": batch_size}
        inputs = Inputs(graph.num_features)
        self._plain = survey(self._graph, inputs, partitions)
        self._sights: dict[str, dict[int, Sight]] = {}
        self._trainings: dict[str, Training] = {}
        self._laws: dict[str, Law] = {}

    def training(self, way: Way) -> Training:
        return self._question(way, 4, "nvlink", self._plain).training

    def of_devices(self, way: Way, num_ranks: int, link: str) -> Prediction:
        """What ``polyhop plan --cluster`` foresees, from device laws and statistics alone."""
        question = self._question(way, num_ranks, link, self._statistics(way))
        return of_given(question, way.strategy, self._options(way, num_ranks))

    def rates(self, measured: Measured, layers_of: nn.Module | None = None) -> Rates:
        """Of the device, such that formulas give the phases that were measured. ``layers_of``: a model with layers like
        those of the way's, to be timed in its place.
        """
        way, num_ranks = measured.way, len(measured.ranks)
        base = self._question(way, num_ranks, "nvlink", self._plain)
        if way.strategy not in self._laws:
            self._laws[way.strategy] = self._law(way, base.training, layers_of)
        law = self._laws[way.strategy]
        question = replace(base, sight=self._sight(way, num_ranks), law=law, topology=None)
        expected = of_given(question, way.strategy, self._options(way, num_ranks)).sent_bytes
        free = replace(
            question, link=Link(math.inf, 0.0), machine=replace(question.machine, message_s=0.0, byte_s=0.0)
        )
        return _fitted(free, measured, self._options(way, num_ranks), expected)

    def by_formula(self, way: Way, rates: Rates, num_ranks: int, link: str) -> Prediction:
        """An epoch on so many GPUs."""
        question, cluster = self._question(way, num_ranks, link, self._plain), cluster_of(link)
        inside = replace(cluster.inside, bytes_per_s=cluster.inside.bytes_per_s / rates.bytes_off)
        topology = Topology(cluster.ranks_per_host, inside, cluster.network)
        question = replace(
            question,
            sight=self._sight(way, num_ranks),
            law=rates.law,
            machine=rates.machine,
            topology=topology,
            link=topology.among(0, num_ranks),
        )
        return of_given(question, way.strategy, self._options(way, num_ranks))

    def _question(self, way: Way, num_ranks: int, link: str, statistics: GraphStatistics) -> Question:
        """Of one training of each strategy, which keeps what was counted of its model."""
        drawn: dict[str, Any] = self._drawn if way.strategy == "split" else {}
        config = Config(strategy=way.strategy, **drawn)
        kept = self._trainings.get(way.strategy)
        model = way.make(self._graph) if kept is None else kept.model
        found = question_of_cluster(model, statistics, config, cluster_of(link), num_ranks, PlanOptions())
        training = self._trainings.setdefault(way.strategy, found.training)
        return replace(found, training=training, sight=_asked(found.sight))

    def _options(self, way: Way, num_ranks: int) -> dict[str, Any]:
        """As forecasts name them; pipelines have a stage and four chunks for each rank."""
        staged = {"stages": num_ranks, "chunks": 4 * num_ranks} if way.strategy == "pipeline" else {}
        return {**way.foreseen, **staged}

    def _sight(self, way: Way, num_ranks: int) -> Sight:
        """Of the real parts. Ways that train alike are looked at once; a pipeline needs to know of no layer."""
        training = self.training(way)
        if way.strategy == "pipeline":
            found = next((each[num_ranks] for each in self._sights.values() if num_ranks in each), None)
            if found is not None:
                return Sight(found.cut)
        kept = self._sights.setdefault(way_of(training), {})
        if num_ranks not in kept:
            kept[num_ranks] = _asked(look_at(self._graph, self._partitions[num_ranks], training))
        return kept[num_ranks]

    def _statistics(self, way: Way) -> GraphStatistics:
        """With what parts would do in this training, as ``polyhop plan NAME --cluster`` looks at them."""
        if way.strategy == "pipeline":
            return self._plain
        what = way_of(self.training(way))
        seen = [Looked(what, parts, totals_of(self._sight(way, parts))) for parts in self._partitions]
        return replace(self._plain, seen=tuple(seen))

    def _law(self, way: Way, training: Training, layers_of: nn.Module | None) -> Law:
        model, probes = layers_of or training.model, list(self._device.probes)
        is_drawn = way.strategy == "split"
        if not is_drawn:
            probes += [self._part_probe(way, parts) for parts in self._partitions]
        return measure_law(
            model,
            training.inputs.num_features,
            probes=probes,
            device=self._device.name,
            cache_bytes=self._device.cache_bytes,
            is_fresh=is_drawn,
            is_any_size=True,
        )

    def _part_probe(self, way: Way, parts: int) -> Probe:
        """As many rows and edges as a part has, or a chunk of as many stages."""
        pieces = 4 * parts if way.strategy == "pipeline" else parts
        degree = max(1, self._graph.num_edges // max(1, self._graph.num_nodes))
        return Probe(max(1, self._graph.num_nodes // pieces), degree)


def _asked(sight: Sight) -> Sight:
    """Without caches that nobody asks for here, each of which is a forecast."""
    return replace(sight, cached={})


def _fitted(free: Question, measured: Measured, given: Mapping[str, Any], expected_bytes: float) -> Rates:
    """``free``: over links that take no time, messages that cost nothing."""
    way, steps = measured.way, free.training.num_batches

    def part(name: str, question: Question) -> float:
        return of_given(question, way.strategy, given).parts.get(name, 0.0) / steps

    machine, off = free.machine, {}
    if way.strategy == "split":
        idle = replace(machine, gather_bytes_per_s=math.inf)
        off["sample"] = _over(measured.most("sample"), part("load", replace(free, machine=idle)))
        idle = replace(machine, node_s=0.0, edge_s=0.0)
        off["load"] = _over(measured.most("load"), part("load", replace(free, machine=idle)))
    if measured.most("quantise"):
        off["quantise"] = _over(measured.most("quantise"), part("quantise", free))
    # What a step costs whatever is in it is no part of the law. A pipeline's ranks are told their mean.
    took = measured.mean("compute") if way.strategy == "pipeline" else measured.most("compute")
    around = part("compute", replace(free, law=free.law * 0.0))
    off["compute"] = max(_LEAST, _over(took - around, part("compute", free) - around))
    machine = replace(
        machine,
        node_s=machine.node_s * off.get("sample", 1.0),
        edge_s=machine.edge_s * off.get("sample", 1.0),
        gather_bytes_per_s=machine.gather_bytes_per_s / off.get("load", 1.0),
        quantise_s=machine.quantise_s * off.get("quantise", 1.0),
    )
    return Rates(free.law * off["compute"], machine, off, _over(measured.sent_bytes, expected_bytes / steps))


_LEAST = 0.05  # of a law: steps so short are timed too coarsely to say that it is off by more


def _over(measured: float, foreseen: float) -> float:
    return measured / foreseen if foreseen > 0 and measured > 0 else 1.0


def played(measured: Measured, link: str) -> float:
    """Seconds of the schedule that ran, with its tasks as they took and rows as they were counted; and what the first stage
    does beside them.
    """
    inside = cluster_of(link).inside
    staged = [each.staged for each in measured.ranks]
    first = staged[0]
    assert first is not None

    def task_s(stage: int, task: Task) -> float:
        of_stage = staged[stage]
        assert of_stage is not None
        assert task.chunk is not None
        return of_stage.task_s[task.direction, task.chunk]

    def message_s(stage: int, task: Task) -> float:
        assert first is not None
        assert task.chunk is not None
        at = stage if task.direction == "forward" else stage - 1
        return inside.latency_s + first.chunk_rows[task.chunk] * first.row_bytes[at] / inside.bytes_per_s

    beside = measured.ranks[0].step_s - sum(first.task_s.values())
    return simulate(first.schedule, task_s, message_s).seconds + max(0.0, beside)


def rates_file(found: Iterable[tuple[Training, Rates]]) -> Machine:
    """Figures for ``machine`` of a cluster's file: a law for each model that was trained, and their mean for any other.

    Each rate is of the last way that was measured to have it.
    """
    laws: dict[str, Law] = {}
    kept: Machine | None = None
    for training, rates in found:
        laws[kind_of(training)] = rates.law
        one = rates.machine if kept is None else kept
        if "sample" in rates.off:
            drawn = rates.machine
            one = replace(
                one, node_s=drawn.node_s, edge_s=drawn.edge_s, gather_bytes_per_s=drawn.gather_bytes_per_s
            )
        if "quantise" in rates.off:
            one = replace(one, quantise_s=rates.machine.quantise_s)
        kept = one
    assert kept is not None, "some way was measured"
    return replace(kept, laws={**laws, ANY_MODEL: _mean(list(laws.values()))})


def _mean(laws: Sequence[Law]) -> Law:
    share = 1 / len(laws)
    total = Law(cache_bytes=laws[0].cache_bytes)
    for each in laws:
        total = replace(
            total,
            near_s=total.near_s + share * each.near_s,
            far_s=total.far_s + share * each.far_s,
            flop_s=total.flop_s + share * each.flop_s,
            row_s=total.row_s + share * each.row_s,
            call_s=total.call_s + share * each.call_s,
        )
    return total
