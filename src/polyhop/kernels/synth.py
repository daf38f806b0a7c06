"""Synthetic graphs and features, native and repeatable: pair e and row v are functions of (key, e) and (key, v).

Every function gives the same bits for any number of threads, on any machine, native or reference. Lists come out sorted,
without loops or duplicates, with both directions of every pair.

Legend: N nodes, C classes, F features, E edges (both directions counted).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels import native, reference
from polyhop.kernels.keys import fold

__all__ = ["Communities", "Rmat", "feature_rows", "permutation", "synth_edges"]

_MAX_NODES = 2**31 - 1
_ROUNDS = 6  # of drawing more pairs when too many were duplicates


@dataclass(frozen=True)
class Communities:
    """Classes cut into groups; degrees follow a power law inside each. A pair falls inside one group with probability
    ``in_group``, elsewhere inside one class with probability ``in_class``, else between two classes.
    """

    key: int
    num_nodes: int
    class_start: tuple[int, ...]  # [C + 1]: positions of class c are class_start[c] : class_start[c + 1]
    num_groups: tuple[int, ...]  # [C]
    in_group: float
    in_class: float
    power: int = 3  # rank = n * uniform^power: 1 = equal degrees, 3 = degree exponent 2.5
    class_floor: float = (
        0.0  # cuts off hubs: largest over mean degree is about 1 / (power * floor^(power - 1))
    )
    group_floor: float = 0.0


@dataclass(frozen=True)
class Rmat:
    """Recursive quadrants with probabilities a, b, c, 1 - a - b - c over 2^levels nodes."""

    key: int
    levels: int
    a: float
    b: float
    c: float

    @property
    def num_nodes(self) -> int:
        return 1 << self.levels


class _Recipe(ctypes.Structure):
    """Mirrors Recipe in csrc/ops/synth.cpp."""

    _fields_ = (
        ("key", ctypes.c_uint64),
        ("num_nodes", ctypes.c_int64),
        ("num_pairs", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("power", ctypes.c_int32),
        ("num_classes", ctypes.c_int32),
        ("levels", ctypes.c_int32),
        ("cuts", ctypes.c_uint32 * 3),
        ("pad", ctypes.c_uint32),
        ("class_floor", ctypes.c_double),
        ("group_floor", ctypes.c_double),
        ("class_table", ctypes.c_void_p),
        ("class_start", ctypes.c_void_p),
        ("num_groups", ctypes.c_void_p),
        ("node_of", ctypes.c_void_p),
    )


def permutation(key: int, n: int) -> Tensor:
    """int32 [n]: a keyed permutation of 0 .. n-1, computed entry by entry."""
    if not 0 < n <= _MAX_NODES:
        raise InputError(f"permutation: expected 1 .. {_MAX_NODES:,} entries, got {n:,}")
    out = torch.empty(n, dtype=torch.int32)
    if not native.serves(out, op="ph_synth_permutation"):
        return torch.from_numpy(_bijection(key, n).astype(np.int32))
    native.call("ph_synth_permutation", key, n, out, native.num_threads())
    return out


def synth_edges(
    recipe: Communities | Rmat, node_of: Tensor, *, num_pairs: int, overdraw: float = 1.0, exact: bool = True
) -> tuple[Tensor, Tensor]:
    """In-edges (indptr int64 [N + 1], indices int32 [E]) of ``num_pairs`` undirected edges; node_of: int32 [N], the id of
    each position.

    ``exact``: more pairs are drawn (``overdraw`` times at first) until that many distinct ones exist, then the surplus
    is dropped by keyed hash. Fewer come back only where the recipe has no room for them. Otherwise: ``num_pairs`` draws, and
    what is left of them without loops and duplicates.
    """
    if node_of.dtype != torch.int32 or node_of.numel() != recipe.num_nodes:
        raise InputError(
            f"node_of: expected int32 [{recipe.num_nodes}], got {node_of.dtype} {list(node_of.shape)}"
        )
    draw = _native_lists if native.serves(node_of, op="ph_synth_count") else _reference_lists
    wanted, draws = 2 * num_pairs if exact else -1, int(num_pairs * overdraw)
    for _ in range(_ROUNDS if exact else 1):
        indptr, indices = draw(recipe, node_of, draws, wanted)
        if indices.numel() >= wanted:
            break
        draws = int(draws * min(3.0, (wanted / max(indices.numel(), 1)) ** 1.5 + 0.02))
    return indptr, indices


def feature_rows(
    key: int, klass: Tensor | None, centres: Tensor | None, *, num_rows: int, width: int, start: int = 0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """float32 [n, F]: row i is unit noise of node ``start + i`` plus centres[klass[i]] (klass int64 [n]; < 0 = noise alone).

    ``out`` may be a memory-mapped tensor: rows are written where they belong, none is held elsewhere.
    """
    if out is None:
        out = torch.empty(num_rows, width, dtype=torch.float32)
    if not native.serves(out, op="ph_synth_rows"):
        return out.copy_(_reference_rows(key, klass, centres, num_rows, width, start))
    klass, centres = (None if t is None else t.contiguous() for t in (klass, centres))
    native.call("ph_synth_rows", key, start, num_rows, width, klass, centres, out, native.num_threads())
    return out


def _class_table(start: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """uint16 [65536]: class of each 16-bit draw, classes in proportion to their positions."""
    position = (np.arange(65536, dtype=np.int64) * start[-1] + start[-1] // 2) // 65536
    return (np.searchsorted(np.asarray(start), position, side="right") - 1).astype(np.uint16)


def _cuts(recipe: Communities | Rmat) -> tuple[int, int, int]:
    """16-bit thresholds of the recipe's probabilities."""
    if isinstance(recipe, Rmat):
        parts = (recipe.a, recipe.a + recipe.b, recipe.a + recipe.b + recipe.c)
    else:
        parts = (recipe.in_group, recipe.in_group + recipe.in_class, 1.0)
    first, second, third = (round(part * 65536) for part in parts)
    return first, second, third


