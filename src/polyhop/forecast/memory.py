"""What a rank holds, item by item, from sizes: while it starts, trains and evaluates. Bytes of the rank that needs most.

    start        process + whole graph + the larger of: making parts (rank 0), cutting the own part out; of parts that come
                 from a folder, the own lists alone
    training     process + part + inputs + weights + loaded + fetched + (1 + freed) (derived + activations + moments)
    evaluation   process + part + inputs + weights + loaded + fetched + (1 + freed once) (derived + layers)
    needed       the most of the three, and 0.4 of what it has beside the process, 40 MB at least: what a plan must be
                 given to fit

    part         lists of edges, facts of own and halo nodes, labels; on the full graph the blocks that layers read
    inputs       own rows as they are stored, and as steps read them where that is another way
    weights      parameters, gradients, two values of Adam, the best so far, messages of gradients
    loaded       mini-batches in hand and ahead, and the one being made; the pool of windows, and sparse input rows of
                 each of their mini-batches; caches
    fetched      input rows of the halo, floats: evaluation reads them
    derived      of edges, for backward passes (forecast/footprint.py)
    activations  what autograd keeps at the end of the forward pass (forecast/footprint.py)
    moments      what is alive beside them when most is (forecast/footprint.py)
    layers       rows of two layers and what is alive between them (forecast/footprint.py)
    freed        0.9 of what a step allocates, 0.5 of one pass of evaluation: freed, kept for later, and fitting nothing

Of a pipeline's stage activations are those of its layers, and tables of rows and messages come with them; where layers are
computed again they are what layers are given, and those of one layer. How much is freed and kept is measured: two runs of
the same step differ by a tenth of all that is resident.

Legend: n own nodes, H halo nodes, S = n + H, E edges, F features, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from polyhop.errors import UnsupportedError
from polyhop.forecast.footprint import LayerRows, evaluated, stepped
from polyhop.forecast.question import Question
from polyhop.graph.aggregated import FixedAggregate
from polyhop.nn.model import Model
from polyhop.plan import Memory
from polyhop.strategies.flows import Flows
from polyhop.strategies.halo import Config
from polyhop.strategies.halo_plan import Plan
from polyhop.strategies.work import Variant

__all__ = [
    "FREED",
    "batches_memory",
    "halo_memory",
    "servers_memory",
    "single_memory",
    "stage_memory",
    "windows_memory",
    "with_spread",
]

FREED = 0.9
"""Of what a step allocates: 0.5 to 1.4 after eight steps on the full graph, on graphs of 10 to 50 edges a node."""
_FREED_ONCE = 0.5  # the same of one pass of evaluation
_FREED_GPU = 0.2  # of a device, whose blocks are kept by size; not measured

_FACTS = 8 + 4 + 4 + 8  # of a source: the user's id, two degrees, the new id
_LABELS = 8 + 8  # label, place in the split
_WEIGHTS = 6  # values a parameter
_LATE_BYTES = 8e7  # of a process: what comes with its first step (optimisers load torch's compiler)
_SPREAD = 0.4  # of what is held beside the process; the worst of 40 runs had a third more than foreseen
_LEAST_SPREAD = 4e7  # the command line, traces and evaluation in every epoch take 20 MB, whatever is trained
_CHANNELS = 2.5e7  # lines and threads between ranks, and what the strategy has tried: of a graph of few nodes
_ANEW = ("derived", "activations", "moments")
_PARTS = 85.0  # of an edge of the whole graph, while METIS makes parts
_CUT = 57.0  # of an edge of a part, while it is cut out: places and sources as int64, several times
_EVALUATION_BYTES = 2 << 30  # a chunk's working set in runs on mini-batches


@dataclass(frozen=True)
class _Part:
    """Of one rank."""

    nodes: float
    edges: float
    halo: float
    marginal_nodes: float = 0.0
    marginal_edges: float = 0.0

    @property
    def sources(self) -> float:
        return self.nodes + self.halo

    @property
    def structure(self) -> float:
        return 4 * self.edges + 8 * self.nodes + _FACTS * self.sources + 8 * self.halo

    @property
    def block(self) -> float:
        """A copy of its edges, as a layer reads them."""
        return 4 * self.edges + 8 * self.nodes + (_FACTS - 8) * self.sources


def single_memory(question: Question) -> Memory:
    """One process, the full graph."""
    training = question.training
    whole = LayerRows(training.num_nodes, training.num_nodes, training.num_edges)
    found = stepped(training, [whole] * training.counts.num_layers, training.num_train)
    items = _graph(question) | {"weights": _weights(question)} | _moving(found)
    if not training.inputs.are_read_in_place and training.inputs.row_length is None:
        items["inputs"] += training.num_nodes * training.inputs.num_features * training.value_bytes
    layers = evaluated(training, whole, is_copied=False).most
    return _memory(question, items, {"layers": layers, "derived": found.derived}, _start(question, None))


def halo_memory(question: Question, config: Config, plan: Plan) -> Memory:
    """The full graph by parts."""
    return _most(_halo(question, config, plan, rank) for rank in question.ranks)


def _halo(question: Question, config: Config, plan: Plan, rank: int) -> Memory:
    training, part, size = question.training, _part(question, rank), question.training.value_bytes
    central = part.nodes - part.marginal_nodes
    layers, blocks = list[LayerRows](), 0.0
    for at, layer in enumerate(question.sight.layers):
        edges, marginal = float(layer.edges[rank]), float(layer.marginal_edges[rank])
        if at < plan.num_plain:
            layers.append(LayerRows(part.sources, part.nodes, part.edges))
        else:
            rows = float(layer.rows[:, rank].sum())
            layers.append(
                LayerRows(part.nodes, part.nodes, edges + marginal, rows, central, edges, is_crossing=True)
            )
        blocks += 4 * (edges + 2 * marginal) + 8 * part.nodes + (_FACTS - 8) * part.sources
    sums = _fixed_sums(training.model) if plan.num_plain and training.inputs.row_length is None else None
    labels = training.num_train / question.num_ranks
    found = stepped(training, layers, labels, sums_once=sums is not None)
    row = _row(question)
    read = part.nodes * row * (1 + sums.has_own) if sums is not None else part.sources * row
    items = _own(question, part) | {"weights": _weights(question)} | _moving(found)
    items["part"] += blocks
    items["inputs"] += read
    items["fetched"] = part.halo * row
    crossing = [
        float(layer.rows[:, rank].sum() + layer.rows[rank].sum()) * seen.columns * size
        for layer, seen in zip(question.sight.layers, plan.seen, strict=True)
    ]
    items["messages"] = 2 * max(crossing, default=0.0) * (1 if config.halo == "exact" else 2)
    allocated = _allocated(items)
    if config.recompute:  # what is computed again is allocated all the same
        given = part.nodes * size * sum(layer.in_columns for layer in training.counts.layers[1:])
        items["activations"] = min(items["activations"], given + max(found.kept) + sum(crossing) / 2)
    items["channels"] = _CHANNELS
    over = {"layers": _layers(question, part), "derived": found.derived}
    return _memory(question, items, over, _start(question, part, is_first=rank == 0), part, allocated)


def stage_memory(
    question: Question, bounds: Sequence[int], num_ways: int, num_chunks: int, *, has_history: bool
) -> Memory:
    """A stage of ``pipeline``, which has the layers between two bounds; of all stages the one that needs most."""
    training, size = question.training, question.training.value_bytes
    each, chunks = training.num_nodes / num_chunks, num_chunks / num_ways
    edges = training.num_edges / num_chunks
    others = 0.0 if num_chunks == 1 else each * min(question.sight.cut.replicas_of(num_chunks), edges / each)
    above = LayerRows(each, each, edges, others, is_joined=others > 0)
    layers = [LayerRows(each + others, each, edges), *[above] * (training.counts.num_layers - 1)]
    found = stepped(training, layers, training.num_train / num_chunks)
    own = _part(question, 0 if question.sight.is_alike else int(question.sight.cut.edges.argmax()))
    held = _Part(each * chunks, edges * chunks, others * chunks)
    before, *kept, after = found.kept
    tried = []
    for first, stop in pairwise(bounds):
        columns = sum(training.counts.layers[at].in_columns for at in range(max(1, first), stop))
        share = sum(kept[first:stop]) / max(sum(kept), 1.0)
        items = _own(question, own) | {"weights": _weights(question)}
        items["part"] += 2 * held.block
        items["inputs"] += 2 * held.nodes * _row(question) * (first == 0)
        items |= {
            "tables": (2 + has_history) * held.nodes * columns * size * (chunks > 1),
            "messages": 2 * held.nodes * training.counts.layers[stop - 1].out_columns * size,
            "derived": chunks * found.derived * (stop - first) / len(kept),
            "activations": chunks
            * (sum(kept[first:stop]) + before * (first == 0) + after * (stop == len(kept))),
            "moments": found.moments * share,
        }
        over = {"layers": _layers(question, own)}
        tried.append(_memory(question, items, over, _start(question, own), own))
    return _most(tried)


def servers_memory(question: Question) -> Memory:
    """A graph server of ``serverless``: tables of every layer's rows and of their gradients; tasks on their way."""
    training, size = question.training, question.training.value_bytes

    def of(rank: int) -> Memory:
        part = _part(question, rank)
        row = _row(question)
        columns = sum(layer.mapped_columns + layer.out_columns for layer in training.counts.layers)
        items = _own(question, part) | {"weights": _weights(question)}
        items["part"] += 2 * part.block
        items["inputs"] += 2 * part.sources * row
        items["activations"] = 2 * part.sources * columns * size
        items["moments"] = part.sources * max(layer.mapped_columns for layer in training.counts.layers) * size
        items["derived"] = part.block
        items["channels"] = _CHANNELS
        over = {"layers": _layers(question, part), "derived": part.block}
        return _memory(question, items, over, _start(question, part, is_first=rank == 0), part)

    return _most(of(rank) for rank in question.ranks)


