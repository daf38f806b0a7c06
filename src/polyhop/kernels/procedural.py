"""A graph that nobody stores: degrees, in-neighbours and feature rows of any nodes, computed when they are asked for.

Each is a pure function of (the graph's seed, the node's id), a philox hash of 64-bit ids. So a graph may have 10^9 nodes
and a terabyte of rows, and a rank that holds a part of it holds nothing. What a node draws of its list is decided as for
stored lists (``kernels/draw.py``): the same picks for the same key, id and degree. Native and plain torch give the same
bits, on any number of threads.

    degree        one of 4096 values, by hash: a power law of exponent 3, cut off at 90 times its smallest
    neighbours    of three kinds, by hash: popular nodes (the most popular of H most of all), nodes of the same class, any
                  nodes; never the node itself; the same one twice is possible, and rare in a large graph
    class         id mod C
    row           unit noise (the sum of four uniform bytes per value) plus the centre of the class

Legend: N nodes, F features, C classes, H popular nodes, n ids, E drawn edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from operator import index

import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError, KernelError, unknown
from polyhop.kernels import checks, native, reference
from polyhop.kernels.keys import Purpose, fold
from polyhop.kernels.variates import packed_keys

__all__ = ["MOST_HOT", "MOST_NODES", "Virtual", "virtual_degrees", "virtual_draw", "virtual_rows"]

MOST_NODES = 1 << 48
MOST_HOT = 1 << 31
_TABLE = 4096
_MOST_DEGREE = 65535
_UNIT = float(
    torch.tensor(1.0) / torch.tensor(147.80054)
)  # one over the standard deviation of four bytes' sum
_DEGREE, _EDGE, _HOT, _ROW, _CENTRE = range(
    16, 21
)  # sites of keys; the lower ones are kernels/synth.py's users'


@dataclass(frozen=True)
class Virtual:
    """What a virtual graph is computed from."""

    seed: int
    num_nodes: int
    num_features: int
    num_classes: int = 16
    mean_degree: float = 12.0
    num_hot: int = 1000  # popular nodes
    hot_share: float = 0.3  # of neighbours that are popular nodes
    same_share: float = 0.4  # of neighbours that are of the node's class
    signal: float = 0.2  # distance of class centres over the noise of one feature

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_nodes", 2, MOST_NODES),
            ("num_features", 1, 1 << 20),
            ("num_classes", 1, self.num_nodes),
            ("mean_degree", 0, _MOST_DEGREE // 128),
            ("num_hot", 1, MOST_HOT),
            ("hot_share", 0, 1),
            ("same_share", 0, 1 - self.hot_share),
        ):
            given = getattr(self, name)
            if not low <= given <= high + 1e-9:
                raise ConfigError(f"virtual graph: {name}={given:,} is outside {low:,} .. {high:,}")

    def key(self, site: int) -> int:
        """64 bits, another for each site."""
        return fold(self.seed, Purpose.SYNTH, site)

    @cached_property
    def cuts(self) -> tuple[int, int]:
        """Of 2^32: a first word below the one is a popular node, below the other a node of the class."""
        return round(self.hot_share * 2**32), round((self.hot_share + self.same_share) * 2**32)

    @cached_property
    def facts(self) -> Tensor:
        """int64 [8]: VirtualFacts of csrc/ops/procedural.cpp."""
        keys = [_signed(self.key(site)) for site in (_DEGREE, _EDGE, _HOT)]
        return torch.tensor([self.num_nodes, self.num_classes, self.num_hot, *self.cuts, *keys])

    @cached_property
    def degree_table(self) -> Tensor:
        """int32 [4096]: ascending degrees, each of the same share of nodes."""
        shape = [1 / math.sqrt(1 - (i + 0.5) / _TABLE) for i in range(_TABLE)]
        total = round(self.mean_degree * _TABLE)
        scale = total / math.fsum(shape)  # only correctly rounded operations: the same table on every machine
        exact = [value * scale for value in shape]
        degrees = [int(value) for value in exact]
        by_rest = sorted(range(_TABLE), key=lambda i: degrees[i] - exact[i])
        for i in by_rest[: total - sum(degrees)]:
            degrees[i] += 1
        return torch.tensor(degrees, dtype=torch.int32).clamp_(max=min(self.num_nodes - 1, _MOST_DEGREE))

    @property
    def num_edges(self) -> int:
        """As many as are expected: counting them would take a look at every node."""
        return round(self.num_nodes * float(self.degree_table.double().mean()))

    @cached_property
    def centres(self) -> Tensor:
        """float32 [C, F]: what the rows of a class have in common."""
        ids = torch.arange(self.num_classes)
        return _rows(self.key(_CENTRE), ids, self.num_features, 1, None) * self.signal

    def check(self, name: str, ids: Tensor) -> None:
        """InputError unless ids are int64 [n] and nodes."""
        checks.require(
            ids.dim() == 1 and ids.dtype == torch.int64,
            f"{name}: ids must be int64 [n], got {ids.dtype} {list(ids.shape)}",
        )
        if not ids.numel():
            return
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= self.num_nodes:
            at = int(((ids < 0) | (ids >= self.num_nodes)).nonzero()[0])
            raise InputError(f"{name}: ids[{at}] = {int(ids[at])}, outside the {self.num_nodes} nodes")


def virtual_degrees(graph: Virtual, ids: Tensor) -> Tensor:
    """int32 [n]: the in-degree of each of ids (int64 [n])."""
    graph.check("virtual_degrees", ids)
    if not native.serves(ids, op="ph_procedural_degrees"):
        return graph.degree_table[reference.philox(graph.key(_DEGREE), ids)[0] >> 20]
    out = torch.empty(ids.numel(), dtype=torch.int32)
    native.call(
        "ph_procedural_degrees", graph.facts, graph.degree_table, ids.contiguous(), ids.numel(), out, native.num_threads()
    )  # fmt: skip
    return out


def virtual_draw(
    graph: Virtual, ids: Tensor, fanout: int, key: int, *, method: str = "uniform"
) -> tuple[Tensor, Tensor]:
    """(ends int64 [n + 1], neighbours int64 [E]): node i draws neighbours[ends[i] : ends[i + 1]], in the order of its list.

    ``ids`` int64 [n] in any order, repeats allowed; ``fanout`` at least 1, or -1 for all; ``key`` 64 bits; ``method``
    uniform or labor. Positions of a list are drawn at most once: only a list that has a node twice may give it twice.
    """
    if method not in reference.DRAW_METHODS:
        raise ConfigError(unknown("sampling method", method, reference.DRAW_METHODS))
    if not hasattr(fanout, "__index__") or (fanout < 1 and fanout != -1):
        raise ConfigError(
            f"virtual_draw: fanout = {fanout!r}, expected a whole number of at least 1, or -1 for all"
        )
    fanout, degrees = index(fanout), virtual_degrees(graph, ids)
    if not native.serves(ids, op="ph_procedural_drawn"):
        return _draw_plainly(graph, ids, degrees, fanout, key, method)
    ends = _ends(degrees if fanout < 0 else degrees.clamp(max=fanout))
    out = torch.empty(int(ends[-1]), dtype=torch.int64)
    status = native.call(
        "ph_procedural_drawn", graph.facts, ids.contiguous(), degrees, ends, ids.numel(), fanout,
        packed_keys([key]), reference.DRAW_METHODS.index(method), out, native.num_threads(),
    )  # fmt: skip
    if status < 0:
        raise KernelError(f"virtual_draw: out of memory for {ids.numel()} nodes; ask for fewer")
    return ends, out


def virtual_rows(graph: Virtual, ids: Tensor) -> Tensor:
    """float32 [n, F]: the feature rows of ids (int64 [n]), in their order."""
    graph.check("virtual_rows", ids)
    return _rows(graph.key(_ROW), ids, graph.num_features, graph.num_classes, graph.centres)


def _rows(key: int, ids: Tensor, width: int, num_classes: int, centres: Tensor | None) -> Tensor:
    if not native.serves(ids, centres, op="ph_procedural_rows"):
        return _rows_plainly(key, ids, width, num_classes, centres)
    out = torch.empty(ids.numel(), width, dtype=torch.float32)
    native.call(
        "ph_procedural_rows", key, ids.contiguous(), ids.numel(), width, num_classes, centres, out, native.num_threads()
    )  # fmt: skip
    return out


def _rows_plainly(key: int, ids: Tensor, width: int, num_classes: int, centres: Tensor | None) -> Tensor:
    blocks = torch.arange((width + 3) // 4)
    words = torch.stack(reference.philox(key, ids[:, None].expand(-1, blocks.numel()), blocks), -1)
    words = words.flatten(1)[:, :width]
    total = (words & 255) + ((words >> 8) & 255) + ((words >> 16) & 255) + (words >> 24) - 510
    noise = total.to(torch.float32) * _UNIT
    return noise if centres is None else noise + centres[ids % num_classes]


def _draw_plainly(
    graph: Virtual, ids: Tensor, degrees: Tensor, fanout: int, key: int, method: str
) -> tuple[Tensor, Tensor]:
    """The whole lists, and what the draw over stored lists picks of them."""
    begins = _ends(degrees)
    lengths = degrees.long()
    place = torch.arange(int(begins[-1])) - torch.repeat_interleave(begins[:-1], lengths)
    lists = _neighbours(graph, torch.repeat_interleave(ids, lengths), place)
    rows = torch.arange(ids.numel())
    ends, position = reference.draw(begins, lists, rows, fanout, key, ids=ids, method=method)
    return ends, lists[position]


def _neighbours(graph: Virtual, ids: Tensor, place: Tensor) -> Tensor:
    """int64 [E]: entry ``place`` of the list of each of ids."""
    kind, high, low, _ = reference.philox(graph.key(_EDGE), ids, place)
    number, klass = high << 31 | low >> 1, ids % graph.num_classes
    count = (graph.num_nodes - klass + graph.num_classes - 1) // graph.num_classes
    rank = (
        ((high * high >> 32) & 0xFFFFFFFF) * graph.num_hot
    ) >> 32  # the product wraps; its upper half is taken as bits
    upper, lower, _, _ = reference.philox(graph.key(_HOT), rank)
    found = torch.where(
        kind < graph.cuts[1], klass + graph.num_classes * (number % count), number % graph.num_nodes
    )
    found = torch.where(kind < graph.cuts[0], (upper << 31 | lower >> 1) % graph.num_nodes, found)
    return torch.where(found == ids, (ids + 1) % graph.num_nodes, found)


def _ends(counts: Tensor) -> Tensor:
    """int64 [n + 1]: running sum of counts [n], from 0."""
    ends = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=ends[1:])
    return ends


def _signed(key: int) -> int:
    """The same 64 bits as a signed number."""
    return key - (1 << 64) if key >> 63 else key