def _native_lists(
    recipe: Communities | Rmat, node_of: Tensor, draws: int, wanted: int
) -> tuple[Tensor, Tensor]:
    tables: list[np.ndarray[tuple[int], np.dtype[np.generic]]] = []
    c = _Recipe(key=recipe.key, num_nodes=recipe.num_nodes, num_pairs=draws, cuts=_cuts(recipe))
    node_of, threads, address = node_of.contiguous(), native.num_threads(), ctypes.addressof(c)
    c.node_of = node_of.data_ptr()
    if isinstance(recipe, Rmat):
        c.kind, c.levels = 1, recipe.levels
    else:
        tables = [
            _class_table(recipe.class_start),
            np.asarray(recipe.class_start, np.int64),
            np.asarray(recipe.num_groups, np.int64),
        ]
        c.power, c.class_floor, c.group_floor = recipe.power, recipe.class_floor, recipe.group_floor
        c.num_classes = len(recipe.num_groups)
        c.class_table, c.class_start, c.num_groups = (table.ctypes.data for table in tables)
    indptr = torch.empty(recipe.num_nodes + 1, dtype=torch.int64)
    entries = native.call("ph_synth_count", address, indptr, threads)
    indices = torch.empty(entries, dtype=torch.int32)
    native.call("ph_synth_fill", address, indptr, indices, threads)
    left = native.call("ph_synth_tidy", _tidy_key(recipe), recipe.num_nodes, wanted, indptr, indices, threads)
    return indptr, _shrunk(indices, left)


def _shrunk(indices: Tensor, left: int) -> Tensor:
    """The first entries; copied where more than an eighth of the memory would be held in vain."""
    return indices[:left].clone() if left < indices.numel() * 7 // 8 else indices[:left]


def _tidy_key(recipe: Communities | Rmat) -> int:
    return fold(recipe.key, 1)


