"""Forecasts of training on mini-batches: ``single``, ``data``, ``macro``, ``split``, ``pushpull``. All have the weights of
one process, to rounding.

What a mini-batch moves is expected from inclusion probabilities (``flows``). Times follow from what a step asks of every
rank (``work``, ``split_choice``) and from windows (``macro_plan``).

Legend: P ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from polyhop.comm import Cost
from polyhop.forecast.loads import Kept, crossing, drawn, of_peers
from polyhop.forecast.memory import batches_memory, windows_memory
from polyhop.forecast.question import Question
from polyhop.graph import Sizes
from polyhop.nn.counts import Counts
from polyhop.plan import Memory, Prediction, size
from polyhop.sample.wire import Wire
from polyhop.strategies import macro_plan
from polyhop.strategies.flows import Flows
from polyhop.strategies.shape import Shape
from polyhop.strategies.split_choice import Rates, Seconds, expected, seconds, variants
from polyhop.strategies.work import Variant, Work

__all__ = ["evaluation_s", "of_variant", "of_windows", "predictions"]

_MESSAGE_S = 0.25e-3  # of what ranks do for a message beside sending it
_SHARED_ROUND_S = (
    2e-3  # fitted to 55 runs on 2 and 4 ranks of 2 cores; measured alone it is anything from 0.1 to 30 ms
)
_SPARSE = 6.0  # times as long to put together a byte of sparse rows
_ROW_PASSES = 4  # over a row of a window: read, sent, received, stored
_WINDOW_S = 2.2e-3  # of a window, for each hop and peer: 20 ms with 3 hops between 4 ranks
_ALL = ("data", "split", "pushpull")
_WITHOUT_LISTS = ("data",)  # asks for what is drawn, and for nothing else of a part; so do windows
_BOUNDS = {
    "compute": "the cores are busy",
    "link": "the links are busy",
    "train": "training is slower than loading",
    "ahead": "loading is slower than training",
}


def predictions(question: Question) -> Iterator[Prediction]:
    """Of every way to train such mini-batches; ``single`` where there is one rank."""
    flows, shape, rates = question.sight.flows, _shape(question), _rates(question)
    assert flows is not None, "ranks have looked at mini-batches"
    if question.num_ranks == 1:
        yield _single(question, flows, shape, rates)
        return
    among = variants(
        flows.num_hops,
        has_cache=question.training.cache_bytes > 0,
        by_columns=shape.push is not None and not question.training.inputs.row_length,
        strategies=_WITHOUT_LISTS if question.training.inputs.are_computed else _ALL,
    )
    for variant in among:
        yield _of_variant(question, flows, shape, rates, variant)
    for num_bytes, cached in question.sight.cached.items():
        yield _with_cache(question, num_bytes, cached, shape, rates)
    yield _macro(question, flows, shape)


def _with_cache(question: Question, num_bytes: int, flows: Flows, shape: Shape, rates: Rates) -> Prediction:
    """``data`` with a cache that the user leaves open."""
    asked = replace(question, training=replace(question.training, cache_bytes=num_bytes))
    found = _of_variant(asked, flows, shape, rates, Variant("data", has_cache=True))
    return replace(found, name=f"data with a cache of {size(num_bytes)}")


def of_windows(question: Question, num_batches: int) -> Prediction:
    """``macro`` with windows of so many mini-batches."""
    assert question.sight.flows is not None, "ranks have looked at mini-batches"
    return _macro(question, question.sight.flows, _shape(question), num_batches)


def of_variant(question: Question, variant: Variant, kept: Kept, uneven: float = 1.0) -> Prediction:
    """A way to train whose GPUs keep input rows or draw neighbours, whether or not ours of that name can.

    ``uneven``: work of the busiest rank over the mean, where parts are known to be so.
    """
    assert question.sight.flows is not None, "ranks have looked at mini-batches"
    shape, rates = _shape(question), _rates(question)
    return _of_variant(question, question.sight.flows, shape, rates, variant, kept, uneven)


def _of_variant(
    question: Question,
    flows: Flows,
    shape: Shape,
    rates: Rates,
    variant: Variant,
    kept: Kept | None = None,
    uneven: float = 1.0,
) -> Prediction:
    given = question.training.device_cache_bytes if variant.strategy == "split" else 0
    room = kept or Kept(given)
    works = [_times(work, uneven) for work in _loading(question, flows, shape, variant, room)]
    taken = seconds(_with_ends(question, works), rates)
    options = _trainer_options(variant.options(question.training.cache_bytes))
    memory = batches_memory(question, flows, variant, kept_bytes=room.num_bytes)
    return _prediction(question, variant.strategy, str(variant), options, taken, works, memory)


def _times(work: Work, uneven: float) -> Work:
    """So much more work, in as many calls and rounds."""
    if uneven == 1:
        return work
    return replace(
        work,
        ahead_to=[uneven * each for each in work.ahead_to],
        train_to=[uneven * each for each in work.train_to],
        loaded_bytes=uneven * work.loaded_bytes,
        nodes=uneven * work.nodes,
        drawn=uneven * work.drawn,
        counts=replace(work.counts * uneven, calls=work.counts.calls),
    )


def _loading(question: Question, flows: Flows, shape: Shape, variant: Variant, kept: Kept) -> list[Work]:
    """Of every rank; beside GPUs a row is loaded once, where it crosses to one that does not have it."""
    works, inputs = _works(question, flows, shape, variant), question.sight.inputs
    if not question.has_gpus or inputs is None:
        return works
    rate = question.machine.gather_bytes_per_s
    crossed = crossing(flows, inputs, variant, kept, shape.input_bytes)
    peers = of_peers(flows, inputs, variant, kept, shape.input_bytes)
    crossed += peers / kept.peer_bytes_per_s * rate  # as long as so many bytes of the host
    edges = drawn(flows, variant)
    if kept.is_beside:
        crossed = max(0.0, crossed - edges * question.machine.edge_s * rate)
    works = [replace(work, loaded_bytes=crossed) for work in works]
    if not kept.does_draw:
        return works
    works = [replace(work, nodes=0.0, drawn=edges) for work in works]
    if variant.strategy != "data":
        return works
    nobody = [0.0] * question.num_ranks  # lists and rows lie in the host's memory, or with peers
    return [replace(work, ahead=Cost(), ahead_to=nobody) for work in works]


def _works(question: Question, flows: Flows, shape: Shape, variant: Variant) -> list[Work]:
    """Of every rank. Where rows are split, sparse ones are made dense; elsewhere they are dear to gather."""
    if question.training.inputs.row_length is None:
        return expected(flows, shape, [variant])[variant]
    if variant.strategy != "data":
        dense = _shape(question, is_dense=True)
        return expected(flows, replace(dense, row_bytes=shape.row_bytes), [variant])[variant]
    return expected(flows, replace(shape, input_bytes=_SPARSE * shape.input_bytes), [variant])[variant]


def _shape(question: Question, *, is_dense: bool = False) -> Shape:
    training, inputs = question.training, question.training.inputs
    wire = Wire(training.num_nodes, training.has_weights)
    fan_outs = training.num_neighbors
    assert fan_outs is not None, "mini-batches have fan-outs"
    return Shape.described(
        question.training.model,
        question.training.layout,
        inputs.num_features,
        None if is_dense else inputs.row_length,
        wire,
        fan_outs,
        question.num_ranks,
    )


def _rates(question: Question) -> Rates:
    machine, link = question.machine, question.link
    return Rates(
        bytes_per_s=link.bytes_per_s,
        latency_s=_latency_s(question),
        gather_bytes_per_s=machine.gather_bytes_per_s,
        law=replace(question.law, call_s=question.law.call_s + question.step_s / _calls(question)),
        node_s=machine.node_s,
        edge_s=machine.edge_s,
        message_s=machine.message_s if question.has_gpus else max(machine.message_s, _MESSAGE_S),
        byte_s=machine.byte_s,
        crowding=question.crowding,
        is_overlapped=question.training.prefetch > 0,
    )


def _latency_s(question: Question) -> float:
    """Of a round of messages; where threads share cores each waits for its turn."""
    return max(question.link.latency_s, _SHARED_ROUND_S if question.crowding > 0.5 else 0.0)


def _calls(question: Question) -> float:
    """Of a step: what a step costs whatever is in it is shared out over them."""
    return question.training.counts.num_layers + 1.0


def _with_ends(question: Question, works: Sequence[Work]) -> list[Work]:
    """What comes before and after the layers, of each rank's share of the seeds."""
    seeds = question.training.num_seeds / question.num_ranks
    return [
        replace(work, counts=work.counts + question.training.counts.around(work.loaded, seeds))
        for work in works
    ]


