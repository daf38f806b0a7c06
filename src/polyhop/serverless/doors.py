"""The sockets of a post: the gate, where it is said who may come in; the door, for servers and for a function's first word;
the desk, for whatever a function says after it; and one to each other server. Only one thread may use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import zmq

from polyhop.serverless.sealed import SEAL_BYTES
from polyhop.serverless.secrets import Entry, Keys, guarded
from polyhop.serverless.wire import Limits

__all__ = ["Doors", "Socket", "received", "sent"]

_HANDSHAKE_MS = 5000

Socket = zmq.Socket[bytes]


class Doors:
    """Open from the moment they are made, at two free ports of the host."""

    def __init__(self, keys: Keys, host: str, limits: Limits) -> None:
        self._keys, self._context = keys, zmq.Context()
        self.gate: Socket = self._context.socket(zmq.REP)  # ZAP: who may come in
        self.gate.bind("inproc://zeromq.zap.01")
        self.door, self.desk = (_router(self._context, limits) for _ in range(2))
        guarded(self.door, keys.own)
        self.desk.plain_server = True
        port = self.door.bind_to_random_port(f"tcp://{host}")
        self.desk_port = self.desk.bind_to_random_port(f"tcp://{host}")
        self.entry = Entry(f"tcp://{host}:{port}", keys.own.public)
        self._peers: dict[int, Socket] = {}

    def admit(self, user_of: Callable[[bytes, list[bytes]], str | None]) -> bool:
        """ZAP (RFC 27): an answer to a connection that shakes hands. ``user_of`` names who has such credentials, by
        mechanism; False: nobody."""
        version, sequence, _, _, _, mechanism, *credentials = self.gate.recv_multipart()
        user = user_of(mechanism, credentials)
        answer = (b"200", b"", user.encode()) if user else (b"400", b"no key of this job", b"")
        self.gate.send_multipart([version, sequence, *answer, b""])
        return user is not None

    def connect(self, peers: Mapping[int, Entry]) -> None:
        """Servers, by number."""
        for number, entry in peers.items():
            made = self._context.socket(zmq.DEALER)
            guarded(made, self._keys.to_servers, entry)
            made.setsockopt(zmq.SNDHWM, 0)
            made.setsockopt(zmq.LINGER, 0)
            made.connect(entry.address)
            self._peers[number] = made

    def to_peer(self, peer: int, frames: list[Any]) -> None:
        self._peers[peer].send_multipart(frames, copy=False)

    def close(self) -> None:
        for each in (self.gate, self.door, self.desk, *self._peers.values()):
            each.close(linger=200)
        self._context.term()


def received(socket: Socket) -> tuple[str, bytes, list[memoryview]] | None:
    """(user that the gate named, identity, frames) of the next message; None: there is none."""
    try:
        identity, *frames = socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    return str(identity.get("User-Id")), identity.bytes, [frame.buffer for frame in frames]


def sent(socket: Socket, identity: bytes, frames: list[Any]) -> bool:
    """False if nobody of that identity is there any more."""
    try:
        socket.send_multipart([identity, *frames], copy=False, flags=zmq.NOBLOCK)
    except (zmq.Again, zmq.error.ZMQError):
        return False
    return True


def _router(context: zmq.Context[Any], limits: Limits) -> Socket:
    made: Socket = context.socket(zmq.ROUTER)
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),
        (zmq.ROUTER_HANDOVER, 1),
        (zmq.MAXMSGSIZE, limits.frame_bytes + SEAL_BYTES),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        (zmq.SNDHWM, 0),
        (zmq.LINGER, 0),
        (zmq.HEARTBEAT_IVL, 2000),
    ):
        made.setsockopt(option, value)
    made.zap_domain = b"polyhop"
    return made
