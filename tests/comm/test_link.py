"""One connection of the heartbeat: whole messages, halves, nonsense, long texts."""

from __future__ import annotations

import socket

from polyhop.comm.link import FAILED, GOODBYE, Link, Message


def pair() -> tuple[Link, Link]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return Link(near, 1), Link(far, 0)


def test_messages_arrive_whole_and_in_order() -> None:
    near, far = pair()
    near.send(FAILED, 3, reason=2, text="lr=−1")
    near.send(GOODBYE, 3)
    near.socket.close()
    while far.read():
        pass
    assert far.messages() == [Message(FAILED, 2, 3, "lr=−1"), Message(GOODBYE, 0, 3, "")]
    far.socket.close()


def test_half_a_message_waits_for_the_rest() -> None:
    near, far = pair()
    near.socket.send(b"plhb" + bytes(100))
    near.socket.shutdown(socket.SHUT_WR)
    while far.read():
        pass
    assert far.messages() == []
    assert len(far.buffer) == 104
    near.socket.close()
    far.socket.close()


def test_nonsense_and_long_texts() -> None:
    near, far = pair()
    near.socket.send(b"x" * 256)
    near.send(FAILED, 0, text="é" * 400)
    near.socket.close()
    while far.read():
        pass
    nonsense, long = far.messages()
    assert nonsense is None
    assert long is not None
    assert long.text == "é" * 122
    far.socket.close()


def test_sending_to_a_closed_link_is_no_error() -> None:
    near, far = pair()
    far.socket.close()
    for _ in range(3):
        near.send(GOODBYE, 1)
    near.socket.close()
