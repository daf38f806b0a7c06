"""Plans and curves for clusters that need not be there, on graphs of which statistics are enough.

All parts are alike, so one rank is looked at whatever their number; devices are as their published rates say, or as a host
was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from polyhop.forecast import GraphStatistics, Inputs, Question, Training, alike_sight
from polyhop.forecast.memory import with_spread
from polyhop.kernels.procedural import Virtual
from polyhop.plan import Cluster, Law, Limits, Machine, Memory, Plan, Prediction, make_plan, rank
from polyhop.plan.cluster import HERE, machine_of
from polyhop.plan.computed import computing_machine
from polyhop.plan.curve import DEVICES, Curve, curves_of
from polyhop.plan.device import (
    crowding_of,
    described,
    law_of_device,
    machine_of_device,
    measured_device,
)
from polyhop.plan.topology import Topology
from polyhop.planner import (
    PlanOptions,
    assumed_of,
    law_of,
    limits_here,
    measured_machine,
    purpose_of,
    ways_of,
)
from polyhop.train.config import Config

__all__ = ["plan_cluster", "plan_virtual", "question_of_cluster", "scale_cluster", "with_law"]


def plan_cluster(
    model: nn.Module,
    statistics: GraphStatistics,
    config: Config,
    cluster: Cluster,
    num_ranks: int,
    options: PlanOptions,
) -> Plan:
    """For so many ranks of a cluster that need not be there, on a graph that need not be either."""
    options = with_law(model, statistics, config, cluster, options)
    question = question_of_cluster(model, statistics, config, cluster, num_ranks, options)
    told = [
        *described(cluster, num_ranks, options.link),
        *_of_statistics(statistics, num_ranks),
        *assumed_of(question)[1:],
        *_of_start(question),
    ]
    return make_plan(
        _on_cluster(question, config, cluster, options),
        _limits_of(cluster, num_ranks, options.limits),
        num_ranks,
        asked=config.strategy,
        assumed=told,
        purpose=purpose_of(question.training, statistics.name),
    )


def plan_virtual(
    model: nn.Module,
    graph: Virtual,
    statistics: GraphStatistics,
    config: Config,
    num_ranks: int,
    options: PlanOptions,
) -> Plan:
    """For so many ranks on hosts like this one, of a graph that nobody stores: its statistics are all there is."""
    training = _training_of_statistics(model, statistics, config)
    machine = options.machine or measured_machine(options)
    machine, law = law_of(machine, training, options, keeps=options.machine is None)
    machine, sight = computing_machine(machine, graph), alike_sight(statistics, training, num_ranks)
    crowding = num_ranks / machine.cores if num_ranks > 1 else 0.0
    question = Question(training, sight, num_ranks, machine, options.link or machine.link, law, crowding)
    return make_plan(
        ways_of(question, config, options),
        limits_here(question, options.limits),
        num_ranks,
        asked=config.strategy,
        assumed=[*_of_statistics(statistics, num_ranks)[:1], *assumed_of(question)],
        purpose=purpose_of(training, statistics.name),
    )


def _training_of_statistics(model: nn.Module, statistics: GraphStatistics, config: Config) -> Training:
    dtype = getattr(torch, statistics.row_dtype)
    return Training(
        model,
        Inputs(statistics.num_features, dtype, statistics.row_length, are_computed=statistics.is_computed),
        statistics.num_nodes,
        statistics.num_edges,
        statistics.num_train,
        config.num_neighbors,
        config.batch_size or 1024,
        config.feature_dtype,
        max(1, config.max_epochs),
        config.prefetch,
        config.cache_bytes,
        config.memory_bytes,
        device_cache_bytes=config.device_cache_bytes,
    )


def scale_cluster(
    model: nn.Module,
    statistics: GraphStatistics,
    config: Config,
    cluster: Cluster,
    options: PlanOptions,
    chosen: Prediction,
    devices: Sequence[int] = DEVICES,
) -> list[Curve]:
    """What an epoch would take on more and more ranks, of as many hosts of the cluster's kind as they fill."""
    options = with_law(model, statistics, config, cluster, options)
    found, every = {}, replace(options, is_given=False)
    for num_ranks in devices:
        question = question_of_cluster(model, statistics, config, cluster, num_ranks, every)
        ways = _on_cluster(question, config, cluster, every)
        if ways:
            found[num_ranks] = rank(ways, _limits_of(cluster, num_ranks, options.limits))
    return curves_of(found, chosen)


def with_law(
    model: nn.Module, statistics: GraphStatistics, config: Config, cluster: Cluster, options: PlanOptions
) -> PlanOptions:
    """The options with the figures that the cluster names and a law of the model in them: timed once for all plans."""
    if cluster.machine is None:
        return options
    machine, _ = _timed(_training_of_statistics(model, statistics, config), cluster, options)
    return replace(options, machine=machine)


