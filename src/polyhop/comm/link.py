"""One connection of the heartbeat: messages of 256 bytes (magic, kind, reason, rank, text), and nothing else is read.

Ground of this folder: what is said on a link, without any opinion about it.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import NamedTuple

__all__ = ["BEAT", "FAILED", "GOODBYE", "HELLO", "LOST", "WELCOME", "Link", "Message"]

HELLO, WELCOME, BEAT, GOODBYE, FAILED, LOST = range(6)  # kinds

_LAYOUT = struct.Struct("!4sBBHI244s")
_MAGIC = b"plhb"


class Message(NamedTuple):
    kind: int
    reason: int  # of LOST
    rank: int  # who speaks; of FAILED and LOST: of whom
    text: str  # token of HELLO, first line of FAILED


class Link:
    """One connection; ``rank`` is None until it has said hello."""

    def __init__(self, link: socket.socket, rank: int | None) -> None:
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.rank = link, rank
        self.buffer = bytearray()
        self.since = self.heard = time.monotonic()
        self.has_ended = False  # said farewell

    def send(self, kind: int, rank: int, reason: int = 0, text: str = "") -> None:
        """Best effort: a full or broken connection shows in what it does not answer."""
        packed = _LAYOUT.pack(_MAGIC, kind, reason, 0, rank, text.encode()[:244])
        with suppress(OSError):
            self.socket.send(packed)

    def read(self) -> bool:
        """Take what has arrived; False at the end of the stream."""
        try:
            while data := self.socket.recv(4096):
                self.buffer += data
                self.heard = time.monotonic()
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def messages(self) -> list[Message | None]:
        """Whole messages; None is one that is none of ours."""
        found: list[Message | None] = []
        while len(self.buffer) >= _LAYOUT.size:
            magic, kind, reason, _, rank, text = _LAYOUT.unpack(self.buffer[: _LAYOUT.size])
            del self.buffer[: _LAYOUT.size]
            shown = text.rstrip(b"\0").decode(errors="ignore")
            found.append(Message(kind, reason, rank, shown) if magic == _MAGIC and kind <= LOST else None)
        return found
