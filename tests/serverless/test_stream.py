"""Rows of a task in several messages: the same payload and bits as in one, and nothing but the next block is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

from polyhop.errors import InputError
from polyhop.serverless import stream, wire
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.ragged import Ragged
from polyhop.serverless.stream import Arrivals, block_rows, cut, num_messages
from polyhop.serverless.tasks import FUSES, SAVES, flat, run_task
from polyhop.serverless.tiles import TILE
from polyhop.serverless.wire import Limits, TaskKey, WireError

HIDDEN = Program(
    {"z": Row((6,)), "words": Row((9,), "sparse"), "h0": Row((6,), is_fixed=True)},
    {"w": (5, 6), "s": (5, 9), "b": (5,), "g": (5,), "o": (5,)},
    (
        Call("linear", ("z", "w", "b"), ("t",)),
        Call("sparse_linear", ("words", "s"), ("c",)),
        Call("add", ("t", "c"), ("d",)),
        Call("layer_norm", ("d", "g", "o"), ("n",)),
        Call("elu", ("n",), ("h",)),
    ),
    ("h", "t", "h0"),
)
LAST = Program(
    {"z": Row((6,)), "labels": Row((), "ids")},
    {"w": (4, 6)},
    (
        Call("relu", ("z",), ("h",)),
        Call("linear", ("h", "w"), ("logits",)),
        Call("cross_entropy", ("logits", "labels"), ("loss", "count"), {"scale": 0.1}),
    ),
    ("loss", "count"),
)
SIZES = [TILE + 1, 2 * TILE, 3 * TILE + 77]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1 << 14)


def random_of(program: Program, n: int, dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(n)
    rows: dict[str, Any] = {}
    for name, row in program.rows.items():
        if row.kind == "sparse":
            indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 5, n))])
            total = int(indptr[-1])
            values = rng.standard_normal(total).astype(dtype)
            rows[name] = Ragged(indptr, rng.integers(0, 9, total).astype(np.int32), values, 9)
        elif row.kind == "ids":
            rows[name] = rng.integers(-1, 4, n)
        else:
            rows[name] = rng.standard_normal((n, *row.shape)).astype(dtype)
    return rows, {name: rng.standard_normal(shape).astype(dtype) for name, shape in program.weights.items()}


def never(are_there: Callable[[], bool]) -> None:
    assert are_there(), "a block was waited for that had come"


def arrived(rows: dict[str, Any]) -> tuple[Iterator[dict[str, Any]], int]:
    """Blocks as a function has them, over the wire's bytes; how many."""
    n, arrivals = next(iter(rows.values())).shape[0], Arrivals()
    first, *more = cut(rows)
    frames = [
        wire.pack(wire.Task(TaskKey(0, 0, 0, 0, False), 7, 1, 0, (), None, (), {}, n, len(more)), first)
    ]
    frames += [wire.pack(wire.More(7, at, ()), block) for at, block in enumerate(more, start=1)]
    told, arrays = wire.unpack([bytes(each) for each in frames[0]])
    assert isinstance(told, wire.Task)
    arrival = arrivals.begin(told, arrays)
    for each in frames[1:]:
        header, arrays = wire.unpack([bytes(frame) for frame in each])
        assert isinstance(header, wire.More)
        arrivals.put(header, arrays)
    assert arrival.is_complete
    blocks = arrival.rows(never)
    assert not isinstance(blocks, dict)
    return blocks, 1 + len(more)


