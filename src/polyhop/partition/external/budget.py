"""How --memory is spent: what one number a node takes first, the rest on chunks of edges and on bins."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.errors import ConfigError

__all__ = ["Budget", "id_dtype", "parse_bytes", "show_bytes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_LEAST = 1 << 16  # bytes for edges below which work would be all overhead
_MOST_EDGES = 1 << 21  # of a chunk: more is no faster
_MOST_BIN = 24 << 20  # bytes of a bin: what stays in the processor's caches while it is sorted
_CHUNK_BYTES = 48  # of an edge in a chunk: as read, as filed, and the places in between
_EDGE_BYTES = 12  # of an edge in a bin: key, value, grouped value
_ROW_BYTES = 16  # of a node in a bin: bounds of its list
_NODE_BYTES = 28  # of a node in any stage: owner or new id, degrees, the user's id, ...


def parse_bytes(text: str) -> int:
    """Bytes of "1GB", "512MiB", "1.5g" or a plain number."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if found is None or found[2] == "I":
        raise ConfigError(f"memory {text!r}: expected a size such as 1GB, 512MB or 2GiB")
    return int(float(found[1]) * {**_UNITS, **_BINARY}[found[2]])


def show_bytes(count: int) -> str:
    """For people: rounded up, in the unit that fits."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{-(-count * 10 // size) / 10:g}{unit}"
    return f"{count}B"


@dataclass(frozen=True)
class Budget:
    """Bytes for the work itself; Python and its libraries come on top (about 0.3 GB)."""

    total: int
    has_weight: bool = False
    is_wide: bool = False  # ids beyond 2**31
    num_nodes: int = 0
    more_node_bytes: int = 0  # of a node, where a method needs more

    @property
    def edge_bytes(self) -> int:
        """An edge in a bin."""
        return _EDGE_BYTES * (2 if self.is_wide else 1) + 8 * self.has_weight

    @property
    def row_bytes(self) -> int:
        """A node in a bin."""
        return _ROW_BYTES

    @property
    def for_edges(self) -> int:
        """What the nodes leave. ConfigError says the least that is needed."""
        left = self.total - self._for_nodes()
        if left < _LEAST:
            raise self._too_small(self._for_nodes() + _LEAST)
        return left

    @property
    def chunk_edges(self) -> int:
        """Edges read at a time."""
        return max(256, min(_MOST_EDGES, self.for_edges // _CHUNK_BYTES))

    @property
    def bin_bytes(self) -> int:
        """What the edges and nodes of a bin may take."""
        return min(_MOST_BIN, self.for_edges)

    def check_heaviest(self, degree: Tensor) -> None:
        """ConfigError unless the edges of every single node fit."""
        heaviest = int(degree.max()) if degree.numel() else 0
        needed = heaviest * self.edge_bytes + self.row_bytes
        if needed > self.for_edges:
            raise self._too_small(
                self._for_nodes() + needed, f" (node {int(degree.argmax())} alone has {heaviest:,} edges)"
            )

    def _for_nodes(self) -> int:
        each = _NODE_BYTES + 8 * self.has_weight + 12 * self.is_wide + self.more_node_bytes
        return self.num_nodes * each

    def _too_small(self, least: int, why: str = "") -> ConfigError:
        of = f" for {self.num_nodes:,} nodes" if self.num_nodes else ""
        return ConfigError(
            f"--memory {show_bytes(self.total)} is too small{of}{why}: give at least {show_bytes(least)}"
        )


def id_dtype(num_nodes: int) -> torch.dtype:
    """The narrowest kind that names every node."""
    return torch.int32 if num_nodes < 2**31 else torch.int64
