"""What a stage of a pipeline keeps of a chunk, found by running it on chunks of a few rows.

Bytes are a line in a chunk's sizes, as long as its layers go about it in the same way: multiply before they sum or after,
read other chunks or none, have labels or none. That is the chunk's *kind*; probes are of the same kind, in about the same
proportions.

Legend: n rows of a chunk, o rows of others that it reads, E edges, t labelled rows, v values of sparse input rows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyhop.graph import Block, SparseRows
from polyhop.graph import Sizes as BlockSizes
from polyhop.kernels.keys import Key
from polyhop.nn.layer import cheaper_to_map_first
from polyhop.strategies.pipeline_chunks import cut_chunks
from polyhop.strategies.pipeline_given import PastGradients
from polyhop.strategies.pipeline_history import History
from polyhop.strategies.pipeline_past import Past
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_replay import Randomness
from polyhop.strategies.pipeline_schedule import Task
from polyhop.strategies.pipeline_stage import Stage, Target

__all__ = [
    "Laws",
    "Sizes",
    "begun_bytes",
    "begun_of",
    "bytes_of",
    "derived_bytes",
    "kept_bytes",
    "laws_of",
    "sizes_of",
]

_BASE, _MORE, _MOST = 24, 8, 2048


@dataclass(frozen=True)
class Sizes:
    """Of one chunk."""

    num_rows: int
    num_others: int
    num_edges: int
    num_labels: int = 0
    num_values: int = 0  # of sparse input rows, its own and others'

    def kind(self, pieces: Pieces) -> tuple[bool, ...]:
        """The same for chunks whose layers go about it in the same way."""
        block = BlockSizes(self.num_rows + self.num_others, self.num_rows, self.num_edges)
        widths = [math.prod(state["h"][0]) for state in pieces.states]
        ways = [
            cheaper_to_map_first(block, before, after, has_grad)
            for before, after in pairwise(widths)
            for has_grad in (False, True)
        ]
        return (self.num_others > 0, self.num_labels > 0, *ways)

    @property
    def facts(self) -> list[float]:
        return [1.0, self.num_rows, self.num_others, self.num_edges, self.num_labels, self.num_values]


@dataclass(frozen=True)
class Laws:
    """Lines in ``Sizes.facts``: of what stays for the way back, of tasks computed again, of what layers derive of edges."""

    kept: Tensor  # float64 [6]
    again: Tensor  # float64 [tasks, 6]
    derived: Tensor  # float64 [6]

    def of(self, sizes: Sizes) -> tuple[int, int, int]:
        """Bytes of a chunk: kept; of the largest task computed again; derived."""
        facts = torch.tensor(sizes.facts, dtype=torch.float64)
        again = [round(float(line @ facts)) for line in self.again]
        return round(float(self.kept @ facts)), max(again, default=0), round(float(self.derived @ facts))


def sizes_of(stage: Stage, chunk: int) -> Sizes:
    at, target, x = stage.chunks[chunk], stage.parts["target"], stage.parts["x"]
    labels = 0 if target is None else target.rows[chunk].numel()
    is_read = isinstance(x, SparseRows) and stage.first == 0
    values = int(x.indptr.diff()[at.sources()].sum()) if is_read else 0
    return Sizes(at.num_rows, at.others.numel(), at.block.num_edges, labels, values)


def laws_of(stage: Stage, pieces: Pieces, sizes: Sizes, *, layer_by_layer: bool) -> Laws:
    """Of chunks of the kind of ``sizes``. The model is left as it was."""
    tried = _probes(sizes, pieces)
    facts = torch.tensor([each.facts for each in tried], dtype=torch.float64)
    counted = [_probe(stage, pieces, each, layer_by_layer) for each in tried]

    def line(values: Sequence[Sequence[float]]) -> Tensor:
        given = torch.tensor(values, dtype=torch.float64)
        found: Tensor = torch.linalg.lstsq(facts, given, driver="gelsd").solution
        return found.T

    kept, derived = line([[kept] for kept, _, _ in counted])[0], line([[each] for _, _, each in counted])[0]
    again = (
        line([each for _, each, _ in counted]) if counted[0][1] else torch.zeros(0, 6, dtype=torch.float64)
    )
    return Laws(kept, again, derived)


def _probes(sizes: Sizes, pieces: Pieces) -> list[Sizes]:
    """A few rows in the same proportions, and more of one thing at a time."""
    kind, base = sizes.kind(pieces), _BASE
    while True:
        share = base / sizes.num_rows
        others = math.ceil(share * sizes.num_others)
        edges = max(math.ceil(share * sizes.num_edges), base + others + _MORE)
        labels, values = min(base, math.ceil(share * sizes.num_labels)), math.ceil(share * sizes.num_values)
        few = Sizes(base, others, edges, labels, values)
        more = [replace(few, num_rows=base + _MORE), replace(few, num_edges=edges + _MORE)]
        if others:
            more.append(replace(few, num_others=others + _MORE, num_edges=edges + _MORE))
        if few.num_labels:
            more.append(replace(few, num_labels=few.num_labels + (1 if few.num_labels < base else -1)))
        if few.num_values:
            more.append(replace(few, num_values=values + _MORE))
        if all(each.kind(pieces) == kind for each in (few, *more)) or base >= _MOST:
            return [few, *more]
        base *= 4


def _probe(stage: Stage, pieces: Pieces, sizes: Sizes, layer_by_layer: bool) -> tuple[int, list[int], int]:
    """(bytes that stay for the way back, of each task computed again, derived of edges) of a chunk of such sizes."""
    first, stop, num_rows, device = stage.first, stage.stop, sizes.num_rows, stage.device
    spans = [(at, at + 1) for at in range(first, stop)] if layer_by_layer else [(first, stop)]
    again = list[int]()
    with _untouched(stage.model, device):
        few = _few(stage, pieces, sizes)
        few.history.begin(0)
        few.begin(Key(0))
        if first > 0:
            few.take(0, first, _ones(pieces.crossing(first), num_rows, device))
        is_last = stop == few.model.num_layers

        def forward() -> None:
            for span in spans:
                few.forward(Task(0, "forward", *span, 0))
            if not is_last:
                few.outputs(0)  # they leave

        kept = kept_bytes(few, forward)
        if not is_last:
            few.take_grads(0, _ones(pieces.crossing(stop), num_rows, device))
        for span in reversed(spans):
            task = Task(0, "backward", *span, 0)
            again.append(kept_bytes(few, lambda task=task: few.backward(task), freed=True))  # type: ignore[misc]
        few.end()
        derived = derived_bytes(few, 0)
    return kept, again if stage.recompute else [], derived


def begun_of(stage: Stage, pieces: Pieces) -> tuple[int, int]:
    """What ``begun_bytes`` will be, from a few rows."""
    if stage.parts["x"] is None:
        return 0, 0
    facts, found = [], []
    with _untouched(stage.model, stage.device):
        for num_rows, num_values in ((8, 8), (16, 8), (8, 16)):
            few = _few(stage, pieces, Sizes(num_rows, 0, num_rows, num_values=num_values))
            facts.append([1.0, num_rows, num_values])
            found.append(begun_bytes(few))
    lines = torch.linalg.solve(
        torch.tensor(facts, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    )
    x = stage.parts["x"]
    values = x.values.numel() if isinstance(x, SparseRows) else 0
    real = torch.tensor([1.0, x.shape[0], values], dtype=torch.float64) @ lines
    return round(float(real[0])), round(float(real[1]))


def _few(stage: Stage, pieces: Pieces, sizes: Sizes) -> Stage:
    """The same layers on a chunk of such sizes and another that it reads."""
    n, o = sizes.num_rows, sizes.num_others
    reads = [[i] for i in range(n)]
    for at in range(sizes.num_edges - n):
        reads[at % n].append(n + at % o if o else at % n)
    degree = torch.tensor([*map(len, reads), *[0] * o])
    indptr = torch.zeros(n + o + 1, dtype=torch.int64)
    indptr[1:] = degree.cumsum(0)
    like = stage.chunks.chunks[0].block
    block = Block(
        indptr,
        torch.tensor([row for each in reads for row in each], dtype=like.indices.dtype),
        n + o,
        edge_weight=None
        if like.edge_weight is None
        else torch.ones(sizes.num_edges, dtype=like.edge_weight.dtype),
        in_degree=None if like.in_degree is None else degree.to(like.in_degree.dtype) + 1,
        in_weight=None if like.in_weight is None else degree.to(like.in_weight.dtype) + 1,
        loop_weight=None if like.loop_weight is None else torch.zeros(n + o, dtype=like.loop_weight.dtype),
    )
    owner = torch.zeros(n + o, dtype=torch.int32)
    owner[n:] = 1
    chunks, history = cut_chunks(block, owner).on(stage.device), stage.history
    target = None
    if stage.parts["target"] is not None:
        target = _target(stage.parts["target"], sizes.num_labels, o > 0)
    tables = {layer: pieces.states[layer]["h"] for layer in history.layers}
    made = History(chunks, tables, 1, 1.0, stage.device, replays=stage.recompute)
    x = stage.parts["x"]
    if x is not None:
        x = _few_rows(x, n + o, sizes.num_values)
    return stage.like(chunks, made, x, target)


def _target(target: Target, count: int, has_other: bool) -> Target:
    y = max(target.y.values(), key=len)
    few = torch.arange(count, device=y.device)
    labels = y[:1].expand(count, *y.shape[1:]).clone() if count else y[:0]
    rows, found = {0: few}, {0: labels}
    if has_other:
        rows[1], found[1] = few[:0], labels[:0]
    return replace(target, rows=rows, y=found, count=1)


def _few_rows(x: Tensor | SparseRows, num_rows: int, num_values: int) -> Tensor | SparseRows:
    """Input rows of the same kind."""
    if isinstance(x, Tensor):
        return torch.ones(num_rows, *x.shape[1:], dtype=x.dtype, device=x.device)
    indptr = torch.full((num_rows + 1,), num_values, dtype=x.indptr.dtype, device=x.indptr.device)
    indptr[0] = 0
    columns = torch.zeros(num_values, dtype=x.indices.dtype, device=x.indices.device)
    return SparseRows(indptr, columns, torch.ones_like(columns, dtype=x.values.dtype), x.num_columns)


def _ones(specs: dict[str, Any], num_rows: int, device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.ones(num_rows, *shape, dtype=dtype, device=device)
        for name, (shape, dtype) in specs.items()
    }


@contextmanager
def _untouched(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Gradients and torch's generators are afterwards as before."""
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    try:
        with (
            Randomness.undrawn(device),
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        for p, grad in grads:
            p.grad = grad


# Counting


class _Box:
    """A tensor that autograd keeps: alive as long as the graph is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Boxes:
    """All of them that are alive; those that are not too, if ``freed``."""

    def __init__(self, *, freed: bool = False) -> None:
        self._boxes, self._held, self._freed = weakref.WeakSet[_Box](), list[_Box](), freed

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda box: box.tensor)

    def _pack(self, tensor: Tensor) -> _Box:
        box = _Box(tensor.detach())  # an output with its past would keep the graph that it is kept by
        self._boxes.add(box)
        if self._freed:
            self._held.append(box)
        return box

    def alive(self) -> list[Tensor]:
        return [box.tensor for box in self._boxes]


def kept_bytes(stage: Stage, run: Callable[[], object], *, freed: bool = False) -> int:
    """Bytes that autograd and the stage keep of what ``run`` computes, apart from tables, edges, inputs and weights.

    ``freed``: also what autograd has kept in between.
    """
    boxes = _Boxes(freed=freed)
    with boxes.hooks(), stage.watched() as again:
        run()
    known = _storages(
        [
            stage.model,
            stage.history,
            stage.parts["structure"],
            stage.parts["x"],
            stage.parts["begun"],
            stage.parts["target"],
        ]
    )
    for block in stage.parts["blocks"].values():
        known |= _storages([block._cache])
    held = again if freed else stage.parts["held"]
    kept = _storages([boxes.alive(), list(_beside(held)), [] if freed else held])
    return sum(size for at, size in kept.items() if at not in known)


def _beside(held: Any) -> Iterator[Tensor]:
    """What functions keep that autograd does not know of: attributes of their context."""
    seen, to_come = set[Any](), [tensor.grad_fn for tensor in _tensors(held)]
    while to_come:
        function = to_come.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        yield from _tensors(getattr(function, "__dict__", {}))
        to_come += [each for each, _ in function.next_functions]


def begun_bytes(stage: Stage) -> tuple[int, int]:
    """(bytes of what the stage makes of all rows when an epoch begins and autograd keeps of it, of gradients of it)."""
    boxes = _Boxes()
    with boxes.hooks():
        stage.begin(Key(0))
    known = _storages([stage.model, stage.parts["x"], stage.parts["structure"]])
    kept = _storages([boxes.alive(), list(_beside(stage.parts["begun"])), stage.parts["begun"]])
    made = sum(size for at, size in kept.items() if at not in known)
    return made, bytes_of(stage.parts["begun_grads"])


def derived_bytes(stage: Stage, chunk: int) -> int:
    """Of what layers keep with a chunk's edges."""
    block = stage.parts["blocks"][chunk]
    own = _storages([block])
    return sum(size for at, size in _storages([block._cache]).items() if at not in own)


def bytes_of(held: Any) -> int:
    """Of all tensors in something, each storage once."""
    return sum(_storages(held).values())


def _storages(held: Any) -> dict[int, int]:
    """Address -> bytes of all tensors in something."""
    found: dict[int, int] = {}
    for tensor in _tensors(held):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _tensors(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict):
        for value in held.values():
            yield from _tensors(value)
    elif isinstance(held, (list, tuple)):
        for value in held:
            yield from _tensors(value)
    elif isinstance(held, torch.nn.Module):
        yield from held.parameters()
        yield from held.buffers()
    elif is_dataclass(held) or isinstance(held, (History, Past, PastGradients)):
        for name, value in vars(held).items():
            if not name.startswith("_"):
                yield from _tensors(value)