def assert_same(found: Any, expected: Any) -> None:
    assert found[1] == expected[1]
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert found[0][name].dtype == value.dtype
        assert found[0][name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_a_hidden_piece_has_the_bits_of_one_message(n: int, dtype: Any) -> None:
    rows, weights = random_of(HIDDEN, n, dtype)
    whole = run_task(HIDDEN, False, flat(rows), weights, (), {SAVES: 1})
    blocks, count = arrived(rows)
    assert count == -(-n // TILE)
    assert_same(run_task(HIDDEN, False, blocks, weights, (), {SAVES: 1}, num_rows=n), whole)
    rng = np.random.default_rng(1)
    given = {f"g:{name}": rng.standard_normal((n, 5)).astype(dtype) for name in ("h", "t")}
    saved = {name: value for name, value in whole[0].items() if name.startswith("s:")}
    assert saved
    for more in (given, {"g:h": given["g:h"]}, {**given, **saved}, saved):
        both = {**rows, **more}
        expected = run_task(HIDDEN, True, flat(both), weights, ("z",))
        assert_same(run_task(HIDDEN, True, arrived(both)[0], weights, ("z",), num_rows=n), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_the_last_piece_has_the_bits_of_one_message(n: int, dtype: Any) -> None:
    rows, weights = random_of(LAST, n, dtype)
    expected = run_task(LAST, False, flat(rows), weights, ("z",), {FUSES: 1})
    assert_same(run_task(LAST, False, arrived(rows)[0], weights, ("z",), {FUSES: 1}, num_rows=n), expected)
    apart = run_task(LAST, True, arrived(rows)[0], weights, ("z",), num_rows=n)
    assert_same(apart, (expected[0], {}))


@pytest.mark.parametrize("n", [0, 1, TILE, *SIZES])
def test_payload_and_messages_are_those_that_are_accounted(n: int) -> None:
    rows, _ = random_of(HIDDEN, n, np.float32)
    total = wire.num_bytes(flat(rows))
    blocks = cut(rows)
    assert sum(map(wire.num_bytes, blocks)) == total
    assert len(blocks) == num_messages(n, total)
    assert all(block["z"].shape[0] % TILE == 0 for block in blocks[:-1])


def test_blocks_are_whole_tiles_of_about_a_size_and_not_too_many() -> None:
    size = stream.BLOCK_BYTES
    assert block_rows(100 * TILE, size) == 100 * TILE
    assert block_rows(TILE, 100 * size) == TILE
    assert block_rows(100 * TILE, 100 * size) == TILE
    assert block_rows(100 * TILE, 10 * size) == 10 * TILE
    assert block_rows(100 * TILE, 1000 * size) == TILE
    assert num_messages(100 * TILE + 1, 1000 * size) == 101
    assert block_rows(100 * TILE, 100 * size, Limits(num_blocks=7)) == 15 * TILE


def task(num_more: int, lease: int = 7) -> wire.Task:
    return wire.Task(TaskKey(0, 0, 0, 0, False), lease, 1, 0, (), None, (), {}, 4, num_more)


X: Any = {"x": np.ones((2, 3))}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([(7, 2)], "block 2 of lease 7, expected 1 of 2"),
        ([(7, 0)], "block 0 of lease 7, expected 1 of 2"),
        ([(7, 1), (7, 1)], "block 1 of lease 7, expected 2 of 2"),
        ([(7, 1), (7, 2), (7, 3)], "of which none is expected"),
        ([(8, 1)], "of which none is expected"),
    ],
    ids=str,
)
def test_nothing_but_the_next_block_is_taken(blocks: list[tuple[int, int]], message: str) -> None:
    arrivals = Arrivals()
    arrivals.begin(task(2), X)
    *fine, (lease, number) = blocks
    for each in fine:
        arrivals.put(wire.More(*each, ()), X)
    with pytest.raises(WireError, match=message):
        arrivals.put(wire.More(lease, number, ()), X)


def test_blocks_are_bounded() -> None:
    with pytest.raises(WireError, match="a task of 1025 blocks; 1024 are allowed"):
        Arrivals().begin(task(1024), X)
    with pytest.raises(WireError, match="blocks"):
        Arrivals().begin(task(-1), X)
    arrivals = Arrivals(Limits(task_bytes=120))
    arrival = arrivals.begin(task(9), {**X, "w:b": np.ones(100)})
    arrivals.put(wire.More(7, 1, ()), X)
    arrival.drop()  # bytes of a task that nobody reads count too
    with pytest.raises(WireError, match="a task of 144 bytes or more; 120 are allowed"):
        arrivals.put(wire.More(7, 2, ()), X)
    arrivals = Arrivals()
    arrivals.begin(task(2), X)
    with pytest.raises(WireError, match="came twice"):
        arrivals.begin(task(2), X)
    with pytest.raises(WireError, match=r"a block of \['x', 'y'\], expected \['x'\]"):
        arrivals.put(wire.More(7, 1, ()), {**X, "y": np.ones(2)})


def test_rows_that_do_not_fit_together_are_not_computed() -> None:
    """A gradient of one row would be spread over all of a tile."""
    n = TILE + 5
    rows, weights = random_of(LAST, n, np.float64)
    hidden = replace(LAST, calls=LAST.calls[:2], outputs=("logits",), rows={"z": LAST.rows["z"]})
    good = cut({"z": rows["z"], "g:logits": np.ones((n, 4))})
    assert len(good) == 2
    short = [good[0], {"z": good[1]["z"], "g:logits": np.ones((1, 4))}]
    with pytest.raises(InputError, match=r"the arrays of block 1 have \[1, 5\] rows"):
        run_task(hidden, True, iter(short), weights, ("z",), num_rows=n)
    for blocks in (good[:1], [*good, good[1]]):
        with pytest.raises(InputError, match=f"expected {n} rows"):
            run_task(hidden, True, iter(blocks), weights, ("z",), num_rows=n)
