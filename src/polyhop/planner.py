"""From a model and a graph to a plan: what ranks see, what the machine can do, what every strategy would take, the choice.

In one process (``plan_graph``) the ranks are threads and the graph is in memory, without its features. On ranks
(``plan_together``) each looks at its own part, the links between them are measured, and all are told the plan of rank 0.
"""

from __future__ import annotations

import statistics as numbers
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import nn

from polyhop.comm import Collective
from polyhop.datasets import GraphSizes
from polyhop.errors import ConfigError, PolyhopError, unknown
from polyhop.forecast import (
    Inputs,
    Question,
    Sight,
    Training,
    alike_sight,
    check_foreseen,
    labelled,
    look,
    look_at,
    of_given,
    predictions,
    statistics_of_virtual,
)
from polyhop.graph import Graph, MatrixFeatures, ProceduralPart, SharedGraph, SparseFeatures
from polyhop.graph.procedural import ProceduralFeatures
from polyhop.nn import GATConv
from polyhop.nn.counts import count_model
from polyhop.partition import Partition
from polyhop.plan import (
    Law,
    Limits,
    Link,
    Machine,
    Plan,
    Prediction,
    Purpose,
    load_machine,
    make_plan,
    save_machine,
)
from polyhop.plan.apart import ApartError, run_apart
from polyhop.plan.calibrate import measure_cores, measure_messages, measured_law
from polyhop.plan.computed import computing_machine
from polyhop.plan.learn import corrected, learn
from polyhop.plan.machine import ANY_MODEL, host_name
from polyhop.strategies import STRATEGIES
from polyhop.strategies.macro_auto import ranks_to_a_core
from polyhop.train.config import Config
from polyhop.train.together import share_value

__all__ = [
    "ANY_MODEL",
    "FOR_ALL",
    "PlanOptions",
    "assumed_of",
    "inputs_of",
    "kind_of",
    "law_of",
    "learn_from",
    "limits_here",
    "measured_machine",
    "plan_graph",
    "plan_together",
    "purpose_of",
    "settings_of",
    "strategies_taking",
    "training_of",
    "unread_inputs",
    "ways_of",
]

_LEAST_EPOCHS = 4  # of a run that teaches
# Options that say what is trained and not how it is spread: strategies may ignore them.
FOR_ALL = {
    "num_neighbors",
    "batch_size",
    "seed",
    "max_epochs",
    "optimizer",
    "momentum",
    "sampler",
    "prefetch",
    "memory",
}
FOR_ALL |= {"labor_dependence", "feature_dtype", "num_workers", "spill_dir", "cache_bytes", "memory_bytes"}

_ALSO = {"split_groups", "device_cache"}  # as the trainer names what sets a way apart

Tell = Callable[[str], None]
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class PlanOptions:
    """How to plan, beside what is to be trained."""

    limits: Limits = field(default_factory=Limits)
    machine: Machine | None = None  # None: as measured on this host, now if it was not yet
    link: Link | None = None  # between ranks; None: as measured
    tell: Tell = lambda text: None  # what takes long
    is_given: bool = (
        False  # the strategy trains with its options as they are: nothing is chosen, one way foreseen
    )
    trains_here: bool = False  # this process will train: what is measured for the plan is, in one of its own

    def measure(self, function: Callable[..., _Found], *given: Any, **named: Any) -> _Found:
        """What comes of a function that times this host; a process that will train must not hold what that takes."""
        if self.trains_here:
            try:
                return run_apart(function, *given, **named)
            except ApartError as error:
                self.tell(f"measured in this process, which takes memory here: in one of its own, {error}")
        return function(*given, **named)


def inputs_of(graph: Graph | SharedGraph) -> Inputs:
    """What a graph's rows are like."""
    x = graph.x
    if isinstance(x, ProceduralFeatures):
        return Inputs(x.num_features, are_computed=True)
    if isinstance(x, SparseFeatures):
        return Inputs(x.num_features, row_length=x.rows.values.numel() / max(1, x.num_rows))
    if isinstance(x, MatrixFeatures):
        return Inputs(x.num_features, x.dtype, has_scale=x.scale is not None)
    return Inputs(graph.num_features)


