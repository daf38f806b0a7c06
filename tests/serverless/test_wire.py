"""Messages: what is packed comes out again, and nothing else does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec")

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from polyhop.serverless import wire
from polyhop.serverless.wire import LIMITS, Limits, TaskKey, WireError, pack, unpack

KEY = TaskKey(3, 1, 17, 2, False)
MESSAGES: list[wire.Header] = [
    wire.Hello("job", "f-1", wire.PROTOCOL, 192, 900_000),
    wire.Pull(((0, 3), (1, 3))),
    wire.Task(KEY, 7, 5000, 3, (), {"calls": []}, ("z",), {"scale": 0.5}),
    wire.Task(KEY, 8, 5000, 3, (), None, ("z",), {}, 3000, 2),
    wire.More(8, 1, ()),
    wire.Push(KEY, 7, (), 1.5, 0.5, {"loss": 2.0}),
    wire.Failed(KEY, 7, "no such piece"),
    wire.Ack(7, "ok"),
    wire.Stop("done"),
    wire.Bye("time"),
    wire.Rows(1, 17, 3, ()),
    wire.Sums(1, 17, 3, ()),
]
ARRAYS: dict[str, Any] = {
    "z": np.arange(12, dtype=np.float32).reshape(3, 4),
    "ids": np.array([5, -1], dtype=np.int64),
    "none": np.zeros((0, 4)),
    "w:bias": np.ones(3),
}


@pytest.mark.parametrize("header", MESSAGES, ids=lambda each: type(each).__name__)
def test_messages_come_out_as_they_went_in(header: wire.Header) -> None:
    arrays = ARRAYS if hasattr(header, "arrays") else {}
    found, rows = unpack([bytes(frame) for frame in pack(header, arrays)])
    assert type(found) is type(header)
    if arrays:
        assert msgspec.structs.replace(found, arrays=()) == header  # type: ignore[call-arg]
    else:
        assert found == header
    assert list(rows) == list(arrays)
    for name, value in arrays.items():
        assert rows[name].dtype == value.dtype
        assert np.array_equal(rows[name], value)


def test_arrays_are_not_copied() -> None:
    value = np.arange(4.0)
    frames = pack(wire.Rows(0, 0, 0, ()), {"h": value})
    value[2] = 9.0
    assert unpack(frames)[1]["h"][2] == 9.0


def test_what_is_not_told_or_not_allowed_is_refused() -> None:
    frames = [bytes(each) for each in pack(wire.Rows(0, 0, 0, ()), ARRAYS)]
    bad: dict[str, list[bytes]] = {
        "frames": [],
        "that the header does not tell of": [*frames, b"more"],
        "were told": frames[:-1],
        "bytes were told": [frames[0], frames[1][:-1], *frames[2:]],
        "none of ours": [b"\x93\xa4rows", *frames[1:]],
        "a header of": [b"x" * (LIMITS.header_bytes + 1)],
    }
    for message, given_frames in bad.items():
        with pytest.raises(WireError, match=message):
            unpack(given_frames)
    with pytest.raises(WireError, match="cannot be sent"):
        pack(wire.Rows(0, 0, 0, ()), {"z": np.zeros(3, dtype=complex)})
    with pytest.raises(WireError, match="carries no arrays"):
        pack(wire.Stop("x"), ARRAYS)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (wire.ArrayHead("z", "object", (1,)), "dtype"),
        (wire.ArrayHead("z", "float32", (-1, -4)), "shape"),
        (wire.ArrayHead("z", "float32", (1,) * 9), "shape"),
        (wire.ArrayHead("z", "float64", (1 << 40, 1 << 40)), "are allowed"),
        (wire.ArrayHead("z", "uint8", (10 << 30,)), "are allowed"),
    ],
    ids=str,
)
def test_arrays_that_cannot_be_are_refused_before_they_are_made(head: wire.ArrayHead, message: str) -> None:
    header = msgspec.msgpack.encode(wire.Rows(0, 0, 0, (head,)))
    with pytest.raises(WireError, match=message):
        unpack([header, b"1234"])


def test_two_arrays_of_one_name_are_refused() -> None:
    head = wire.ArrayHead("z", "uint8", (1,))
    with pytest.raises(WireError, match="one name"):
        unpack([msgspec.msgpack.encode(wire.Rows(0, 0, 0, (head, head))), b"1", b"2"])


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_garbage_is_refused_and_nothing_else_happens(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        unpack(frames, Limits(num_arrays=8))


def test_changed_bytes_never_get_past_the_checks() -> None:
    """Either refused, or arrays that fit what the header says."""
    frames = [bytes(each) for each in pack(wire.Push(KEY, 7, ()), ARRAYS)]
    rng = random.Random(0)
    for _ in range(3000):
        header = bytearray(frames[0])
        for _ in range(rng.randint(1, 3)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        try:
            _, arrays = unpack([bytes(header), *frames[1:]])
        except WireError:
            continue
        assert sum(each.nbytes for each in arrays.values()) == sum(map(len, frames[1:]))


def test_it_needs_no_torch() -> None:
    code = "import sys, polyhop.serverless.wire; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