def _trainer_options(given: dict[str, Any]) -> dict[str, Any]:
    """As the trainer names them."""
    renamed = {"cache_bytes": "cache"}
    return {renamed.get(name, name): value for name, value in given.items()}


def _prediction(
    question: Question,
    strategy: str,
    name: str,
    options: dict[str, Any],
    taken: Seconds,
    works: Sequence[Work],
    memory: Memory,
) -> Prediction:
    steps = question.training.num_batches
    busiest = max(works, key=lambda work: work.cost.total_bytes)
    parts = {"load": taken.ahead, "compute": taken.train, "communicate": taken.link, "cores": taken.compute}
    pace = {"compute": taken.compute, "link": taken.link, "train": taken.train, "ahead": taken.ahead}
    return Prediction(
        strategy=strategy,
        options=options,
        name=name,
        is_exact=True,
        epoch_s=taken.step * steps + (min(taken.ahead, taken.train) if question.training.prefetch else 0.0),
        parts={name: value * steps for name, value in parts.items() if value},
        memory=memory,
        sent={kind: value * steps for kind, value in busiest.cost.bytes.items()},
        evaluate_s=evaluation_s(question),
        bound=_BOUNDS[max(pace, key=lambda each: pace[each])],
        num_ranks=question.num_ranks,
    )