def unread_inputs(sizes: GraphSizes) -> Inputs:
    """The same of rows whose headers alone were read."""
    import numpy as np

    dtype = torch.from_numpy(np.empty(0, dtype=sizes.row_dtype)).dtype
    return Inputs(sizes.num_features, dtype, sizes.row_length, sizes.has_scale)


def training_of(
    model: nn.Module, graph: Graph | SharedGraph, config: Config, inputs: Inputs, num_train: int
) -> Training:
    fan_outs, layers = config.num_neighbors, count_model(model, inputs.num_features, inputs.row_length)
    if fan_outs is not None and len(fan_outs) != layers.num_layers:
        raise ConfigError(
            f"num_neighbors={list(fan_outs)} for a model of {layers.num_layers} layers: expected one fan-out per layer, "
            "from the seeds outward (-1 = all)"
        )
    weight = graph.edge_weight if isinstance(graph, Graph) else graph.part.edge_weight
    loops = graph.loop_weight if isinstance(graph, Graph) else graph.part.loop_weight
    return Training(
        model,
        inputs,
        graph.num_nodes,
        graph.num_edges,
        num_train,
        config.num_neighbors,
        config.batch_size or 1024,
        config.feature_dtype,
        max(1, config.max_epochs),
        config.prefetch,
        config.cache_bytes,
        config.memory_bytes,
        weight is not None,
        loops is not None,
        loads_whole=isinstance(graph, Graph) or graph.folder is None,
    )


def plan_graph(
    model: nn.Module,
    graph: Graph,
    config: Config,
    partition: Partition,
    options: PlanOptions,
    *,
    inputs: Inputs | None = None,
) -> Plan:
    """For as many ranks as the partition has parts, on hosts like this one."""
    if options.is_given:
        check_foreseen(config.strategy, _own_options(config))
    known = inputs or inputs_of(graph)
    training = training_of(model, graph, config, known, labelled(graph).numel())
    machine = options.machine or measured_machine(options)
    machine, law = law_of(machine, training, options, keeps=options.machine is None)
    ranks = partition.num_parts
    sight = look_at(graph, partition, training)
    question = Question(
        training,
        sight,
        ranks,
        machine,
        options.link or machine.link,
        law,
        ranks / machine.cores if ranks > 1 else 0.0,
    )
    made = _plan(question, config, options, graph.name)
    return replace(made, partitioner=partition.method if ranks > 1 else None)


def plan_together(
    model: nn.Module, graph: SharedGraph, config: Config, line: Collective, options: PlanOptions
) -> Plan:
    """The same plan on all ranks, which call it together."""
    if options.is_given:
        check_foreseen(config.strategy, _own_options(config))
    num_train = int(line.all_reduce(torch.tensor([float(labelled(graph).numel())]), kind="sizes"))
    training = training_of(model, graph, config, _agreed(inputs_of(graph), graph, line), num_train)
    link, message_s, byte_s = measure_messages(line)
    sight, crowding = _sight(graph, training, line), ranks_to_a_core(line)
    made: dict[str, Any] | None = None
    machine = options.machine or _known_machine(line, options)
    machine = replace(machine, message_s=message_s, byte_s=byte_s)
    if isinstance(graph.part, ProceduralPart):
        machine = computing_machine(machine, graph.part.graph)
    if line.rank == 0:
        try:
            machine, law = law_of(machine, training, options, keeps=options.machine is None)
            question = Question(training, sight, line.num_ranks, machine, options.link or link, law, crowding)
            made = {"plan": _plan(question, config, options, graph.name).to_json()}
        except PolyhopError as error:  # the others wait for an answer
            made = {"error": str(error)}
    told = share_value(made, line)
    if "error" in told:
        raise ConfigError(told["error"])
    return Plan.from_json(told["plan"])


def _sight(graph: SharedGraph, training: Training, line: Collective) -> Sight:
    part = graph.part
    if not isinstance(part, ProceduralPart):
        return look(line, graph, training)
    return alike_sight(
        statistics_of_virtual(part.graph, part.num_train, graph.name), training, line.num_ranks
    )


def _agreed(inputs: Inputs, graph: SharedGraph, line: Collective) -> Inputs:
    """Of sparse rows the mean over the whole graph."""
    if inputs.row_length is None:
        return inputs
    rows = graph.part.num_nodes
    told = torch.tensor([inputs.row_length * rows, rows], dtype=torch.float64)
    total, count = line.all_reduce(told, kind="sizes").tolist()
    return replace(inputs, row_length=total / max(1.0, count))


