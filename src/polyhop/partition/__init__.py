"""Partition: which part owns each node. One pure function per method, (graph, number of parts) -> owner of every node."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from polyhop.errors import ConfigError, unknown
from polyhop.graph import Graph
from polyhop.partition.block import block
from polyhop.partition.cut import cut
from polyhop.partition.fennel import fennel
from polyhop.partition.file import from_file
from polyhop.partition.folder import PartitionFolder, check_free, open_parts, save_parts
from polyhop.partition.hash import hash_parts
from polyhop.partition.ldg import ldg
from polyhop.partition.metis import metis
from polyhop.partition.quality import Quality, quality
from polyhop.partition.record import Partition, check_num_parts

__all__ = [
    "METHODS",
    "Partition",
    "PartitionFolder",
    "Quality",
    "check_free",
    "cut",
    "default_method",
    "open_parts",
    "partition",
    "quality",
    "save_parts",
]

METHODS: dict[str, Any] = {
    "metis": metis,
    "fennel": fennel,
    "ldg": ldg,
    "hash": hash_parts,
    "block": block,
    "file": from_file,
}


def default_method() -> str:
    """``metis`` where pymetis is installed, else ``fennel``."""
    return "metis" if find_spec("pymetis") is not None else "fennel"


def partition(
    graph: Graph, num_parts: int, method: str = "fennel", *, seed: int = 0, **options: Any
) -> Partition:
    """Owners by the named method; ``options`` are the method's own (passes, slack, path)."""
    check_num_parts(num_parts)
    if method not in METHODS:
        raise ConfigError(unknown("partition method", method, METHODS))
    try:
        owner = METHODS[method](graph, num_parts, seed=seed, **options)
    except TypeError as error:
        if "unexpected keyword" not in str(error) and "required keyword" not in str(error):
            raise
        raise ConfigError(f"partition method {method!r}: {error}") from error
    return Partition(owner, num_parts, method, seed)