def _timed(training: Training, cluster: Cluster, options: PlanOptions) -> tuple[Machine, Law]:
    """The figures and the law, which is timed on this host where they have none."""
    assert cluster.machine is not None, "a cluster of published rates has a law of its own"
    is_here = options.machine is None and cluster.machine == HERE
    machine = options.machine or machine_of(cluster.machine)
    return law_of(machine, training, options, keeps=is_here)


def question_of_cluster(
    model: nn.Module,
    statistics: GraphStatistics,
    config: Config,
    cluster: Cluster,
    num_ranks: int,
    options: PlanOptions,
) -> Question:
    """What forecasts are asked for such a plan."""
    training = _training_of_statistics(model, statistics, config)
    topology = Topology(cluster.ranks_per_host, cluster.inside, cluster.network)
    if options.link is not None:  # between any two ranks, on one host or not
        topology = Topology(1, options.link, options.link)
    if cluster.machine is None:
        machine = options.machine or machine_of_device(cluster, num_ranks)
        law = law_of_device(cluster, num_ranks)
    else:
        machine, law = _timed(training, cluster, options)
        machine = measured_device(machine, cluster, num_ranks) if cluster.gpus else machine
    sight = alike_sight(statistics, training, num_ranks)
    crowding = crowding_of(cluster, machine.cores, num_ranks) if num_ranks > 1 else 0.0
    link = topology.among(0, num_ranks)
    link = replace(link, bytes_per_s=link.bytes_per_s / sight.busiest)  # all wait for the busiest
    device = "cuda" if cluster.gpus else "cpu"
    return Question(training, sight, num_ranks, machine, link, law, crowding, topology, device)


def _on_cluster(
    question: Question, config: Config, cluster: Cluster, options: PlanOptions
) -> list[Prediction]:
    """Of all ways. Functions compute on processors: beside GPUs they are not compared."""
    found = ways_of(question, config, options)
    possible = [each for each in found if not (cluster.gpus and each.strategy == "serverless")]
    return [_on_hosts(each, question, cluster) for each in possible]


def _on_hosts(given: Prediction, question: Question, cluster: Cluster) -> Prediction:
    """With what its hosts cost an epoch."""
    dollars = cluster.dollars(question.num_ranks, given.epoch_s)
    memory = _beside_gpus(given.memory, question) if cluster.gpus else given.memory
    sent = {kind: num_bytes * question.sight.busiest for kind, num_bytes in given.sent.items()}
    return replace(given, dollars=dollars, memory=memory, sent=sent)


def _beside_gpus(given: Memory, question: Question) -> Memory:
    """Input rows of mini-batches stay in the host's memory; where GPUs sum, each edge's message is written out."""
    is_drawn, written = question.training.num_neighbors is not None, _message_bytes(question)
    held = given.items["inputs"] if is_drawn else 0.0
    items = {
        **given.items,
        "inputs": given.items["inputs"] - held,
        "messages": given.items.get("messages", 0.0) + written,
    }
    found = replace(
        given,
        training=given.training - held + written,
        evaluation=given.evaluation - held,
        host=held,
        items=items,
    )
    return with_spread(question, found)


def _message_bytes(question: Question) -> float:
    """Of the edges of a layer, and of their gradients."""
    flows, training = question.sight.flows, question.training
    edges = float(question.sight.cut.edges[0] if flows is None else flows.own_edges[-1, 0].sum())
    columns = max(min(layer.in_columns, layer.mapped_columns) for layer in training.counts.layers)
    return 2 * edges * columns * training.value_bytes


def _limits_of(cluster: Cluster, num_ranks: int, limits: Limits) -> Limits:
    here = min(cluster.ranks_per_host, num_ranks)
    host = 1e9 * cluster.memory_gb / here
    device = 1e9 * cluster.gpu_memory_gb if cluster.gpus else host
    return replace(limits, device_bytes=device, host_bytes=host if cluster.gpus else math.inf)


def _of_start(question: Question) -> list[tuple[str, str]]:
    """Of memory until the first step, beside what is assumed of steps."""
    if question.num_ranks == 1 or question.training.inputs.are_computed:
        return []
    if question.has_gpus:
        return [("start", "takes no memory of GPUs: graph and parts are loaded by their hosts")]
    return [("start", "parts: from a folder (--parts); without one every rank loads the whole graph")]


def _of_statistics(statistics: GraphStatistics, num_ranks: int) -> list[tuple[str, str]]:
    known = sorted(statistics.halo)
    if not known:
        parts = "as if nodes lay at random: nothing was measured of parts"
    else:
        last = (
            "as measured"
            if num_ranks in known
            else "from what was measured with " + ", ".join(map(str, known))
        )
        parts = (
            f"all alike; rows that cross {last} parts"
            if num_ranks not in known
            else f"all alike; rows that cross {last}"
        )
    sizes = (
        f"{statistics.num_nodes:,} nodes, {statistics.num_edges:,} edges, {statistics.num_features} features"
    )
    return [("graph", f"{statistics.name}: {sizes}"), ("parts of it", parts)]
