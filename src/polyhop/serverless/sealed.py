"""Messages between a server and one function, sealed: AES-256-GCM under keys that no other function has.

CURVE (``secrets``) admits who has a key of the job, but enciphers a tenth as fast as AES does with the instructions that
processors have for it. So it carries a function's first message and the answer alone: a ``Session``. With its password the
function is let in at the second door, before which nobody else can leave a byte; there every frame is sealed with its key.

What is sealed cannot be read, changed, cut, swapped or replayed by anyone without the key: the number of a message, the
place of a frame in it and how many there are go into each seal; a number that is not above all that came before is refused
(messages may be lost, where a connection breaks: that is the ledger's business). Each way has its own key, and numbers
never repeat, so no nonce does.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyhop.errors import PolyhopError

__all__ = ["SEAL_BYTES", "SealError", "Sealer", "Session"]

KEY_BYTES = 32
SEAL_BYTES = 16
"""By which a sealed frame is longer."""

_NUMBER = struct.Struct(">Q")  # of a message
_NONCE = struct.Struct(">QI")  # number of the message, place of the frame
_COUNT = struct.Struct(">I")  # frames of the message


class SealError(PolyhopError):
    """A message that was not sealed by the other end of the session, or was sealed for another place or time."""


@dataclass(frozen=True)
class Session:
    """What a function is told at the first door."""

    name: str
    password: str
    key: bytes

    def __repr__(self) -> str:
        return f"Session({self.name!r})"

    @classmethod
    def draw(cls) -> Session:
        return cls(secrets.token_hex(16), secrets.token_hex(32), secrets.token_bytes(KEY_BYTES))


class Sealer:
    """One end of a session; ``is_server`` says which."""

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        if len(key) != KEY_BYTES:
            raise SealError(f"a session's key has {len(key)} bytes; expected {KEY_BYTES}")
        ways = (b"polyhop to function", b"polyhop to server")
        out, back = ways if is_server else reversed(ways)
        self._out, self._back = (AESGCM(_derived(key, way)) for way in (out, back))
        self._sent, self._seen = 0, 0

    def seal(self, frames: Sequence[Any]) -> list[Any]:
        """The number of the message, and its frames sealed."""
        self._sent += 1
        count = _COUNT.pack(len(frames))
        sealed = (
            self._out.encrypt(_NONCE.pack(self._sent, place), frame, count)
            for place, frame in enumerate(frames)
        )
        return [_NUMBER.pack(self._sent), *sealed]

    def open(self, frames: Sequence[Any]) -> list[memoryview]:
        """The frames as they were before, in memory of their own; SealError if anything is not as it was sealed."""
        if len(frames) < 2 or len(memoryview(frames[0])) != _NUMBER.size:
            raise SealError(f"a message of {len(frames)} frames that has no number")
        (number,) = _NUMBER.unpack(frames[0])
        if number <= self._seen:
            raise SealError(f"message {number} after {self._seen}: it was sent before")
        count = _COUNT.pack(len(frames) - 1)
        opened = [self._opened(number, place, frame, count) for place, frame in enumerate(frames[1:])]
        self._seen = number
        return opened

    def _opened(self, number: int, place: int, frame: Any, count: bytes) -> memoryview:
        size = len(memoryview(frame)) - SEAL_BYTES
        if size < 0:
            raise SealError(f"frame {place} is shorter than a seal")
        room: memoryview[int] = np.empty(size, np.uint8).data
        try:
            self._back.decrypt_into(_NONCE.pack(number, place), frame, count, room)
        except InvalidTag:
            raise SealError(f"frame {place} of message {number} was not sealed for this place") from None
        return room


def _derived(key: bytes, way: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=way).derive(key)