def _reference_lists(
    recipe: Communities | Rmat, node_of: Tensor, draws: int, wanted: int
) -> tuple[Tensor, Tensor]:
    """The same lists in plain torch."""
    pairs = _rmat_pairs(recipe, draws) if isinstance(recipe, Rmat) else _community_pairs(recipe, draws)
    u, v = node_of[pairs[0]].long(), node_of[pairs[1]].long()
    low, high = torch.minimum(u, v), torch.maximum(u, v)
    code = torch.unique((low * recipe.num_nodes + high)[low != high])
    low, high = code // recipe.num_nodes, code % recipe.num_nodes
    if 0 <= wanted < 2 * code.numel():
        key = np.uint64(_tidy_key(recipe))
        hashes = _mix(_mix(low.numpy().astype(np.uint64) + key) + high.numpy().astype(np.uint64))
        order = torch.from_numpy(np.argsort(hashes, kind="stable")[code.numel() - wanted // 2 :])
        low, high = low[order], high[order]
    sources, destinations = torch.cat([low, high]), torch.cat([high, low])
    order = torch.argsort(destinations * recipe.num_nodes + sources)
    indptr = torch.zeros(recipe.num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(destinations, minlength=recipe.num_nodes), 0, out=indptr[1:])
    return indptr, sources[order].to(torch.int32)


def _ranks(word: Tensor, n: Tensor, power: int, floor: float) -> Tensor:
    """int64: power-law rank in 0 .. n-1 of each 32-bit word; operations in the order of the native code."""
    z = floor + (word.double() + 0.5) * (1.0 / 4294967296.0) * (1.0 - floor)
    top, cut = z.clone(), floor
    for _ in range(power - 1):
        top, cut = top * z, cut * floor
    return torch.minimum(((top - cut) / (1.0 - cut) * n.double()).long(), n - 1)


def _community_pairs(recipe: Communities, draws: int) -> tuple[Tensor, Tensor]:
    """Positions (u, v), int64 [draws] each."""
    ids = torch.arange(draws)
    w0, w1, w2, w3 = reference.philox(recipe.key, ids)
    table = torch.from_numpy(_class_table(recipe.class_start).astype(np.int64))
    start, groups = torch.tensor(recipe.class_start), torch.tensor(recipe.num_groups)
    where, c = w0 & 0xFFFF, table[w0 >> 16]
    first, second, _ = _cuts(recipe)
    n, g = start[c + 1] - start[c], (w1 * groups[c]) >> 32
    size = (n - g + groups[c] - 1) // groups[c]

    def near(word: Tensor) -> Tensor:
        return start[c] + _ranks(word, size, recipe.power, recipe.group_floor) * groups[c] + g

    d, again = torch.where(where >= second, table[w2 >> 16], c), 1
    while len(recipe.num_groups) > 1 and bool((clash := (where >= second) & (d == c)).any()):
        d[clash] = table[reference.philox(recipe.key, ids[clash], again)[0] >> 16]
        again += 1
    far_u = start[c] + _ranks(w1, n, recipe.power, recipe.class_floor)
    far_v = start[d] + _ranks(w3, start[d + 1] - start[d], recipe.power, recipe.class_floor)
    is_near = where < first
    return torch.where(is_near, near(w2), far_u), torch.where(is_near, near(w3), far_v)


def _rmat_pairs(recipe: Rmat, draws: int) -> tuple[Tensor, Tensor]:
    """Positions (u, v), int64 [draws] each."""
    ids, (first, second, third) = torch.arange(draws), _cuts(recipe)
    u, v = torch.zeros(draws, dtype=torch.int64), torch.zeros(draws, dtype=torch.int64)
    for level in range(recipe.levels):
        word = reference.philox(recipe.key, ids, level // 8)[level % 8 // 2]
        lane = (word >> (16 * (level % 2))) & 0xFFFF
        u = 2 * u + (lane >= second)
        v = 2 * v + (((lane >= first) & (lane < second)) | (lane >= third))
    return u, v


def _reference_rows(
    key: int, klass: Tensor | None, centres: Tensor | None, num_rows: int, width: int, start: int
) -> Tensor:
    blocks = torch.arange((width + 3) // 4)
    ids = torch.arange(start, start + num_rows)[:, None].expand(-1, blocks.numel())
    words = torch.stack(reference.philox(key, ids, blocks), -1).flatten(1)[:, :width]
    total = (words & 255) + ((words >> 8) & 255) + ((words >> 16) & 255) + (words >> 24) - 510
    noise = total.to(torch.float32) * float(np.float32(1.0) / np.float32(147.80054))
    if klass is None or centres is None:
        return noise
    return torch.where((klass >= 0)[:, None], noise + centres[klass.clamp(min=0)], noise)


def _mix(z: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Finaliser of splitmix64, as in csrc/ops/synth.cpp."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _bijection(key: int, n: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """uint64 [n]: four Feistel rounds over an even number of bits, repeated for entries that fall outside."""
    half = 1
    while (1 << (2 * half)) < n:
        half += 1
    mask, out = np.uint64((1 << half) - 1), np.arange(n, dtype=np.uint64)
    todo = np.ones(n, bool)
    while todo.any():
        left, right = out[todo] >> np.uint64(half), out[todo] & mask
        for step in range(4):
            left, right = (
                right,
                left ^ (_mix(np.uint64(key) + (right << np.uint64(3)) + np.uint64(step)) & mask),
            )
        out[todo] = (left << np.uint64(half)) | right
        todo = out >= n
    return out