def _single(question: Question, flows: Flows, shape: Shape, rates: Rates) -> Prediction:
    variant = variants(flows.num_hops, by_columns=False, strategies=("data",))[0]
    works = _works(question, flows, shape, variant)
    taken = seconds(_with_ends(question, works), rates)
    memory = batches_memory(question, flows, variant)
    name = (
        "data" if question.training.inputs.are_computed else "single"
    )  # such graphs are made by ranks alone
    return _prediction(question, name, name, {}, taken, works, memory)


def _macro(question: Question, flows: Flows, shape: Shape, num_batches: int | None = None) -> Prediction:
    """Windows of so many mini-batches, or of the number that is expected to be fastest."""
    assert question.sight.windows is not None
    data = _works(question, flows, shape, Variant("data"))
    facts = _timed(question, question.sight.windows, _with_ends(question, data))
    choice = macro_plan.choose(facts) if num_batches is None else macro_plan.choice_of(facts, num_batches)
    steps = question.training.num_batches
    compute, loading = facts.compute_s * steps, max(0.0, choice.seconds - facts.compute_s * steps)
    busiest = max(data, key=lambda work: work.cost.total_bytes)
    sent = dict((busiest.cost * steps).bytes)
    sent["features"] = macro_plan.sent_share(facts, choice.k) * choice.rows * facts.row_bytes
    pool_bytes = max(choice.memory_bytes, choice.slots * facts.pool_row_bytes)
    return Prediction(
        strategy="macro",
        options={"macro": choice.k},
        name=f"macro of {choice.k}",
        is_exact=True,
        epoch_s=choice.seconds,
        parts={"compute": compute, "wait": loading},
        memory=windows_memory(question, flows, pool_bytes, choice.k),
        sent=sent,
        evaluate_s=evaluation_s(question),
        bound="the cores are busy" if compute > 0.8 * choice.seconds else "loading is slower than training",
        num_ranks=question.num_ranks,
    )


def _timed(question: Question, facts: macro_plan.Facts, works: Sequence[Work]) -> macro_plan.Facts:
    """The facts with this machine's seconds in them."""
    machine, link, inputs = question.machine, question.link, question.training.inputs
    sparse = 1.0 if inputs.row_length is None else _SPARSE
    compute = max(question.law.seconds(work.counts) for work in works)
    handed = max(
        work.train.total_messages * machine.message_s + work.train.total_bytes * machine.byte_s
        for work in works
    )
    put_together = 0.0  # of the pool's rows, for every mini-batch; dense ones are read where they lie
    if inputs.row_length is not None:
        put_together = (
            _SPARSE * max(work.loaded for work in works) * inputs.row_bytes / machine.gather_bytes_per_s
        )
    row_cpu_s = (
        facts.row_cpu_s
    )  # as ranks that look at a graph have it; of a machine that is not there, at its own rate
    if question.sight.is_alike:
        row_cpu_s = _ROW_PASSES * facts.pool_row_bytes / machine.gather_bytes_per_s
    sampled = max(work.nodes * machine.node_s + work.drawn * machine.edge_s for work in works)
    return replace(
        facts,
        batch_cpu_s=sampled + put_together,
        window_cpu_s=_WINDOW_S * facts.num_layers * (question.num_ranks - 1),
        latency_s=_latency_s(question),
        bytes_per_s=link.bytes_per_s,
        compute_s=(compute + handed + question.step_s) * question.slowed,
        row_cpu_s=sparse * row_cpu_s + facts.row_bytes * machine.byte_s,
        is_sharing=question.crowding > 0.5,
        crowding=max(1.0, question.crowding),
    )


def evaluation_s(question: Question) -> float:
    """Layer by layer over all rows, forward alone: a third of a step on the full graph."""
    training = question.training
    if training.inputs.are_computed:
        return 0.0
    each = Sizes(training.num_nodes, training.num_nodes, training.num_edges)
    total: Counts = training.counts.of([each] * training.counts.num_layers)
    return question.law.seconds(total) / 3 / question.num_ranks * question.slowed
