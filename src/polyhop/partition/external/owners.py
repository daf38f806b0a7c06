"""Owners of nodes whose edges are on disk, by every method that can: the same owners as from the graph in memory.

Legend: N nodes, P parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from polyhop.errors import ConfigError
from polyhop.kernels.stream import Stream
from polyhop.partition.block import block_owner
from polyhop.partition.external.budget import Budget
from polyhop.partition.external.source import EdgeSource
from polyhop.partition.external.streamed import DiskLevel, Tell, level_on_disk
from polyhop.partition.external.work import Work
from polyhop.partition.file import read_owner
from polyhop.partition.hash import hash_owner
from polyhop.partition.levels import place
from polyhop.partition.streaming import Room, ldg_passes

__all__ = ["METHODS_ON_DISK", "NODE_BYTES", "TRAIN_BYTES", "check_method", "place_nodes"]

METHODS_ON_DISK: dict[str, dict[str, Any]] = {
    "block": {},
    "fennel": {"passes": 4, "slack": 0.05},
    "file": {"path": None},
    "hash": {},
    "ldg": {"passes": 10, "slack": 0.05},
}
"""Methods that run out of core, and the options of each, with their defaults (those of the methods in memory)."""

NODE_BYTES = {"fennel": 16}
TRAIN_BYTES = {"fennel": 16, "ldg": 8}
"""What a method holds of every node beyond what any does; and where training nodes are balanced too."""


def check_method(method: str, options: dict[str, Any]) -> None:
    """ConfigError unless the method runs out of core and knows the options."""
    if method not in METHODS_ON_DISK:
        raise ConfigError(
            f"method {method!r} needs the whole graph in memory: leave out --memory and give a data set or a small file, or "
            f"choose one that runs out of core: {', '.join(METHODS_ON_DISK)}"
        )
    extra = [name for name in options if name not in METHODS_ON_DISK[method]]
    if extra:
        raise ConfigError(f"partition method {method!r}: no option {', '.join(extra)}")
    if method == "file" and "path" not in options:
        raise ConfigError("partition method 'file': the file of parts is missing (--file)")


def place_nodes(
    work: Work, source: EdgeSource, budget: Budget, num_parts: int, method: str, seed: int, options: dict[str, Any],
    tell: Tell,
) -> Tensor:  # fmt: skip
    """int32 [N]. Reads ``in_degree``, ``out_degree`` and ``codes`` (if there are splits) of the work folder."""
    if method == "hash":
        return hash_owner(budget.num_nodes, num_parts, seed=seed)
    if method == "file":
        return read_owner(Path(options["path"]), budget.num_nodes, num_parts)
    codes = work.find("codes")
    is_train = None if codes is None else codes == 1
    if is_train is not None and not bool(is_train.any()):
        is_train = None
    if method == "block":
        train = None if is_train is None else is_train.nonzero()[:, 0]
        return block_owner(work.load("in_degree"), train, num_parts)
    given = {**METHODS_ON_DISK[method], **options}
    train_total = 0.0 if is_train is None else float(is_train.sum())
    room = Room(num_parts, float(budget.num_nodes), train_total, given["slack"])
    level = level_on_disk(
        work, source, lambda: work.load("in_degree").add_(work.load("out_degree")), budget, is_train, tell
    )
    if method == "ldg":
        return _ldg(level, room, given["passes"])
    return place(level, room, passes=given["passes"], seed=seed)


def _ldg(level: DiskLevel, room: Room, passes: int) -> Tensor:
    state = Stream.empty(level.num_nodes, room.num_parts)
    for one in ldg_passes(room, passes):
        level.stream(state, **one)
    return state.owner
