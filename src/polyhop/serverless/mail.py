"""What passes between the post and those who train: tasks one way, and the other what came of them and of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsInt

from polyhop.serverless import wire
from polyhop.serverless.wire import Array, TaskKey

__all__ = ["Arrived", "Broken", "Came", "Done", "Left", "Work"]


@dataclass(frozen=True, eq=False)
class Work:
    """What a function needs for a task. ``weights`` gives program and weights of the piece, where it has not got them.

    ``version`` is asked for when the task is given out, not before. ``more``: further blocks of its ``num_rows`` rows, each
    of which travels in a message of its own.
    """

    version: SupportsInt
    arrays: Mapping[str, Array]
    weights: Callable[[], tuple[dict[str, Any], Mapping[str, Array]]]
    wants: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)
    num_rows: int = 0
    more: tuple[Mapping[str, Array], ...] = ()


@dataclass(frozen=True, eq=False)
class Done:
    """A result that counts."""

    key: TaskKey
    arrays: dict[str, Array]
    values: dict[str, float]


@dataclass(frozen=True, eq=False)
class Arrived:
    """Rows or sums from another server."""

    header: wire.Rows | wire.Sums
    arrays: dict[str, Array]


@dataclass(frozen=True)
class Broken:
    """The run cannot go on."""

    reason: str


@dataclass(frozen=True)
class Came:
    """A function has said Hello."""

    function: str


@dataclass(frozen=True)
class Left:
    """The last was heard of a function: it said Bye, or (``is_failure``) is lost."""

    function: str
    is_failure: bool
    reason: str