def _known_machine(line: Collective, options: PlanOptions) -> Machine:
    """Rank 0's, on every rank."""
    own = measured_machine(options).to_json() if line.rank == 0 else None
    return Machine.from_json(share_value(own, line))


def measured_machine(options: PlanOptions) -> Machine:
    """As kept in the cache; measured now where it is not, messages as between processes of a host like this one."""
    found = load_machine()
    if found is None:
        options.tell("measuring this host, once (polyhop env --calibrate does it again)")
        found = options.measure(measure_cores)
        found = replace(found, message_s=1.5e-4, byte_s=3e-10, link=Link(1.5e9, 4e-4))
        _keep(found, options.tell)
    return found


def _keep(machine: Machine, tell: Tell) -> None:
    """In the user's cache; where it cannot be written, plans are made all the same, and measured for anew."""
    try:
        save_machine(machine)
    except ConfigError as error:
        tell(f"what was measured is not kept: {error}")


def strategies_taking(config: Config) -> list[str]:
    """Strategies that know every option that was set. ConfigError if options are set that no one strategy has together."""
    known = {name: {each.name for each in fields(module.Config)} for name, module in STRATEGIES.items()}
    owned = set().union(*known.values()) - FOR_ALL
    given = [
        each.name
        for each in fields(config)
        if each.name in owned and getattr(config, each.name) != each.default
    ]
    found = [name for name, options in known.items() if set(given) <= options]
    if not found:
        raise ConfigError(
            f"no strategy has all of these options: {', '.join(sorted(given))}; leave some out, or name the strategy"
        )
    return found


def law_of(machine: Machine, training: Training, options: PlanOptions, *, keeps: bool) -> tuple[Machine, Law]:
    """Of the model; measured where it was not yet, and kept."""
    kind = kind_of(training)
    if kind not in machine.laws and ANY_MODEL in machine.laws:
        return machine, machine.laws[ANY_MODEL]
    if kind not in machine.laws:
        options.tell(f"timing steps of {type(training.model).__name__}")
        parameter = training.weights[0]
        if parameter.device.type != "cpu":  # steps there take memory of the device, which is given back
            options = replace(options, trains_here=False)
        law = options.measure(
            measured_law,
            training.model,
            training.inputs.num_features,
            input_values=training.inputs.row_length,
            dtype=parameter.dtype,
            device=parameter.device.type,
            is_fresh=training.num_neighbors is not None,
        )
        machine = machine.with_law(kind, law)
        stored = load_machine() if keeps else None
        if stored is not None:
            _keep(stored.with_law(kind, law), options.tell)
    return machine, machine.laws[kind]


def kind_of(training: Training) -> str:
    """What steps of a model are timed once for: its class, its widths, how its rows are kept."""
    model, inputs = training.model, training.inputs
    widths = sorted(
        {(layer.in_columns, layer.mapped_columns, layer.out_columns) for layer in training.counts.layers}
    )
    dropped = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    norms = sorted({type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__})
    rows = "dense" if inputs.row_length is None else f"sparse {inputs.row_length:.0f}"
    parameter = training.weights[0]
    way = "full graph" if training.num_neighbors is None else "mini-batches"
    told = [type(model).__name__, str(widths), rows, str(parameter.dtype), parameter.device.type, way]
    return " ".join([*told, *norms, *(["dropout"] if dropped else [])])


def ways_of(question: Question, config: Config, options: PlanOptions) -> list[Prediction]:
    """Of all ways that take the options."""
    taking, past = strategies_taking(config), question.machine.past
    found = [corrected(each, past) for each in predictions(question) if each.strategy in taking]
    if options.is_given:
        way = corrected(of_given(question, config.strategy, _own_options(config)), past)
        found = [way, *(each for each in found if each.strategy != config.strategy)]
    return found


def purpose_of(training: Training, graph: str) -> Purpose:
    """What plans of it are for; ``graph``: its name."""
    is_whole = training.num_neighbors is None
    model = training.model
    hidden = getattr(model, "hidden_channels", None)
    return Purpose(
        graph,
        training.num_nodes,
        training.num_edges,
        type(model).__name__,
        training.counts.num_layers,
        hidden if isinstance(hidden, int) else None,
        None if training.num_neighbors is None else tuple(training.num_neighbors),
        None if is_whole else training.batch_size,
        next((each.heads for each in model.modules() if isinstance(each, GATConv)), None),
    )


