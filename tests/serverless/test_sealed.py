"""What is sealed is read by the other end alone, once, in order, whole."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cryptography")

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyhop.serverless.sealed import SEAL_BYTES, Sealer, SealError, Session

Frames = list[Any]
PLAIN = [b"header", b"", bytes(range(256)) * 5, b"tail"]


def ends() -> tuple[Sealer, Sealer]:
    """Of a session: the server's and the function's."""
    key = Session.draw().key
    return Sealer(key, is_server=True), Sealer(key, is_server=False)


@given(st.lists(st.lists(st.binary(max_size=200), min_size=1, max_size=6), min_size=1, max_size=6))
def test_both_ways(messages: list[list[bytes]]) -> None:
    server, function = ends()
    for one, other in ((server, function), (function, server)):
        for frames in messages:
            sealed = one.seal(frames)
            assert [len(each) for each in sealed[1:]] == [len(each) + SEAL_BYTES for each in frames]
            assert [bytes(each) for each in other.open(sealed)] == frames


def test_arrays_are_sealed_where_they_lie_and_can_be_written_to_when_opened() -> None:
    server, function = ends()
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    (found,) = function.open(server.seal([rows.data.cast("B")]))
    made = np.frombuffer(found, np.float32).reshape(3, 4)
    assert np.array_equal(made, rows)
    assert made.flags.writeable


def test_nothing_of_a_message_can_be_read() -> None:
    server, _ = ends()
    secret = secrets.token_bytes(64)
    first, second = server.seal([secret, secret]), server.seal([secret, secret])
    bodies = [*first[1:], *second[1:]]
    assert all(secret[at : at + 8] not in body for body in bodies for at in range(57))
    assert len(set(bodies)) == 4  # the same bytes never look the same


def flipped(frames: Frames, place: int, bit: int = 3) -> Frames:
    changed = bytearray(frames[place])
    changed[-1] ^= 1 << bit
    return [*frames[:place], bytes(changed), *frames[place + 1 :]]


CHANGES: dict[str, Callable[[Frames], Frames]] = {
    "a bit of the number": lambda frames: flipped(frames, 0, 6),
    "a bit of a frame": lambda frames: flipped(frames, 3),
    "a bit of an empty frame": lambda frames: flipped(frames, 2),
    "two frames swapped": lambda frames: [frames[0], frames[1], frames[3], frames[2], frames[4]],
    "one frame less": lambda frames: frames[:-1],
    "one frame more": lambda frames: [*frames, frames[-1]],
    "a frame cut": lambda frames: [*frames[:-1], frames[-1][:-1]],
    "a frame that is no seal": lambda frames: [*frames[:-1], b"short"],
    "no frames": lambda frames: frames[:1],
    "nothing": lambda frames: [],
    "a number that is none": lambda frames: [b"1", *frames[1:]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_message_is_refused_and_the_next_is_not(change: str) -> None:
    server, function = ends()
    with pytest.raises(SealError):
        function.open(CHANGES[change](server.seal(PLAIN)))
    assert [bytes(each) for each in function.open(server.seal(PLAIN))] == PLAIN


def test_replayed_and_reordered_messages_are_refused_and_lost_ones_are_not_missed() -> None:
    server, function = ends()
    first, second, _, fourth = (server.seal(PLAIN) for _ in range(4))
    function.open(second)
    for old in (first, second):
        with pytest.raises(SealError, match="sent before"):
            function.open(old)
    function.open(fourth)


def test_a_message_of_another_session_or_way_is_refused() -> None:
    server, function = ends()
    with pytest.raises(SealError, match="not sealed"):
        function.open(ends()[0].seal(PLAIN))
    with pytest.raises(SealError, match="not sealed"):
        server.open(server.seal(PLAIN))  # sent back to who sealed it


def test_sessions_are_drawn_anew_and_do_not_show_what_they_hold() -> None:
    one, other = Session.draw(), Session.draw()
    assert len({one.name, other.name, one.password, other.password}) == 4
    assert one.key != other.key
    assert one.password not in repr(one)
    assert one.key.hex() not in repr(one)
    with pytest.raises(SealError, match="expected 32"):
        Sealer(b"short", is_server=True)
