"""Progress of work that has stages: a bar on a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from polyhop.cli import console

__all__ = ["stages"]

_LINE_EVERY_S = 2.0
_BAR_EVERY_S = 0.1


@contextmanager
def stages(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function to be told (stage, how much is done, how much there is or 0); ``unit`` is what is counted."""
    shown = _Bar(unit) if sys.stderr.isatty() and _has_rich() else _Lines(unit)
    try:
        yield shown
    finally:
        shown.close()


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True


class _Lines:
    """One line when a stage begins or ends, and every few seconds between."""

    def __init__(self, unit: str) -> None:
        self._unit, self._stage, self._last, self._waiting = unit, "", 0.0, ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        self._waiting = (
            f"{stage}: {done:,}/{total:,} {self._unit}" if total else f"{stage}: {done:,} {self._unit}"
        )
        if stage != self._stage or done == total or now - self._last >= _LINE_EVERY_S:
            self._stage, self._last = stage, now
            self.close()

    def close(self) -> None:
        if self._waiting:
            console.say(self._waiting)
            self._waiting = ""


class _Bar:
    """One bar per stage, the finished ones above."""

    def __init__(self, unit: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description:<14}"), BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn(unit),
            TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=5,
        )  # fmt: skip
        self._stage, self._last = "", 0.0
        self._task: Any = None
        self._bars.start()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._last = stage, 0.0
            self._task = self._bars.add_task(stage, total=total or None)
        if now - self._last >= _BAR_EVERY_S or done == total:
            self._last = now
            self._bars.update(self._task, completed=done)

    def close(self) -> None:
        self._bars.stop()
