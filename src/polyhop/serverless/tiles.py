"""Runs a program over rows, forward and backward, in tiles of a fixed number of rows.

A row's result may differ in its last bits with how many rows are multiplied together, and sums over rows with how they are
grouped. Tiles are cut by position alone, so results have the same bits however rows arrive: at once, or in blocks of any
sizes of which each tile is computed as soon as it is complete. Sums (gradients of weights, the loss) are added tile by tile,
in order. One BLAS thread is the caller's business: several may sum in another order.

Legend: n rows, t rows of a tile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from polyhop.errors import InputError, unknown
from polyhop.serverless.ops import Array
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.ragged import Ragged

__all__ = ["TILE", "Arriving", "backward", "forward", "loss_and_backward"]

TILE = 1024
"""Rows. Products ran within an eighth of each other from 64 to 4096 rows (602 x 128 and 128 x 64 in float32, a busy core);
at 1024 a tile of 256 columns stays in the cache, and work begins after a MB has arrived."""

Arriving: TypeAlias = Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""Arrays [n, ...] by name; or blocks of them, one after another, as they arrive."""


def forward(
    program: Program,
    rows: Arriving,
    weights: Mapping[str, Array],
    tile: int = TILE,
    *,
    num_rows: int | None = None,
    keeps: bool = False,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """(outputs, what was saved for ``backward``: nothing unless ``keeps``). ``num_rows`` is needed where blocks arrive."""
    cut = _Cut(program, weights, rows, num_rows, tile)
    outputs, saved = cut.whole(), cut.whole()
    for given in cut.tiles(rows, program.rows):
        held = _run(program.calls, given, cut.weights)
        outputs.put({name: held[name] for name in program.outputs}, program.sums)
        if keeps:
            saved.put({name: held[name] for name in program.saved_names}, ())
    return outputs.found, saved.found


def backward(
    program: Program,
    rows: Arriving,
    weights: Mapping[str, Array],
    grads: Arriving,
    tile: int = TILE,
    *,
    saved: Arriving | None = None,
    num_rows: int | None = None,
    grad_names: Collection[str] | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """(gradients of rows that have one, gradients of all weights), given those of the outputs.

    One that is missing counts as 0; ``grad_names``: of which outputs they are where they come in blocks, None: of all.
    ``saved``: of ``forward``; None: it is computed again, to the same bits.
    """
    cut = _Cut(program, weights, rows, num_rows, tile)
    grads, sums = _split_sums(program, grads)
    given_by = {name: Row(program.shapes[name]) for name in program.outputs if name not in program.sums}
    if isinstance(grads, Mapping) or grad_names is not None:
        given_by = {
            name: given_by[name] for name in (grads if isinstance(grads, Mapping) else grad_names or ())
        }
    grad_tiles = cut.tiles(grads, given_by)
    saved_tiles = None
    if saved is not None:
        saved_tiles = cut.tiles(saved, {name: Row(shape) for name, shape in program.saved_widths.items()})
    back = _Back(program, cut)
    for given in cut.tiles(rows, program.rows):
        if saved_tiles is None:
            held = _run(program.recomputed, given, cut.weights)
        else:
            held = {**given, **next(saved_tiles)}
        back.tile({**next(grad_tiles), **sums}, held)
    return back.rows.found, back.weights.found


def loss_and_backward(
    program: Program,
    rows: Arriving,
    weights: Mapping[str, Array],
    tile: int = TILE,
    *,
    num_rows: int | None = None,
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """(outputs, gradients of rows, gradients of weights) of a program whose first output is a loss.

    Nothing is computed twice. The bits of ``forward`` and then ``backward`` with a gradient of 1.
    """
    if not program.outputs or program.outputs[0] not in program.sums:
        raise InputError(f"program: expected a loss as its first output, got {list(program.outputs)}")
    cut = _Cut(program, weights, rows, num_rows, tile)
    outputs, back = cut.whole(), _Back(program, cut)
    for given in cut.tiles(rows, program.rows):
        held = _run(program.calls, given, cut.weights)
        outputs.put({name: held[name] for name in program.outputs}, program.sums)
        back.tile({program.outputs[0]: np.ones(())}, held)
    return outputs.found, back.rows.found, back.weights.found


def _split_sums(program: Program, grads: Arriving) -> tuple[Arriving, dict[str, Any]]:
    """(gradients of rows, gradients of sums over rows)."""
    if not isinstance(grads, Mapping):
        return grads, {}
    for name in grads:
        if name not in program.outputs:
            raise InputError("program, gradients: " + unknown("output", name, program.outputs))
    sums = {name: grad for name, grad in grads.items() if name in program.sums}
    return {name: grad for name, grad in grads.items() if name not in sums}, sums


def _run(calls: Iterable[Call], given: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Any]:
    """The rows of a tile, every value made of them, and what ops saved, by name."""
    held = dict(given)
    for call in calls:
        inputs = [weights[name] if name in weights else held[name] for name in call.inputs]
        outputs, saved = call.what.forward(inputs, call.settings)
        held.update(zip(call.outputs, outputs, strict=True))
        held.update(zip(map(call.saved_name, call.what.saves), saved, strict=True))
    return held


class _Back:
    """Gradients, tile by tile."""

    def __init__(self, program: Program, cut: _Cut) -> None:
        self._program, self._weights = program, cut.weights
        self.rows, self.weights = cut.whole(), cut.whole()

    def tile(self, grads: Mapping[str, Array], held: Mapping[str, Any]) -> None:
        """Add one tile: gradients of outputs, and the values that ``saved_names`` lists, with the rows."""
        program, weights = self._program, self._weights
        flowing: dict[str, Array] = dict(grads)
        for call in reversed(program.calls):
            arriving = [flowing.pop(name, None) for name in call.outputs]
            wanted = [name in program.moving for name in call.inputs]
            if all(grad is None for grad in arriving) or not any(wanted):
                continue
            inputs = [weights[name] if name in weights else held.get(name) for name in call.inputs]
            saved = [held[call.saved_name(name)] for name in call.what.saves]
            found = call.what.gradient(arriving, saved, inputs, call.settings, wanted)
            for name, grad, is_wanted in zip(call.inputs, found, wanted, strict=True):
                if grad is not None and is_wanted:
                    flowing[name] = flowing[name] + grad if name in flowing else grad
        moving = {name: held[name] for name, row in program.rows.items() if row.has_gradient}
        self.rows.put(_or_zero(flowing, moving), ())
        self.weights.put(_or_zero(flowing, weights), weights)


def _or_zero(found: Mapping[str, Array], like: Mapping[str, Array]) -> dict[str, Array]:
    return {name: found[name] if name in found else np.zeros_like(array) for name, array in like.items()}


class _Whole:
    """Arrays of all rows, made once and filled tile by tile; or sums over tiles."""

    def __init__(self, num_rows: int | None) -> None:
        self._num_rows, self._at = (
            num_rows,
            0,
        )  # None: one tile, of which every array has its own number of rows
        self.found: dict[str, Array] = {}

    def put(self, arrays: Mapping[str, Array], sums: Collection[str]) -> None:
        stop = self._at
        for name, array in arrays.items():
            if name in sums and name in self.found:
                self.found[name] += array
            elif name in sums or self._num_rows is None:
                self.found[name] = array
            else:
                if name not in self.found:
                    self.found[name] = np.empty((self._num_rows, *array.shape[1:]), array.dtype)
                stop = self._at + array.shape[0]
                self.found[name][self._at : stop] = array
        self._at = stop


class _Cut:
    """Cuts what a program is given into tiles, and checks it."""

    def __init__(
        self, program: Program, weights: Mapping[str, Array], rows: Arriving, num_rows: int | None, tile: int
    ) -> None:
        if tile < 1:
            raise InputError(f"tile={tile}: expected at least one row")
        self._program, self._tile = program, tile
        self.weights = _checked_weights(program, weights)
        self._dtype = next((weight.dtype for weight in self.weights.values()), None)
        self._num_rows = _num_rows(program, rows, num_rows)

    def whole(self) -> _Whole:
        return _Whole(None if self._program.is_whole else self._num_rows)

    def tiles(self, given: Arriving, expected: Mapping[str, Row]) -> Iterator[dict[str, Any]]:
        """The arrays of the expected names in tiles, at least one."""
        if not isinstance(given, Mapping):
            yield from self._gathered(given, expected)
            return
        if missing := [name for name in expected if name not in given]:
            raise InputError(f"program: {missing[0]!r} is missing; expected {', '.join(expected)}")
        named = {name: given[name] for name in expected}
        self._check(named, expected)
        if self._program.is_whole:
            yield named
            return
        for name, array in named.items():
            if array.shape[0] != self._num_rows:
                raise InputError(f"program: expected {self._num_rows} rows of {name!r}, got {array.shape[0]}")
        for start in range(0, max(self._num_rows, 1), self._tile):
            yield {name: array[start : start + self._tile] for name, array in named.items()}

    def _gathered(
        self, blocks: Iterable[Mapping[str, Any]], expected: Mapping[str, Row]
    ) -> Iterator[dict[str, Any]]:
        """Tiles of arrays that arrive in blocks, each as soon as it is complete."""
        if self._program.is_whole:
            raise InputError("program: ops on edges need all rows at once, not in blocks")
        tile, waiting = self._tile, list[Mapping[str, Any]]()
        num_waiting = num_seen = 0
        for block in blocks:
            if block.keys() != expected.keys():
                raise InputError(f"program: a block has {sorted(block)}, expected {sorted(expected)}")
            self._check(block, expected)
            counts = {array.shape[0] for array in block.values()}
            if len(counts) != 1:
                raise InputError(
                    f"program: the arrays of a block have {sorted(counts)} rows, expected one number"
                )
            waiting.append(block)
            num_waiting += counts.pop()
            while num_waiting >= tile:
                joined = _joined(waiting)
                yield {name: array[:tile] for name, array in joined.items()}
                num_seen, num_waiting = num_seen + tile, num_waiting - tile
                rest = {name: array[tile:] for name, array in joined.items()}
                waiting = (
                    [rest] if num_waiting else []
                )  # an empty one would have to be joined to what comes: a copy
        if num_seen + num_waiting != self._num_rows or not (waiting or num_seen):
            raise InputError(
                f"program: expected {self._num_rows} rows in at least one block, {num_seen + num_waiting} arrived"
            )
        if num_waiting or not num_seen:
            yield _joined(waiting)

    def _check(self, given: Mapping[str, Any], expected: Mapping[str, Row]) -> None:
        """InputError where an array is not what the program reads."""
        for name, row in expected.items():
            array = given[name]
            if isinstance(array, Ragged) != (row.kind == "sparse") or array.shape[1:] != row.shape:
                raise InputError(
                    f"program: {name!r}: expected {row.kind} {['n', *row.shape]}, got {type(array).__name__} "
                    f"{list(array.shape)}"
                )
            wanted = {"float": "f", "ids": "iu", "marks": "biuf"}.get(row.kind)
            if wanted is not None and array.dtype.kind not in wanted:
                raise InputError(f"program: {name!r}: expected {row.kind}, got {array.dtype}")
            if row.kind == "float" and self._dtype not in (None, array.dtype):
                raise InputError(
                    f"program: {name!r} is {array.dtype}, weights are {self._dtype}: expected one number format"
                )


def _joined(blocks: list[Mapping[str, Any]]) -> dict[str, Any]:
    if len(blocks) == 1:
        return dict(blocks[0])
    joined = {}
    for name, first in blocks[0].items():
        parts = [block[name] for block in blocks]
        joined[name] = Ragged.joined(parts) if isinstance(first, Ragged) else np.concatenate(parts)
    return joined


def _num_rows(program: Program, rows: Arriving, given: int | None) -> int:
    if not isinstance(rows, Mapping):
        if given is None:
            raise InputError("program: num_rows is needed where rows arrive in blocks")
        return given
    return next((rows[name].shape[0] for name in program.rows if name in rows), given or 0)


def _checked_weights(program: Program, given: Mapping[str, Array]) -> dict[str, Array]:
    """Those that the program reads, in one number format."""
    for name, shape in program.weights.items():
        if name not in given:
            raise InputError(f"program: weight {name!r} is missing; given: {', '.join(given) or 'none'}")
        if given[name].shape != shape:
            raise InputError(
                f"program: weight {name!r}: expected {list(shape)}, got {list(given[name].shape)}"
            )
    found = {name: given[name] for name in program.weights}
    formats = {str(weight.dtype) for weight in found.values()}
    if len(formats) > 1:
        raise InputError(f"program: weights are {', '.join(sorted(formats))}: expected one number format")
    return found