def batches_memory(question: Question, flows: Flows, variant: Variant, *, kept_bytes: float = 0.0) -> Memory:
    """Mini-batches, loaded ahead one by one; ``kept_bytes``: of input rows that stay where computing happens."""
    ranks = [0] if flows.is_alike or question.num_ranks == 1 else range(question.num_ranks)
    return _most(_batches(question, flows, variant, rank, None, kept_bytes) for rank in ranks)


def windows_memory(question: Question, flows: Flows, pool_bytes: float, num_batches: int) -> Memory:
    """The same by windows of so many, rows read from a pool that has at most so many bytes."""
    ranks = [0] if flows.is_alike else range(question.num_ranks)
    return _most(
        _batches(question, flows, Variant("data"), rank, (pool_bytes, num_batches)) for rank in ranks
    )


def _batches(
    question: Question,
    flows: Flows,
    variant: Variant,
    rank: int,
    window: tuple[float, int] | None,
    kept_bytes: float = 0.0,
) -> Memory:
    training, size = question.training, question.training.value_bytes
    is_split = variant.strategy == "split"
    is_dense = is_split and training.inputs.row_length is not None
    part = _part(question, rank) if question.num_ranks > 1 else None
    layers, rows, edges = _drawn(flows, variant, rank)
    seeds = training.num_seeds / question.num_ranks
    found = stepped(training, layers, seeds, is_dense=is_dense)
    row = training.inputs.num_features * size
    if training.inputs.row_length is not None:
        row = round(8 + (4 + size) * training.inputs.row_length)
    block = 4 * edges + 20 * rows
    inputs = (layers[0].own + layers[0].halo) * row
    ahead = 1 + training.prefetch
    in_place = question.num_ranks == 1 and training.inputs.are_read_in_place
    items = _graph(question) if part is None else _own(question, part)
    items |= {"weights": _weights(question), "kept": kept_bytes} | _moving(found)
    if part is not None:
        items["channels"] = _CHANNELS
    if window is not None:
        own = inputs if training.inputs.row_length is not None else 0.0  # dense rows are read in the pool
        items["loaded"] = window[0] + _in_windows(window[1], training.num_steps) * (block + own)
    elif in_place:
        items["loaded"] = ahead * block
    else:
        dense = (layers[0].own + layers[0].halo) * training.inputs.num_features * size if is_dense else 0.0
        items["moments"] += dense  # made in every step
        items["loaded"] = ahead * (inputs + block) + (2 if question.num_ranks > 1 else 1) * inputs
    items["loaded"] += training.cache_bytes if variant.has_cache else 0.0
    if training.inputs.are_computed:  # nobody is judged: there are train nodes alone
        items["part"] += 16 * training.num_train
        items["loaded"] += (
            0.0 if window is not None else 2 * (1 + FREED) * inputs
        )  # computed, and for others too
        return _memory(question, items, {}, 0.0, part)
    if part is None:
        whole = LayerRows(training.num_nodes, training.num_nodes, training.num_edges)
        is_read = training.inputs.are_read_in_place or training.inputs.row_length is not None
        most = evaluated(training, whole, is_copied=not is_read).most
        items["fetched"] = 0.0 if is_read else training.num_nodes * row
        over = {"layers": _bounded(question, most)}
        return _memory(question, items, over, _start(question, None))
    items["part"] += 16 * training.num_train
    over = {"layers": _bounded(question, _layers(question, part))}
    return _memory(question, items, over, _start(question, part, is_first=rank == 0), part)


