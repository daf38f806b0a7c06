"""How ranks notice that one of them is gone: a star of small sockets, apart from the ones that carry tensors.

Gloo's waits cannot be cancelled, so the one who notices is a thread, and what it can do in the end is to end the process.
Rank 0 listens on a port of its own, told through the store together with a random token that every connection must present;
the others connect to it. Both sides send a beat every second (or a fifth of the timeout). A link that closes without a
farewell, or stays silent for ``timeout_s``, is a lost rank; rank 0 tells all others which. A rank that ends properly says
goodbye first, one that fails says why. Then each rank has a moment to end by itself (``loss`` tells its main thread what
happened); if it does not, its last words are run and the process ends with code LOST_PEER.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from polyhop.comm.link import BEAT, FAILED, GOODBYE, HELLO, LOST, WELCOME, Link, Message
from polyhop.comm.store import Patience, bounded
from polyhop.errors import LaunchError

__all__ = ["LOST_PEER", "Heartbeat", "Loss"]

LOST_PEER = 75
"""Exit code of a process that its heartbeat ended."""

_SILENT, _SILENCED, _BROKEN = range(3)  # reasons of a loss: ended without a word, no sign, sent nonsense
_HELLO_WITHIN_S = 5.0
_MOST_STRANGERS = 64
_FAREWELL_S = 1.0  # for the others to read it
_GRACE_S = {False: 1.0, True: 3.0}  # to end by itself: after a loss, after a failure that this rank may share
_TAKEN_GRACE_S = 20.0  # once the main thread knows
_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Loss:
    """Why this run cannot go on."""

    rank: int
    has_failed: bool  # it said so itself; else it was lost
    text: str  # a sentence that names it


class Heartbeat:
    """The watch of one rank over the others. Made by ``start``; ended by ``goodbye`` or ``fail``."""

    def __init__(self, rank: int, names: Sequence[str], timeout_s: float) -> None:
        self.rank, self.names, self.timeout_s = rank, list(names), timeout_s
        self._every_s = min(1.0, timeout_s / 5)
        self._links: list[Link] = []
        self._welcomed: set[int] = set()
        self._listener: socket.socket | None = None
        self._token = ""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_complete = threading.Event()  # all links are there
        self._has_loss = threading.Event()
        self._loss: Loss | None = None
        self._exit_at = float("inf")
        self._farewell: tuple[int, str] | None = None
        self._last_words: list[Callable[[Loss], object]] = []
        self._thread = threading.Thread(target=self._run, name="polyhop-heartbeat", daemon=True)
        _alive.add(self)

    @classmethod
    def start(
        cls,
        store: Any,
        rank: int,
        names: Sequence[str],
        *,
        address: str,
        timeout_s: float,
        patience: Patience,
    ) -> Heartbeat:
        """Connect to the others through what rank 0 writes into the store. ``names[q]``: what to call rank q.

        ``address``: this rank's own, on the network between the ranks.
        """
        heart = cls(rank, names, timeout_s)
        try:
            heart._open(store, address, patience)
        except BaseException as error:
            heart.fail(str(error))
            raise
        return heart

    def on_loss(self, last_word: Callable[[Loss], object]) -> None:
        """Have it called, with a few seconds of time, before the process is ended because of another rank."""
        self._last_words.append(last_word)

    def loss(self, wait_s: float = 0.0) -> Loss | None:
        """What is known of a rank that was lost or failed, waiting up to ``wait_s`` for word of it.

        Whoever asks and is told is expected to end the process soon; it gets some seconds for that.
        """
        if self._has_loss.wait(wait_s):
            self._exit_at = max(self._exit_at, time.monotonic() + _TAKEN_GRACE_S)
            return self._loss
        return None

    def goodbye(self) -> None:
        """This rank has done its work. Rank 0 stays until the others have said so too, but not for long."""
        self._leave(GOODBYE, "")

    def fail(self, why: str) -> None:
        """This rank ends because of an error, of which the others are told the first line."""
        self._leave(FAILED, why.strip().splitlines()[0] if why.strip() else "an error without a message")

    # Start

    def _open(self, store: Any, address: str, patience: Patience) -> None:
        if len(self.names) == 1:
            return
        if self.rank == 0:
            self._token = secrets.token_hex(32)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=1024)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            told = {"host": address, "port": self._listener.getsockname()[1], "token": self._token}
            gone = "the store ended before rank 0 opened its heartbeat"
            bounded(lambda: store.set("heartbeat", json.dumps(told)), patience.left_s + 1.0, gone)
        else:
            self._add(Link(self._connect(store, patience), 0))
            self._links[0].send(HELLO, self.rank, text=self._token)
        self._thread.start()
        while not self._is_complete.wait(0.1):
            patience.wait_for("connect the ranks:", self._missing())
            if patience.left_s == 0 or self._has_loss.is_set():
                why = self._loss.text if self._loss else f"waited {patience.limit_s:g} s in vain"
                raise LaunchError(
                    f"rank {self.rank} cannot connect the ranks: {self._missing()}: {why}. Check that no firewall "
                    "closes ports between the hosts"
                )

    def _connect(self, store: Any, patience: Patience) -> socket.socket:
        gone = f"rank {self.rank} lost the store while it waited for the heartbeat of rank 0"
        while not bounded(lambda: store.check(["heartbeat"]), patience.left_s + 1.0, gone):
            patience.wait_for("connect the ranks:", "no word from rank 0 yet")
            if patience.left_s == 0:
                raise LaunchError(
                    f"{self.names[0]} came to the meeting, but its heartbeat did not open in time"
                )
            time.sleep(0.02)
        told = json.loads(bounded(lambda: store.get("heartbeat"), patience.left_s + 1.0, gone))
        host, port, self._token = str(told["host"]), int(told["port"]), str(told["token"])
        while True:
            patience.wait_for("connect the ranks:", f"to the heartbeat of rank 0 at {host}:{port}")
            try:
                return socket.create_connection((host, port), timeout=min(5.0, patience.left_s + 0.1))
            except OSError as error:
                if patience.left_s == 0:
                    raise LaunchError(
                        f"rank {self.rank} cannot reach the heartbeat of {self.names[0]} at {host}:{port}: {error}. Check "
                        "that no firewall closes ports between the hosts"
                    ) from error
                time.sleep(0.1)

    def _missing(self) -> str:
        if self.rank != 0:
            return f"no welcome from {self.names[0]}"
        missing = [q for q in range(1, len(self.names)) if q not in self._welcomed]
        return "no heartbeat of rank " + ", ".join(map(str, missing))

    # The thread

    def _run(self) -> None:
        try:
            while self._farewell is None or not self._say_farewell():
                self._turn()
        except BaseException as error:  # a watch that breaks must not look like a watch
            self._conclude(Loss(self.rank, True, f"the heartbeat of rank {self.rank} broke: {error!r}"))
            self._end_process()

    def _turn(self) -> None:
        """Wait for something to happen, at most until the next beat; send beats; judge."""
        before = time.monotonic()
        for key, _ in self._selector.select(self._pause_s(before)):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, Link):
                self._hear(key.data)
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(64)
        now = time.monotonic()
        if now - before > max(2 * self._every_s, self.timeout_s / 2):
            for link in self._links:  # this process itself was away: it cannot call the others silent
                link.heard = now
        for link in list(self._links):
            self._tend(link, now)
        if now >= self._exit_at:
            self._end_process()

    def _pause_s(self, now: float) -> float:
        """Until the next beat, or the moment at which a silent link or this process is due."""
        watched = [link for link in self._links if link.rank is not None and not link.has_ended]
        due = [link.heard + self.timeout_s for link in watched if self._loss is None]
        return max(0.0, min([now + self._every_s, self._exit_at, *due]) - now)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            link, _ = self._listener.accept()
            if sum(other.rank is None for other in self._links) >= _MOST_STRANGERS:
                link.close()
                return
            self._add(Link(link, None))

    def _add(self, link: Link) -> None:
        self._links.append(link)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _drop(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
            self._selector.unregister(link.socket)
            link.socket.close()

    def _hear(self, link: Link) -> None:
        is_open = link.read()
        for message in link.messages():
            if link.rank is None:
                self._welcome(link, message)
            elif message is None:
                self._lose(link.rank, _BROKEN)
            else:
                self._obey(link, *message)
        if not is_open:
            self._drop(link)
            if link.rank is not None and not link.has_ended:
                self._lose(link.rank, _SILENT)

    def _welcome(self, link: Link, message: Message | None) -> None:
        """A stranger's first message must be a hello with the token, from a rank that is not here yet."""
        kind, _, rank, token = message or Message(BEAT, 0, 0, "")
        is_free = 0 < rank < len(self.names) and rank not in self._welcomed
        if (
            kind != HELLO
            or not is_free
            or not hmac.compare_digest(token.encode("utf-8"), self._token.encode())
        ):
            self._drop(link)
            return
        link.rank = rank
        self._welcomed.add(rank)
        link.send(WELCOME, 0)
        if len(self._welcomed) == len(self.names) - 1:
            self._shut()
            self._is_complete.set()

    def _shut(self) -> None:
        """Nobody else is let in."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _obey(self, link: Link, kind: int, reason: int, rank: int, text: str) -> None:
        if kind == WELCOME:
            self._is_complete.set()
        elif kind == GOODBYE:
            link.has_ended = True
        elif kind == FAILED and rank < len(self.names):
            link.has_ended = link.has_ended or rank == link.rank
            self._conclude(Loss(rank, True, f"{self.names[rank]} failed: {text}"), FAILED, text=text)
        elif kind == LOST and rank < len(self.names):
            self._lose(rank, reason)

    def _tend(self, link: Link, now: float) -> None:
        """Send a beat, and judge silence."""
        if link.rank is None:
            if now - link.since > _HELLO_WITHIN_S:
                self._drop(link)
            return
        if now - link.since >= self._every_s * 0.9:
            link.since = now
            link.send(BEAT, self.rank)
        if now - link.heard >= self.timeout_s and not link.has_ended:
            self._lose(link.rank, _SILENCED)

    # Ends

    def _lose(self, rank: int, reason: int) -> None:
        why = {
            _SILENT: "it ended without a word",
            _SILENCED: f"it gave no sign for {self.timeout_s:g} s (stopped, or its host or network is gone)",
        }.get(reason, "its heartbeat sent what is none")
        who = f"{self.names[rank]} was lost: {why}"
        if rank == self.rank:
            who = f"the other ranks gave {self.names[rank]} up: {why}"
        self._conclude(Loss(rank, False, f"{who}; this run cannot go on"), LOST, reason)

    def _conclude(self, loss: Loss, kind: int = FAILED, reason: int = 0, text: str = "") -> None:
        """The first loss counts: tell the others, and give this rank a moment to end by itself."""
        if self._loss is not None or self._farewell is not None:
            return
        self._loss = loss
        self._exit_at = time.monotonic() + _GRACE_S[loss.has_failed]
        for link in self._links:
            if link.rank is not None:
                link.send(kind, loss.rank, reason, text)
        self._has_loss.set()

    def _end_process(self) -> None:
        def speak() -> None:
            loss = self._loss
            assert loss is not None
            with suppress(Exception):
                print(f"polyhop: rank {self.rank}: {loss.text}", file=sys.stderr, flush=True)
                sys.stdout.flush()
            for last_word in self._last_words:
                with suppress(Exception):
                    last_word(loss)

        speaker = threading.Thread(target=speak, name="polyhop-last-words", daemon=True)
        speaker.start()
        speaker.join(_LAST_WORDS_S)
        self._linger(_FAREWELL_S)
        os._exit(LOST_PEER)

    def _leave(self, kind: int, text: str) -> None:
        if self._farewell is None and self._thread.is_alive():
            self._farewell = (kind, text)
            self._wake.send(b"!")
            self._thread.join()
        self._close()

    def _say_farewell(self) -> bool:
        """Tell the others how this rank ends; True when nothing more is to be done."""
        assert self._farewell is not None
        kind, text = self._farewell
        if kind == GOODBYE and self.rank == 0:
            until = time.monotonic() + min(self.timeout_s, 5.0)
            while any(not link.has_ended for link in self._links) and time.monotonic() < until:
                self._listen(0.1)
        for link in self._links:
            if link.rank is not None and (self._loss is None or kind == GOODBYE):
                link.send(kind, self.rank, text=text)
        self._linger(_FAREWELL_S)
        return True

    def _linger(self, limit_s: float) -> None:
        """Close the links only when the other side has read all: closing earlier could destroy what is under way."""
        self._shut()
        for link in self._links:
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
        until = time.monotonic() + limit_s
        while self._links and time.monotonic() < until:
            self._listen(0.05)

    def _listen(self, limit_s: float) -> None:
        for key, _ in self._selector.select(limit_s):
            if isinstance(key.data, Link):
                is_open = key.data.read()
                ended = [m for m in key.data.messages() if m is not None and m[0] in (GOODBYE, FAILED)]
                key.data.has_ended = key.data.has_ended or bool(ended)
                if not is_open:
                    self._drop(key.data)
            elif key.fileobj is self._woken:
                self._woken.recv(64)

    def _close(self) -> None:
        """Let go of every socket. The thread has ended, or never began."""
        _alive.discard(self)
        for link in list(self._links):
            self._drop(link)
        self._shut()
        for end in (self._wake, self._woken, self._selector):
            end.close()


_alive: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _forget_after_fork() -> None:
    """A forked child must not hold the links open: its parent's end would go unnoticed."""
    for heart in list(_alive):
        for link in heart._links:
            link.socket.close()
    _alive.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
