"""Partition: which part owns each node. One pure function per method, (graph, number of parts) -> owner of every node."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError, unknown
from polyhop.graph import Graph
from polyhop.partition.block import block
from polyhop.partition.cover import Cover, least_cover
from polyhop.partition.cut import cut, share
from polyhop.partition.external import write_parts
from polyhop.partition.external.budget import parse_bytes
from polyhop.partition.external.inputs import find_inputs, is_out_of_core
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
    "Cover",
    "Partition",
    "PartitionFolder",
    "Quality",
    "check_free",
    "cut",
    "default_method",
    "is_out_of_core",
    "least_cover",
    "open_parts",
    "partition",
    "partition_files",
    "quality",
    "save_parts",
    "share",
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


def partition_files(
    edges: str | Path, num_parts: int, method: str, out: str | Path, *, memory: str | int = "1GB",
    nodes: str | Path | None = None, num_nodes: int | None = None, seed: int = 0, duplicates: str = "error",
    options: dict[str, Any] | None = None, tell: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> PartitionFolder:  # fmt: skip
    """Cut a graph that does not fit in memory: the folder that ``save_parts`` would write of the loaded graph.

    edges: .npy int32 or int64 [2, E] (sources, destinations) or [E, 2]; a CSV or Parquet table; a folder of ``.npy`` files
    or tables as ``polyhop.load`` opens them. nodes: a node table, or a folder with x.npy, y.npy, train.npy, val.npy and
    test.npy. memory: for the work itself, beside what the program takes anyway. options: the method's own (passes, slack,
    path). tell: told (stage, how much is done, how much there is or 0).

    A run that was killed goes on when it is started again with the same arguments and files.
    """
    out = Path(out)
    check_free(out)
    write_parts(
        find_inputs(Path(edges).expanduser(), None if nodes is None else Path(nodes).expanduser()), num_parts, method, out,
        memory=parse_bytes(memory) if isinstance(memory, str) else memory, num_nodes=num_nodes, seed=seed,
        duplicates=duplicates, options=options, tell=tell,
    )  # fmt: skip
    return open_parts(out)