def _in_windows(size: int, num_steps: int) -> int:
    """The most mini-batches that two windows have, one after the other: one trains while the next is loaded."""
    size = min(size, num_steps)
    return num_steps if size < num_steps < 2 * size else 2 * size


def _drawn(flows: Flows, variant: Variant, rank: int) -> tuple[list[LayerRows], float, float]:
    """(layers of a mini-batch on one rank, input layer first; rows and edges of all of them)."""
    hops, layers = flows.num_hops, list[LayerRows]()
    for hop in reversed(range(hops)):
        if variant.strategy == "split" and hop >= hops - variant.depth:
            own, dst = float(flows.shared[hop + 1, rank]), float(flows.shared[hop, rank])
            arriving = float(flows.crossing[hop].rows[rank].sum())
            is_input = hop == hops - 1
            # Input rows that cross as they are cross while they are loaded.
            layers.append(
                LayerRows(own + arriving, dst, float(flows.shared_edges[hop, rank]))
                if is_input
                else LayerRows(own, dst, float(flows.shared_edges[hop, rank]), arriving, is_crossing=True)
            )
        else:
            src, dst = (float(flows.own[at].rows[rank].sum()) for at in (hop + 1, hop))
            layers.append(LayerRows(src, dst, float(flows.own_edges[hop, rank].sum())))
    return layers, sum(each.own + each.halo for each in layers), sum(each.edges for each in layers)


