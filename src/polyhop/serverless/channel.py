"""A function's way to its server: it says Hello at the door (CURVE), and is told of a desk where messages are sealed.

    door   who has the job's key for functions gets a session: name, password, key
    desk   who has a session's name and password is let in (ZMTP's PLAIN); every frame is sealed with its key (``sealed``)

Nobody else can leave anything at either: connections without a key, or without a password, are refused before their first
message is read. Whoever sees a password on the wire can fill the desk with what is thrown away, as whoever sees packets can
also drop them; he can read nothing and no word of his counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from polyhop.serverless import wire
from polyhop.serverless.sealed import Sealer
from polyhop.serverless.secrets import Entry, KeyPair, guarded
from polyhop.serverless.wire import WireError

__all__ = ["Channel"]


class Channel:
    """Says Hello when it is made; messages go once ``enter`` has been answered. ``socket`` may be polled."""

    def __init__(self, context: zmq.Context[Any], entry: Entry, own: KeyPair, hello: wire.Hello) -> None:
        self._context, self._entry = context, entry
        self.socket = _dealer(context)
        guarded(self.socket, own, entry)
        self.socket.connect(entry.address)
        self.socket.send_multipart(wire.pack(hello))
        self._sealer: Sealer | None = None

    def enter(self, patience_s: float) -> str | None:
        """Go from the door to the desk; or the reason why not. ``patience_s``: how long an answer is waited for."""
        if not self.socket.poll(max(round(1000 * patience_s), 0)):
            return "no answer"
        header, _ = wire.unpack(self.socket.recv_multipart())
        if isinstance(header, wire.Stop):
            return header.reason
        if not isinstance(header, wire.Welcome):
            raise WireError(f"{type(header).__name__} at the door")
        self._sealer = Sealer(header.key, is_server=False)
        self.socket.close(linger=0)
        self.socket = _dealer(self._context)
        self.socket.plain_username, self.socket.plain_password = (
            header.session.encode(),
            header.password.encode(),
        )
        host = self._entry.address.rsplit(":", 1)[0]
        self.socket.connect(f"{host}:{header.port}")
        return None

    def send(self, frames: Sequence[Any]) -> None:
        """A message of ``wire``."""
        assert self._sealer is not None, "it has not been let in"
        self.socket.send_multipart(self._sealer.seal(frames), copy=False)

    def poll(self, patience_s: float) -> bool:
        """Whether a message is there, after waiting for one."""
        return bool(self.socket.poll(max(round(1000 * patience_s), 0)))

    def receive(self) -> list[memoryview]:
        """The next message; SealError if it is none of the server's."""
        assert self._sealer is not None, "it has not been let in"
        return self._sealer.open([frame.buffer for frame in self.socket.recv_multipart(copy=False)])

    def close(self, linger_ms: int) -> None:
        """Wait at most so long for messages that have not left."""
        self.socket.close(linger=linger_ms)


def _dealer(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.HEARTBEAT_IVL, 2000)):
        made.setsockopt(option, value)
    return made
