"""Where ranks find each other: they claim their numbers at a store, and a bad start becomes an error with a name.

A rank claims its number and waits until all numbers are claimed. Whoever finds something wrong (a
number claimed twice, another number of ranks, another version, other options) writes it into the store, so that every rank
that waits there ends with the same words. Values in the store are short JSON texts; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed

from polyhop.comm.store import Patience, bounded, is_loopback
from polyhop.errors import LaunchError

__all__ = ["Meeting", "Peer", "describe_ranks", "meet"]

T = TypeVar("T")
dist: Any = torch.distributed  # its stubs leave out half of what it exports

_POLL_S = (0.01, 0.25)
_LINGER_S = 3.0
_LONGEST_VALUE = 16_384


@dataclass(frozen=True)
class Peer:
    """A rank as it came to the meeting."""

    rank: int
    host: str
    pid: int
    address: str  # the one it reached the store from

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on host {self.host})"


@dataclass(frozen=True)
class Meeting:
    """All ranks have come."""

    store: Any  # a torch Store of this run's own keys
    peers: tuple[Peer, ...]  # by rank
    address: str  # this rank's own, on the network that the others reach it by


def describe_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 3``, or, of many, ``ranks 1, 3, 5, ... (12 of them)``."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f", ... ({len(ranks)} of them)" if len(ranks) > 8 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


def meet(
    store: Any,
    rank: int,
    num_ranks: int,
    *,
    where: str,
    address: str,
    patience: Patience,
    is_host: bool = False,
    name: str = "0",
    agreed: Mapping[str, Any] | None = None,
) -> Meeting:
    """Wait at the store until all ranks have come, and see that they were started alike.

    ``where``: the store's address, for messages. ``address``: the one this rank reached it from. ``is_host``:
    whether the store lives in this process. ``name`` keeps runs that
    share a store apart (an attempt's number). ``agreed``: what every rank must have been given alike, by name.
    """
    board = _Board(dist.PrefixStore(f"polyhop/{name}", store), where, patience, is_host)
    me = Peer(rank, socket.gethostname(), os.getpid(), address)
    try:
        _compare(board, me, {"number of ranks": num_ranks, **(agreed or {})})
        if not 0 <= rank < num_ranks:
            raise LaunchError(f"{me} is no rank of {num_ranks}: ranks are 0 to {num_ranks - 1}")
        _claim(board, me)
        peers = _wait_for_all(board, me, num_ranks)
    except LaunchError as error:
        board.tell_trouble(me, str(error))
        raise
    return Meeting(board.store, peers, _facing(me, peers))


class _Board:
    """The store as a place for short JSON texts."""

    def __init__(self, store: Any, where: str, patience: Patience, is_host: bool) -> None:
        self.store, self.where, self.patience, self.is_host = store, where, patience, is_host

    def ask(self, call: Callable[[], T]) -> T:
        """One call to the store, within the time that is left."""
        gone = (
            f"the store at {self.where} stopped answering rank {self.patience.rank}: the process that hosts it ended "
            "or was stopped"
        )
        return bounded(call, self.patience.left_s + 1.0, gone)

    def put_first(self, key: str, record: dict[str, Any]) -> dict[str, Any]:
        """Write if nobody has; what stands there now."""
        return _parse(self.ask(lambda: self.store.compare_set(key, "", json.dumps(record))))

    def read(self, key: str) -> dict[str, Any] | None:
        return _parse(self.ask(lambda: self.store.get(key))) if self.has([key]) else None

    def has(self, keys: list[str]) -> bool:
        return bool(self.ask(lambda: self.store.check(keys)))

    def check_trouble(self) -> None:
        """Raise what another rank found wrong."""
        trouble = self.read("trouble")
        if trouble is not None:
            raise LaunchError(str(trouble.get("text", "the ranks do not fit together")))

    def tell_trouble(self, me: Peer, text: str) -> None:
        """Leave word for the others; if the store ends with this process, stay until they have had time to read it."""
        with suppress(LaunchError):
            self.put_first("trouble", {"rank": me.rank, "text": text})
            self.ask(lambda: self.store.add("told", 1))
            until = time.monotonic() + _LINGER_S
            while (
                self.is_host
                and self.ask(self._num_told) < self.ask(self._num_come)
                and time.monotonic() < until
            ):
                time.sleep(0.05)

    def _num_told(self) -> int:
        return int(self.store.add("told", 0))

    def _num_come(self) -> int:
        return int(self.store.add("come", 0))


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw) if len(raw) <= _LONGEST_VALUE else None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise LaunchError(
            "the store holds what polyhop did not write: see that no other program uses this address"
        )
    return record


def _compare(board: _Board, me: Peer, given: Mapping[str, Any]) -> None:
    """The first rank that comes says how it was started; the others compare."""
    from polyhop import __version__

    own = {"polyhop": __version__, **{name: _short(value) for name, value in given.items()}}
    board.ask(lambda: board.store.add("come", 1))
    first = board.put_first("start", {"by": str(me), "given": own})
    theirs = first.get("given")
    if not isinstance(theirs, dict):
        raise LaunchError(f"the store at {board.where} is used by another program")
    board.check_trouble()
    for name in sorted({*own, *theirs}):
        if own.get(name) != theirs.get(name):
            raise LaunchError(
                f"the ranks were started differently: {name} is {own.get(name, 'not given')} for {me}, "
                f"{theirs.get(name, 'not given')} for {first.get('by')}: start all of them with the same command"
            )


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 160 else f"{text[:120]}... ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _claim(board: _Board, me: Peer) -> None:
    """Take this rank's number, or name who has it."""
    record = {
        "host": me.host,
        "pid": me.pid,
        "address": me.address,
        "nonce": secrets.token_hex(8),
    }
    holder = board.put_first(f"rank/{me.rank}", record)
    if holder != record:
        raise LaunchError(
            f"rank {me.rank} was started twice: pid {holder.get('pid')} on host {holder.get('host')}, and pid {me.pid} on "
            f"host {me.host}: give every process another RANK (torchrun: another --node-rank on every host)"
        )


def _wait_for_all(board: _Board, me: Peer, num_ranks: int) -> tuple[Peer, ...]:
    keys = [f"rank/{rank}" for rank in range(num_ranks)]
    pause = _POLL_S[0]
    while not board.has(keys):
        board.check_trouble()
        missing = [rank for rank, key in enumerate(keys) if not board.has([key])]
        board.patience.wait_for("meet", f"{describe_ranks(missing)} of {num_ranks} at {board.where}")
        if board.patience.left_s == 0 and missing:
            raise LaunchError(
                f"{describe_ranks(missing)} of {num_ranks} never came to the meeting at {board.where} within "
                f"{board.patience.limit_s:g} s. Check that they were started and did not fail at once, that MASTER_ADDR, "
                "MASTER_PORT and the number of ranks are the same on every host, and that no firewall stands between"
            )
        time.sleep(pause)
        pause = min(2 * pause, _POLL_S[1])
    board.check_trouble()
    return tuple(_peer(rank, board.read(key)) for rank, key in enumerate(keys))


def _peer(rank: int, record: dict[str, Any] | None) -> Peer:
    match record:
        case {"host": str(host), "pid": int(pid), "address": str(address)}:
            return Peer(rank, host, pid, address)
    raise LaunchError(
        "the store holds what polyhop did not write: see that no other program uses this address"
    )


def _facing(me: Peer, peers: Sequence[Peer]) -> str:
    """This rank's own address on the network between the ranks.

    The host of the store may have reached it over its loopback, where no other host can reach back: then it is the address
    that faces the first peer which came over the network.
    """
    if not is_loopback(me.address):
        return me.address
    for peer in peers:
        if not is_loopback(peer.address):
            with suppress(OSError):
                family = socket.AF_INET6 if ":" in peer.address else socket.AF_INET
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect((peer.address, 1))  # sends nothing: only asks for a route
                    return str(probe.getsockname()[0])
    return me.address