# Items that strategies share


def _part(question: Question, rank: int) -> _Part:
    cut = question.sight.cut
    return _Part(
        float(cut.nodes[rank]),
        float(cut.edges[rank]),
        float(cut.halo[:, rank].sum()),
        float(cut.marginal_nodes[rank]),
        float(cut.marginal_edges[rank]),
    )


def _fixed_sums(model: nn.Module) -> FixedAggregate | None:
    """What the first layer sums of its inputs, where no parameter changes it."""
    try:
        return model.fixed_aggregate() if isinstance(model, Model) else None
    except UnsupportedError:
        return None


def _graph(question: Question) -> dict[str, float]:
    """A whole graph in one process."""
    training = question.training
    if training.inputs.are_computed:
        return {"part": 0.0, "inputs": 0.0}
    structure = 4.0 * training.num_edges + (8 + 4 + _LABELS) * training.num_nodes
    return {"part": structure, "inputs": training.num_nodes * training.inputs.row_bytes}


def _own(question: Question, part: _Part) -> dict[str, float]:
    """A rank's share of it."""
    if question.training.inputs.are_computed:
        return {"part": 0.0, "inputs": 0.0, "fetched": 0.0}
    return {
        "part": part.structure + _LABELS * part.nodes,
        "inputs": part.nodes * question.training.inputs.row_bytes,
    }


