"""The sockets of a post, without its thread: who is let in, by which name, and who is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")

import zmq

from polyhop.serverless.doors import Doors, received, sent
from polyhop.serverless.secrets import FUNCTION, SERVER, Entry, KeyPair, Keys, guarded
from polyhop.serverless.wire import LIMITS

FUNCTIONS, SERVERS = KeyPair.draw(), KeyPair.draw()


@pytest.fixture
def doors() -> Iterator[Doors]:
    made = Doors(Keys(KeyPair.draw(), SERVERS, FUNCTIONS.public), "127.0.0.1", LIMITS)
    yield made
    made.close()


@pytest.fixture
def client() -> Iterator[Any]:
    """Not connected."""
    context: zmq.Context[Any] = zmq.Context()
    made = context.socket(zmq.DEALER)
    yield made
    made.close(linger=0)
    context.term()


def go_to_the_door(client: Any, entry: Entry) -> None:
    guarded(client, FUNCTIONS, entry)
    client.connect(entry.address)


def test_keys_say_who_is_answered() -> None:
    keys = Keys(KeyPair.draw(), SERVERS, FUNCTIONS.public)
    assert keys.answered == {FUNCTIONS.public: FUNCTION, SERVERS.public: SERVER}


def test_who_is_admitted_goes_by_the_name_that_it_was_given(doors: Doors, client: Any) -> None:
    asked: list[tuple[bytes, list[bytes]]] = []

    def user_of(mechanism: bytes, credentials: list[bytes]) -> str:
        asked.append((mechanism, credentials))
        return "somebody"

    go_to_the_door(client, doors.entry)
    client.send_multipart([b"a", b"bc"])
    assert doors.gate.poll(10_000)
    assert doors.admit(user_of)
    assert [(mechanism, len(credentials[0])) for mechanism, credentials in asked] == [(b"CURVE", 32)]
    assert doors.door.poll(10_000)
    message = received(doors.door)
    assert message is not None
    user, identity, frames = message
    assert (user, [bytes(frame) for frame in frames]) == ("somebody", [b"a", b"bc"])
    assert received(doors.door) is None
    assert sent(doors.door, identity, [b"d"])
    assert client.poll(10_000)
    assert client.recv_multipart() == [b"d"]


def test_who_is_refused_leaves_no_byte(doors: Doors, client: Any) -> None:
    client.plain_username, client.plain_password = b"name", b"word"
    client.connect(f"tcp://127.0.0.1:{doors.desk_port}")
    client.send(b"x" * 1000)
    asked: list[Any] = []
    assert doors.gate.poll(10_000)
    assert not doors.admit(lambda *given: asked.append(given))
    assert asked == [(b"PLAIN", [b"name", b"word"])]
    assert not doors.desk.poll(200)
    assert received(doors.desk) is None


def test_nobody_of_that_identity(doors: Doors) -> None:
    assert not sent(doors.desk, b"nobody", [b"x"])


def test_servers_reach_each_other(doors: Doors) -> None:
    other = Doors(Keys(KeyPair.draw(), SERVERS, FUNCTIONS.public), "127.0.0.1", LIMITS)
    try:
        other.connect({4: doors.entry})
        other.to_peer(4, [b"rows"])
        assert doors.gate.poll(10_000)
        assert doors.admit(lambda mechanism, credentials: SERVER)
        assert doors.door.poll(10_000)
        message = received(doors.door)
        assert message is not None
        assert (message[0], bytes(message[2][0])) == (SERVER, b"rows")
    finally:
        other.close()
