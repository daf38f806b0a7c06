"""What a person sees of a run: rich on a terminal, plain lines elsewhere, JSON lines for programs, or nothing.

People's progress goes to standard error; JSON lines go to standard output.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol

from polyhop.errors import ConfigError, unknown

__all__ = ["Progress", "build_progress"]

Facts = dict[str, str]
"""What the first lines say: data, machine, kernels, run, ..."""

_LINE_EVERY_S = 1.0
_STEP_LINE_EVERY_S = 10.0
_LIVE_EVENT_EVERY_S = 2.0
_BAR_EVERY_S = 0.1


class Progress(Protocol):
    """Receives what happens; never decides anything."""

    def start(self, facts: Facts, max_epochs: int) -> None: ...

    def step(self, epoch: int, step: int, num_steps: int) -> None: ...

    def epoch(self, record: dict[str, Any]) -> None: ...

    def live(self, text: str, facts: dict[str, Any]) -> None:
        """What is going on while a step takes long, in words and as values; told as often as one likes."""
        ...

    def note(self, text: str) -> None: ...

    def finish(self, result: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def build_progress(kind: str) -> Progress:
    """auto | rich | plain | json | none."""
    if kind == "auto":
        kind = "rich" if sys.stderr.isatty() and _has_rich() else "plain"
    kinds = {"rich": _Rich, "plain": _Plain, "json": _Json, "none": _Silent}
    if kind not in kinds:
        raise ConfigError(unknown("progress", kind, ("auto", *kinds)))
    made: Progress = kinds[kind]()
    return made


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True


def _numbers(record: dict[str, Any]) -> str:
    """``loss 0.4312  val 0.812  test 0.804``."""
    shown = {name: record.get(name) for name in ("loss", "val", "test")}
    return "  ".join(f"{name} {value:.4f}" for name, value in shown.items() if isinstance(value, float))


def _summary(result: dict[str, Any]) -> str:
    parts = [f"{result['metric']}"]
    parts += [
        f"{name} {result[key]:.4f}"
        for name, key in (("val", "best_val"), ("test", "test"))
        if _is_number(result[key])
    ]
    at = "" if result["best_epoch"] is None else f" at epoch {result['best_epoch']}"
    early = ", stopped early" if result["is_early_stopped"] else ""
    return f"{'  '.join(parts)}{at}  ({result['epochs']} epochs, {result['seconds']:.1f} s{early})"


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isnan(value)


class _Silent:
    def start(self, facts: Facts, max_epochs: int) -> None:
        pass

    def step(self, epoch: int, step: int, num_steps: int) -> None:
        pass

    def epoch(self, record: dict[str, Any]) -> None:
        pass

    def live(self, text: str, facts: dict[str, Any]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, result: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class _Json(_Silent):
    def __init__(self) -> None:
        self._last = 0.0

    def _say(self, event: str, facts: dict[str, Any]) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}
        print(json.dumps({"event": event, **clean}), flush=True)

    def start(self, facts: Facts, max_epochs: int) -> None:
        self._say("start", {**facts, "max_epochs": max_epochs})

    def epoch(self, record: dict[str, Any]) -> None:
        self._say("epoch", record)

    def live(self, text: str, facts: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last >= _LIVE_EVENT_EVERY_S:
            self._last = now
            self._say("live", facts)

    def note(self, text: str) -> None:
        self._say("note", {"text": text})

    def finish(self, result: dict[str, Any]) -> None:
        self._say("result", result)


class _Plain(_Silent):
    """At most about one line a second, the first and the last epoch always."""

    def __init__(self) -> None:
        self._last, self._live_at, self._max_epochs = 0.0, 0.0, 0
        self._waiting: dict[str, Any] | None = None

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def start(self, facts: Facts, max_epochs: int) -> None:
        self._max_epochs, self._live_at = max_epochs, time.monotonic()
        for name, fact in facts.items():
            self._say(f"{name:<9} {fact}")

    def step(self, epoch: int, step: int, num_steps: int) -> None:
        now = time.monotonic()
        if self._last and now - self._last >= _STEP_LINE_EVERY_S:
            self._last = now
            self._say(f"epoch {epoch}/{self._max_epochs}  step {step}/{num_steps}")

    def epoch(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        self._waiting = record
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            self._say_epoch()

    def live(self, text: str, facts: dict[str, Any]) -> None:
        """Now and then, also while nothing else happens: a run that takes long is seen to be alive."""
        now = time.monotonic()
        if now - self._live_at >= _STEP_LINE_EVERY_S:
            self._live_at = now
            self._say(f"{'now':<9} {text}")

    def _say_epoch(self) -> None:
        if self._waiting is not None:
            record, self._waiting = self._waiting, None
            self._say(f"epoch {record['epoch']}/{self._max_epochs}  {_numbers(record)}")

    def note(self, text: str) -> None:
        self._say(text)

    def finish(self, result: dict[str, Any]) -> None:
        self._say_epoch()
        self._say(f"{'result':<9} {_summary(result)}")

    def close(self) -> None:
        self._say_epoch()


class _Rich(_Silent):
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bars
        from rich.text import Text

        class Lines(Bars):
            """Bars, and under them a line of what is going on."""

            doing = ""

            def get_renderables(self) -> Iterable[Any]:
                yield from super().get_renderables()
                if self.doing:
                    yield Text(f"  {self.doing}", style="dim", overflow="ellipsis", no_wrap=True)

        self._console = Console(stderr=True)
        text = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        self._bars = Lines(
            *text, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, refresh_per_second=5
        )
        self._newest: dict[str, Any] = {}
        self._shown_at = 0.0
        self._epochs = self._steps = self._bars.add_task("epochs", numbers="", total=None)

    def start(self, facts: Facts, max_epochs: int) -> None:
        for name, fact in facts.items():
            self._console.print(f"[bold cyan]{name:<9}[/] ", end="")
            self._console.print(fact, markup=False, highlight=False)
        self._bars.update(self._epochs, total=max_epochs)
        self._bars.start()

    def step(self, epoch: int, step: int, num_steps: int) -> None:
        if num_steps <= 1 or not self._is_time():
            return
        if self._steps == self._epochs:
            self._steps = self._bars.add_task("  steps", numbers="", total=num_steps)
        self._bars.update(self._steps, completed=step, total=num_steps)

    def epoch(self, record: dict[str, Any]) -> None:
        self._newest = record
        if self._is_time():
            self._show_epoch()

    def live(self, text: str, facts: dict[str, Any]) -> None:
        self._bars.doing = text  # drawn with the bars, some times a second

    def _is_time(self) -> bool:
        """Often enough for an eye; more often would cost short steps dear."""
        now = time.monotonic()
        if now - self._shown_at < _BAR_EVERY_S:
            return False
        self._shown_at = now
        return True

    def _show_epoch(self) -> None:
        if self._newest:
            self._bars.update(self._epochs, completed=self._newest["epoch"], numbers=_numbers(self._newest))

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def finish(self, result: dict[str, Any]) -> None:
        self.close()
        self._console.print(f"[bold green]{'result':<9}[/] {_summary(result)}", highlight=False)

    def close(self) -> None:
        self._show_epoch()
        self._bars.doing = ""
        if self._steps != self._epochs:
            self._bars.update(self._steps, visible=False)
        self._bars.stop()
