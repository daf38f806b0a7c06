"""What is seen of a rank of strategy ``serverless`` while its epochs are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from polyhop.serverless.crew import Crew
from polyhop.serverless.post import Post
from polyhop.strategies.serverless_books import Books
from polyhop.trace import NO_TRACE, Trace

__all__ = ["Live", "Tell", "in_words"]

Tell = Callable[[str, dict[str, Any]], None]
"""Shows what is going on: in words, and as values."""

_TELLS_S = 0.25
_TRACES_S = 1.0


class Live:
    """Figures of one rank's ledger, crew and books, told now and then to whoever watches."""

    def __init__(
        self, post: Post, crew: Crew, books: Books, rank: int, num_ranks: int, trace: Trace = NO_TRACE
    ) -> None:
        self._post, self._crew, self._books, self._trace = post, crew, books, trace
        self._rank, self._num_ranks = rank, num_ranks
        self._told_at = self._traced_at = 0.0
        self.tell: Tell | None = None

    def tick(self) -> None:
        """Something to see, and something on paper, if the last time is some while ago."""
        if time.monotonic() - self._told_at < _TELLS_S:
            return
        self._told_at = time.monotonic()
        self._books.note()
        is_traced = self._trace.is_written and self._told_at - self._traced_at >= _TRACES_S
        if self.tell is None and not is_traced:
            return
        facts = self.facts()
        if self.tell is not None:
            self.tell(in_words(facts, self._rank, self._num_ranks), facts)
        if is_traced:
            self._traced_at = self._told_at
            self._trace.counter("crew", **facts)

    def facts(self) -> dict[str, Any]:
        """What this rank's server and its functions are doing."""
        ledger = self._post.ledger
        return {
            "functions": self._crew.num_alive,
            "in_flight": ledger.num_leased,
            "waiting": ledger.num_waiting,
            "again": ledger.counts["again"],
            "dollars": float(self._books.so_far().dollars),
        }


def in_words(facts: dict[str, Any], rank: int, num_ranks: int) -> str:
    """A line of what goes on; figures are those of one rank's server."""
    of = f"  (server {rank} of {num_ranks})" if num_ranks > 1 else ""
    return (
        f"{facts['functions']} functions  {facts['in_flight']} tasks in flight  {facts['waiting']} waiting  "
        f"{facts['again']} given again  ${facts['dollars']:.6f}{of}"
    )
