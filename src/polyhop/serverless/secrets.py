"""Keys of a job: who may talk to its servers. CURVE (Curve25519, authenticated encryption) at every server's door.

Every server has a pair of its own; all functions of a job share one pair, and so do its servers when they talk to each
other. A server answers only keys of its job, so whoever has none of them can neither read nor submit anything. Keys are
drawn anew for every job, travel to functions in their order alone, and are never written to a run folder. What functions
and servers say to each other after Hello is sealed with other keys (``sealed``).
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq

__all__ = ["FUNCTION", "SERVER", "Entry", "KeyPair", "Keys", "guarded"]

FUNCTION, SERVER = "function", "server"


@dataclass(frozen=True)
class KeyPair:
    """Public and secret key, 40 printable characters (Z85) each."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r}, secret)"

    @classmethod
    def draw(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True)
class Keys:
    """Of one server: its own pair, the pair with which it talks to others, and the keys that it answers."""

    own: KeyPair
    to_servers: KeyPair
    functions: str  # public key

    @property
    def answered(self) -> dict[str, str]:
        return {self.functions: FUNCTION, self.to_servers.public: SERVER}


@dataclass(frozen=True)
class Entry:
    """Where a server is reached, and the key by which it is known."""

    address: str  # tcp://host:port
    public: str


def guarded(socket: zmq.Socket[bytes], own: KeyPair, entry: Entry | None = None) -> None:
    """Make a socket speak CURVE: as a server, or to the one of ``entry``."""
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()
    if entry is None:
        socket.curve_server = True
    else:
        socket.curve_serverkey = entry.public.encode()
