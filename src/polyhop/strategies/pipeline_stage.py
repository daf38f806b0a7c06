"""A stage at work: some layers of the model on one chunk at a time, forward and backward.

No autograd edge crosses chunks. A chunk's own rows pass from layer to layer; rows of others come out of a table by a
function that keeps nothing and, on the way back, adds gradients to those rows where their chunks are before it. When the
chunk goes backward, one call starts at its output and at its own rows of every layer, with the gradients that chunks after
it have left there. So all layers are served alike: sums, attention, layers of other libraries; and where a layer sums,
nothing of the rows of others is kept until then.

    forward    own rows of layer l -> table l;  others <- table l;  dropout of both;  layer l -> own rows of layer l + 1
    backward   (output, own rows of each layer) and their gradients -> weights, input rows, gradients of others -> table l

What comes before layer 0 is computed for all rows at once, when an epoch begins, so layer 0 never reads history.

With ``recompute`` a chunk leaves nothing but its rows in the tables and what is carried beside them. When it goes backward
its layers are computed again, from the rows that they read the first time (``pipeline_history``), with the same units
dropped (``pipeline_replay``), so to the same bits; then as above.

Legend: n rows of a chunk, o rows of others that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyhop.graph import PooledRows, SparseFeatures, SparseRows
from polyhop.kernels import scatter_add_rows
from polyhop.kernels.keys import Key
from polyhop.nn.model import Model
from polyhop.nn.rows import Rows
from polyhop.strategies.pipeline_chunks import Chunks
from polyhop.strategies.pipeline_history import History
from polyhop.strategies.pipeline_pieces import splits_dropout
from polyhop.strategies.pipeline_replay import Randomness
from polyhop.strategies.pipeline_schedule import Task
from polyhop.strategies.step import Loss, Placement

__all__ = ["Stage", "Target"]

_State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Target:
    """What the last stage trains towards: of each chunk, which of its rows have labels, and these."""

    rows: Mapping[int, Tensor]  # of each chunk here: int64, 0 .. n - 1
    y: Mapping[int, Tensor]
    loss: Loss
    count: int  # that the sum is divided by


@dataclass(eq=False)
class _Passed:
    """What a task leaves for its way back."""

    begun: _State  # leaves of what ``begin`` made
    own: list[tuple[int, Tensor]]  # own rows of inner layers, with their past
    outputs: _State  # with their past
    loss: Tensor | None = None


class Stage:
    """Layers ``span[0] .. span[1] - 1``. The first stage has ``x``, all input rows by row; the last has a ``target``.

    ``local``: names of what every stage makes of ``x`` for itself; with any, all stages have ``x``, without a halo's rows.
    """

    has_ways = False  # other ranks hold the same layers, and it meets them in tasks of nothing too

    def __init__(
        self,
        model: Model,
        span: tuple[int, int],
        chunks: Chunks,
        history: History,
        placement: Placement,
        *,
        x: Rows | None = None,
        target: Target | None = None,
        recompute: bool = False,
        local: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.chunks, self.history, self._placement = model, chunks, history, placement
        self.first, self.stop = span
        self._target, self._recompute = target, recompute
        self._x, self._local = x, local
        self._ids = chunks.ids.to(placement.device)
        self._blocks = {number: placement.block(chunks[number].block) for number in chunks.numbers}
        self._sources = {
            number: chunks[number].sources().to(placement.device)
            for number in (chunks.numbers if self.first == 0 else ())
        }
        self._splits = splits_dropout(model)
        self._key: Key | None = None
        self._is_sweep = False
        self._begun: dict[str, Any] = {}
        self._begun_grads: _State = {}
        self._inputs: dict[
            tuple[int, int], _State
        ] = {}  # leaves of tasks to come or to go back, by (chunk, layer)
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._randomness: dict[tuple[int, int], Randomness] = {}  # of what is to be computed again
        self._arrived: dict[int, _State] = {}  # gradients of what left
        self._watched: list[_Passed] | None = None
        self._loss = torch.zeros((), dtype=placement.dtype, device=placement.device)

    @property
    def device(self) -> torch.device:
        return self._placement.device

    # An epoch

    def begin(self, key: Key | None, *, is_sweep: bool = False) -> None:
        """Before the first task. In a sweep there is nothing to go back to."""
        self._key, self._is_sweep = key, is_sweep
        self._inputs.clear()
        self._passed.clear()
        self._randomness.clear()
        self._loss = torch.zeros_like(self._loss)
        if self._x is not None:
            self._begun = self._begin()
            self._begun_grads = {
                name: torch.zeros_like(value)
                for name, value in self._begun.items()
                if isinstance(value, Tensor) and value.requires_grad
            }
            if self._recompute:
                self._begun |= {name: self._begun[name].detach() for name in self._begun_grads}

    def _begin(self) -> dict[str, Any]:
        assert self._x is not None, "the first stage holds the input rows"
        ids = (
            self._ids if self.first == 0 else self._ids[: self.chunks.num_own]
        )  # of a halo layer 0 alone reads
        with self._placement.context():
            made = dict(self.model.begin(self._x, ids=ids, key=self._key))
        return made if self.first == 0 else {name: made[name] for name in self._local}

    def end(self) -> Tensor:
        """After the last task: what came before layer 0 goes backward. The sum of the losses of all chunks."""
        if self._begun_grads and not self._is_sweep:
            names = sorted(self._begun_grads)
            begun = self._begin() if self._recompute else self._begun
            torch.autograd.backward(
                [begun[name] for name in names], [self._begun_grads[name] for name in names]
            )
        self._begun, self._begun_grads = {}, {}
        return self._loss

    # Forward

    def take(self, chunk: int, layer: int, rows: _State) -> None:
        """A chunk's rows before a layer have come."""
        self.history.write(layer, chunk, rows["h"])
        beside = {name: value for name, value in rows.items() if not self._recompute or name != "h"}
        self._inputs[chunk, layer] = {name: _leaf(value) for name, value in beside.items()}

    def forward(self, task: Task) -> None:
        """Own rows up the layers of a task; what they are then is kept for ``outputs`` or the next task."""
        chunk = task.chunk
        assert chunk is not None, "a task of nothing is nobody's"
        with Randomness.noted(self.device) as randomness:
            passed = self._ahead(task)
        if passed.loss is not None:
            self._loss = self._loss + passed.loss.detach()
        if task.stop < self.stop:
            self.take(chunk, task.stop, {name: value.detach() for name, value in passed.outputs.items()})
        if self._recompute:
            self._randomness[chunk, task.first] = randomness
            passed = _Passed({}, [], self._leaving(task, passed.outputs))
        if passed.outputs:
            self._passed[chunk, task.stop] = passed

    def _ahead(self, task: Task) -> _Passed:
        assert task.chunk is not None
        with self._placement.context():
            passed = self._up(task.chunk, task.first, task.stop)
        if task.stop == self.model.num_layers and self._target is not None and not self._is_sweep:
            passed.loss = self._judged(task.chunk, passed.outputs)
        return passed

    def _leaving(self, task: Task, outputs: _State) -> _State:
        """What is still to be sent of a task that is to be computed again."""
        is_sent = task.stop == self.stop < self.model.num_layers
        return {name: value.detach() for name, value in outputs.items()} if is_sent else {}

    def _again(self, task: Task) -> _Passed:
        """A task of the forward pass, to the same bits."""
        chunk = task.chunk
        assert chunk is not None
        with self.history.replayed(), self._randomness.pop((chunk, task.first)).again(self.device):
            passed = self._ahead(task)
        if self._watched is not None:
            self._watched.append(passed)
        return passed

    def _up(self, chunk: int, first: int, stop: int) -> _Passed:
        block, passed = self._blocks[chunk], _Passed({}, [], {})
        state: dict[str, Any]
        for layer in range(first, stop):
            if layer == 0:
                state, block_here = self._first_rows(chunk, passed)
            else:
                if layer == first:
                    state = dict(self._given(chunk, layer))
                    if layer == self.first:
                        state |= self._shared(chunk, passed)
                else:
                    self.history.write(layer, chunk, state["h"].detach())
                    passed.own.append((layer, state["h"]))
                state, block_here = self._with_others(chunk, layer, state), block
            make = self.model.undropped if self._splits else self.model.layer
            state = dict(make(layer, block_here, state, key=self._key))
        passed.outputs = state
        return passed

    def _shared(self, chunk: int, passed: _Passed) -> _State:
        """Own rows of what this stage has made for itself."""
        own = self.chunks[chunk].rows
        found = {name: value.detach()[own] for name, value in self._begun.items()}
        passed.begun = {
            name: _leaf(value.clone()) for name, value in found.items() if name in self._begun_grads
        }
        return found | passed.begun

    def _given(self, chunk: int, layer: int) -> _State:
        """Leaves of what a chunk has before a layer. To be computed again, own rows are taken from the table, as often."""
        given = self._inputs[chunk, layer]
        if not self._recompute:
            return given
        own = _leaf(self.history.rows[layer][self.chunks[chunk].rows].clone())
        found = {name: _leaf(value) for name, value in given.items()} | {"h": own}
        if self.history.is_replayed:
            self._inputs[chunk, layer] = found
        return found

    def _with_others(self, chunk: int, layer: int, state: dict[str, Any]) -> dict[str, Any]:
        """What a layer above the first reads: own rows, others behind them."""
        own = state["h"]
        if self.chunks[chunk].others.numel():
            others: Tensor = _Read.apply(own, self.history, layer, chunk)  # type: ignore[no-untyped-call]
            own = torch.cat([own, others])
        return self._dropped(layer - 1, state | {"h": own}, self._blocks[chunk].src_ids)

    def _dropped(self, layer: int, state: dict[str, Any], ids: Tensor | None) -> dict[str, Any]:
        return dict(self.model.dropped(layer, state, ids=ids, key=self._key)) if self._splits else state

    def _first_rows(self, chunk: int, passed: _Passed) -> tuple[dict[str, Any], Any]:
        """What layer 0 reads: of what ``begin`` made of all rows."""
        block, sources, own = self._blocks[chunk], self._sources[chunk], self.chunks[chunk].rows
        state: dict[str, Any] = {}
        for name, value in self._begun.items():
            if isinstance(value, SparseRows):
                state[name] = self._placement.rows(SparseFeatures(value).gather(sources))
            elif isinstance(value, PooledRows):
                state[name] = value.gather(sources)
            elif name in self._begun_grads:
                taken = value.detach().index_select(0, sources) if name == "h" else value.detach()[own]
                state[name] = passed.begun[name] = _leaf(taken)
            elif name == "h" and self.model.takes_pool:
                state[name], block = value, replace(block, rows=sources)
            else:
                state[name] = value.index_select(0, sources) if name == "h" else value[own]
        return state, block

    def _judged(self, chunk: int, outputs: _State) -> Tensor | None:
        """The chunk's share of the loss; None where none of its rows counts."""
        assert self._target is not None
        rows, y = self._target.rows[chunk], self._target.y[chunk]
        if not rows.numel():
            return None
        ids = self._blocks[chunk].dst_ids()
        with self._placement.context():
            last = self._dropped(self.model.num_layers - 1, outputs, ids)
            logits = self.model.finish(last, ids=ids, key=self._key)
        return self._target.loss(logits.index_select(0, rows), y) / self._target.count

    def outputs(self, chunk: int) -> _State:
        """What a chunk's rows are at the end of the stage. They are asked for once."""
        at = chunk, self.stop
        passed = self._passed.pop(at) if self._recompute else self._passed[at]
        return {name: value.detach() for name, value in passed.outputs.items()}

    # Backward

    def take_grads(self, chunk: int, grads: _State) -> None:
        """Gradients of ``outputs`` have come."""
        self._arrived[chunk] = grads

    def backward(self, task: Task) -> None:
        """Gradients down the layers of a task."""
        chunk = task.chunk
        assert chunk is not None, "a task of nothing is nobody's"
        passed = self._again(task) if self._recompute else self._passed.pop((chunk, task.stop))
        starts: list[tuple[Tensor, Tensor | None]] = []
        if task.stop == self.model.num_layers:
            starts += [] if passed.loss is None else [(passed.loss, None)]
        else:
            grads = self._arrived.pop(chunk) if task.stop == self.stop else self.input_grads(chunk, task.stop)
            starts += [(value, grads[name]) for name, value in passed.outputs.items() if name in grads]
        starts += [(rows, self.history.pulled(layer, chunk)) for layer, rows in passed.own]
        starts = [(value, grad) for value, grad in starts if value.requires_grad]
        if starts:
            torch.autograd.backward([value for value, _ in starts], [grad for _, grad in starts])
        self._push_begun(chunk, passed.begun)

    def _push_begun(self, chunk: int, leaves: _State) -> None:
        for name, leaf in leaves.items():
            if leaf.grad is None:
                continue
            if name == "h":
                flat = self._begun_grads[name]
                scatter_add_rows(flat, self._sources[chunk], leaf.grad.to(flat.dtype))
            else:
                self._begun_grads[name][self.chunks[chunk].rows] += leaf.grad

    def input_grads(self, chunk: int, layer: int) -> _State:
        """Gradients of the rows that a chunk had before a layer, once all that read them have gone backward."""
        found = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for name, leaf in self._inputs.pop((chunk, layer)).items()
        }
        found["h"] = found["h"] + self.history.pulled(layer, chunk)
        return found

    # What memory is counted from

    def like(self, chunks: Chunks, history: History, x: Rows | None, target: Target | None) -> Stage:
        """The same layers on other chunks."""
        span, recompute = (self.first, self.stop), self._recompute
        return Stage(
            self.model, span, chunks, history, self._placement, x=x, target=target, recompute=recompute,
            local=self._local,
        )  # fmt: skip

    @property
    def parts(self) -> dict[str, Any]:
        """What it holds, by name: edges, places of rows, input rows, what was made of them, and all for the way back."""
        return {
            "blocks": self._blocks,
            "structure": [self._blocks, self._sources, self._ids, self.chunks],
            "x": self._x,
            "target": self._target,
            "begun": self._begun,
            "begun_grads": self._begun_grads,
            "held": [self._inputs, [vars(passed) for passed in self._passed.values()]],
        }

    @contextmanager
    def watched(self) -> Iterator[list[_Passed]]:
        """What tasks that are computed again inside leave for their way back, kept beyond it."""
        self._watched = []
        try:
            yield self._watched
        finally:
            self._watched = None

    @property
    def recompute(self) -> bool:
        return self._recompute


def _leaf(rows: Tensor) -> Tensor:
    return rows.detach().requires_grad_() if torch.is_grad_enabled() else rows


class _Read(torch.autograd.Function):
    """Rows of others [o, ...] out of a table; their gradients into it. Own rows are given to have a place in the graph."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, history: History, layer: int, chunk: int) -> Tensor:
        ctx.history, ctx.layer, ctx.chunk = history, layer, chunk
        return history.read(layer, chunk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.history.push(ctx.layer, ctx.chunk, grad)
        return None, None, None, None
