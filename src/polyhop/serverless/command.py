"""Launcher ``command``: every function is a run of a command, such as ssh, srun, docker run -i or ip netns exec.

The command runs ``python -m polyhop.serverless.function`` somewhere, and hands its standard input on: there the order comes,
and there the function sees that its server is gone. What a command is doing cannot be seen from here, so the launcher is
told what the server heard (``news``: the post's). A function that does not dial in within ``comes_s``, or whose connection
is lost, is ended with its command; one whose command ends before it was heard of counts as failed, whatever it returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from polyhop.serverless.function import Order
from polyhop.serverless.local import Ended, LocalLauncher
from polyhop.serverless.mail import Came, Left

__all__ = ["CommandLauncher"]


class CommandLauncher(LocalLauncher):
    """``order`` is a model of what functions are told; each gets a name of its own."""

    def __init__(
        self,
        order: Order,
        *,
        command: Sequence[str],
        news: Callable[[], list[Came | Left]],
        comes_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(order, command=command)
        self._news, self._comes_s, self._clock = news, comes_s, clock
        self._awaited: dict[str, float] = {}  # functions that were not heard of yet, until when
        self._lost: dict[str, str] = {}  # functions that were given up, and why

    def ensure(self, wanted: int) -> list[str]:
        made = super().ensure(wanted)
        self._awaited |= dict.fromkeys(made, self._clock() + self._comes_s)
        return made

    def ended(self) -> list[Ended]:
        found = super().ended()
        for each in self._news():
            self._awaited.pop(each.function, None)
            if isinstance(each, Left) and each.is_failure:
                self._give_up(each.function, each.reason)
        for name in [name for name, until in self._awaited.items() if self._clock() >= until]:
            address = self._order.address
            self._give_up(
                name, f"it did not dial in within {self._comes_s:g} s: can functions reach {address}?"
            )
        return [self._judged(each) for each in found]

    def _give_up(self, name: str, why: str) -> None:
        """End the command; that it has ended is seen at the next look."""
        self._awaited.pop(name, None)
        pid = self.pids.get(name)
        if pid is not None:
            self._lost[name] = why
            self._running[name].process.kill()

    def _judged(self, each: Ended) -> Ended:
        was_heard = self._awaited.pop(each.function, None) is None
        why = self._lost.pop(each.function, "")
        if not was_heard:
            why = f"its command ended (exit code {each.exit_code}) before it dialled in to {self._order.address}"
        if not why:
            return each
        return replace(each, exit_code=each.exit_code or 1, said=f"{why}\n{each.said}".strip())