def settings_of(plan: Plan) -> dict[str, Any]:
    """Of a trainer that obeys a plan; ConfigError if there is no such strategy or option."""
    chosen = plan.chosen
    if chosen.strategy not in STRATEGIES:
        raise ConfigError(f"a plan of {unknown('strategy', chosen.strategy, STRATEGIES)}")
    known = {each.name for each in fields(Config)}
    strange = sorted(set(chosen.options) - known)
    if strange:
        raise ConfigError(f"a plan with {unknown('option', strange[0], known)}")
    return {**chosen.options, "strategy": chosen.strategy}


def _plan(question: Question, config: Config, options: PlanOptions, graph: str) -> Plan:
    return make_plan(
        ways_of(question, config, options),
        limits_here(question, options.limits),
        question.num_ranks,
        asked=config.strategy,
        assumed=assumed_of(question),
        alone=_alone(question),
        purpose=purpose_of(question.training, graph),
    )


def limits_here(question: Question, limits: Limits) -> Limits:
    """Ranks of a host share its memory, whatever is allowed."""
    if question.training.weights[0].device.type != "cpu":
        return limits
    here = max(1, round(question.crowding * question.machine.cores))
    return replace(
        limits,
        device_bytes=min(limits.device_bytes, question.machine.memory_bytes / here),
        shares_host=here > 1,
    )


def _own_options(config: Config) -> dict[str, Any]:
    """Those of the strategy that are not left as they are, as forecasts name them."""
    known = {each.name for each in fields(STRATEGIES[config.strategy].Config)} - FOR_ALL
    own = [each for each in fields(config) if each.name in known or each.name in _ALSO]
    given = {
        each.name: getattr(config, each.name) for each in own if getattr(config, each.name) != each.default
    }
    return given | ({"cache": config.cache_bytes} if config.cache_bytes else {})


def learn_from(plan: Plan, epoch_seconds: Sequence[float]) -> None:
    """Keep how long epochs of a run took against what was foreseen; the first warms up, and does not count."""
    machine = load_machine()
    if machine is None or len(epoch_seconds) < _LEAST_EPOCHS:
        return
    with suppress(ConfigError):
        save_machine(learn(machine, plan.chosen, numbers.median(epoch_seconds[1:])))


def _alone(question: Question) -> Prediction | None:
    """One process with all cores of a host: what ranks must beat. Of mini-batches it is not known without looking again."""
    machine, training = question.machine, question.training
    gain = max(1.0, machine.thread_gain)
    law = replace(question.law * (1 / gain), call_s=question.law.call_s, cache_bytes=machine.cache_bytes)
    if training.num_neighbors is not None or question.num_ranks == 1:
        return None
    one = replace(question, num_ranks=1, law=law, crowding=0.0, sight=Sight(question.sight.cut))
    return next(iter(predictions(one)))


def _timed(question: Question) -> str:
    """Where the law was: figures of a machine may be of another one."""
    where = "this host" if question.law.host == host_name() else question.law.host
    is_own = kind_of(question.training) in question.machine.laws
    return f"as timed on {where}{'' if is_own else ' with another model'}"


def assumed_of(question: Question) -> list[tuple[str, Any]]:
    machine, link, training = question.machine, question.link, question.training
    told: list[tuple[str, Any]] = [
        (
            "host",
            f"{machine.name}: {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB; {machine.source}",
        ),
        (
            "ranks",
            f"{question.num_ranks}, {question.crowding:.2g} to a core"
            if question.num_ranks > 1
            else "one process with all cores",
        ),
    ]
    if question.num_ranks > 1:
        rate = 8e-9 * link.bytes_per_s
        told.append(("links", f"{rate:.3g} Gbit/s a rank, {1e3 * link.latency_s:.3g} ms a round of messages"))
        told.append(("parts", f"{question.sight.cut.replicas:.2f} rows of other parts read, per node"))
    if question.law.host:
        told.append(("computing", _timed(question)))
    batches = (
        "full graph" if training.num_neighbors is None else f"{training.num_steps:,} mini-batches an epoch"
    )
    told.append(("steps", f"{batches}, {training.num_train:,} train nodes"))
    return told