def _weights(question: Question) -> float:
    return float(_WEIGHTS * question.training.num_parameters * question.training.value_bytes)


def _moving(found: object) -> dict[str, float]:
    names = ("derived", "activations", "moments")
    return {name: float(getattr(found, name)) for name in names}


def _layers(question: Question, part: _Part) -> float:
    return evaluated(
        question.training, LayerRows(part.nodes, part.nodes, part.edges, part.halo), is_copied=True
    ).most


def _bounded(question: Question, layers: float) -> float:
    """A chunk at a time, where all at once would exceed the memory given; rows of two layers stay."""
    training = question.training
    widest = max(
        max(layer.in_columns, layer.out_columns)
        for layer in training.counts.layers[:-1] or training.counts.layers
    )
    tables = 2.0 * training.num_nodes / question.num_ranks * widest * training.value_bytes
    return min(layers, _EVALUATION_BYTES + tables)


def _start(question: Question, part: _Part | None, *, is_first: bool = True) -> float:
    """While the graph is loaded, parts are made and one is cut out."""
    training, graph = question.training, sum(_graph(question).values())
    if part is None or training.inputs.are_computed:
        return graph
    if not training.loads_whole or question.sight.is_alike:
        return part.structure
    return graph + max(_PARTS * training.num_edges * is_first, _CUT * part.edges)


def _allocated(items: Mapping[str, float]) -> float:
    """By a step, anew."""
    return sum(items.get(name, 0.0) for name in _ANEW)


def _memory(
    question: Question,
    items: dict[str, float],
    over: Mapping[str, float],
    start: float,
    part: _Part | None = None,
    allocated: float | None = None,
) -> Memory:
    """``items`` of training, but for process and what is freed; ``over``: what evaluation allocates."""
    process, share = question.machine.process_bytes, _FREED_GPU if question.has_gpus else FREED
    found = {"process": process, **items}
    if part is not None:
        found.setdefault("fetched", part.halo * _row(question))
    still = sum(value for name, value in found.items() if name not in _ANEW)
    found["freed"] = share * (_allocated(items) if allocated is None else allocated)
    return with_spread(
        question,
        Memory(
            training=sum(found.values()),
            evaluation=still + (1 + min(share, _FREED_ONCE)) * sum(over.values()),
            start=0.0 if question.has_gpus else max(0.0, process - _LATE_BYTES) + start,
            items=found,
        ),
    )


def with_spread(question: Question, found: Memory) -> Memory:
    """With the margin by which runs may need more."""
    beside = found.most - question.machine.process_bytes
    return replace(found, spread=max(_LEAST_SPREAD, _SPREAD * beside))


def _row(question: Question) -> float:
    """Of an input row as steps read it."""
    inputs = question.training.inputs
    return (
        inputs.num_features * question.training.value_bytes if inputs.row_length is None else inputs.row_bytes
    )


def _most(found: Iterable[Memory]) -> Memory:
    """Of each phase the rank that needs most; items of the one that trains with most."""
    each = list(found)
    busiest = max(each, key=lambda memory: memory.training)
    return replace(
        busiest,
        evaluation=max(memory.evaluation for memory in each),
        start=max(memory.start for memory in each),
        spread=max(memory.needed for memory in each) - max(memory.most for memory in each),
    )
