"""Uniform neighbour draws on the device: Floyd's algorithm over each row's Philox words, as in ``csrc/sample_draw.h``.

A whole mini-batch is drawn without waiting: what a hop may reach at most is known before (every row's fan-out), memory is
taken for that, how many there are stays on the device until the end, and the host waits for these numbers once.

Nodes get their rows by first appearance: the table holds the row of each node that has one, and of each drawn node the first
place where it was drawn, by atomic minima, which do not depend on the order in which they are taken.

Legend: N nodes, k rows that draw, E edges, P the fan-out's power of two, L hops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from polyhop.kernels.triton.philox import key_words, philox_of_ids
from polyhop.kernels.triton.segments import keep_short

__all__ = ["MOST", "draw", "draw_hops", "serves_hops"]

MOST = 32  # fan-out of a kernel at most: its steps are unrolled
_MOST_EDGES = 1 << 26  # of a hop that is drawn without waiting: some 30 bytes each are taken ahead
_ROWS = 32  # that draw, of a program
_EDGES = 1024  # of a program
_NARROW: tl.constexpr = tl.constexpr(65536)  # largest degree served by 32-bit draws


@triton.jit
def _scaled(w0, w1, w2, w3, WHICH: tl.constexpr, count):
    """int64: word WHICH times count, shifted down by 32."""
    if WHICH == 0:
        word = w0
    elif WHICH == 1:
        word = w1
    elif WHICH == 2:
        word = w2
    else:
        word = w3
    return (word.to(tl.int64) * count) >> 32


@triton.jit
def _picks(degree, name, k0, k1, FANOUT: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """int32 [BLOCK, P]: what lists of these degrees draw under these names: places in them, ascending."""
    col = tl.arange(0, P)
    picks = col[None, :] + tl.zeros([BLOCK, P], tl.int32)  # of rows that take all
    if tl.max(degree, 0) > FANOUT:
        chosen = tl.full([BLOCK, P], 2147483647, tl.int32)  # what is not drawn is sorted to the end
        is_wide = degree > _NARROW
        has_wide = tl.max(is_wide.to(tl.int32), 0) > 0
        w0, w1, w2, w3 = philox_of_ids(k0, k1, name, name * 0)
        for i in tl.static_range(FANOUT):
            if i % 4 == 0 and i > 0:
                w0, w1, w2, w3 = philox_of_ids(k0, k1, name, name * 0 + i // 4)
            last = degree - FANOUT + i
            t = _scaled(w0, w1, w2, w3, i % 4, last + 1)
            if has_wide:
                p0, p1, p2, p3 = philox_of_ids(k0, k1, name, name * 0 + i // 2)
                low = _scaled(p0, p1, p2, p3, i % 2 * 2, last + 1)
                high = (p1 if i % 2 == 0 else p3).to(tl.int64) * (last + 1)
                t = tl.where(is_wide, (high + low) >> 32, t)
            is_taken = tl.max((chosen == t.to(tl.int32)[:, None]).to(tl.int32), 1) > 0
            pick = tl.where(is_taken, last, t).to(tl.int32)
            chosen = tl.where(col[None, :] == i, pick[:, None], chosen)
        picks = tl.where((degree > FANOUT)[:, None], tl.sort(chosen, 1), picks)
    return picks


@triton.jit(do_not_specialize=["num_rows", "k0", "k1"])
def _draw(
    indptr, rows, ids, ends, position, num_rows, k0, k1, FANOUT: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_rows
    row = tl.load(rows + at, mask=ok, other=0)
    begin = tl.load(indptr + row, mask=ok, other=0)
    degree = tl.load(indptr + row + 1, mask=ok, other=0) - begin
    name = tl.load(ids + at, mask=ok, other=0)
    picks = _picks(degree, name, k0, k1, FANOUT, P, BLOCK)
    col = tl.arange(0, P)
    taken = tl.minimum(degree, FANOUT)
    to = tl.load(ends + at, mask=ok, other=0)
    some = ok[:, None] & (col[None, :] < taken[:, None])
    tl.store(position + to[:, None] + col[None, :], begin[:, None] + picks, mask=some)


def draw(indptr: Tensor, rows: Tensor, fanout: int, key: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [k + 1], positions): what ``rows`` int64 [k] draw under ``ids`` int64 [k], ascending in a row.

    The fan-out is 1 .. MOST. Waits for the device, to know how many edges there are.
    """
    ends = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum((indptr[rows + 1] - indptr[rows]).clamp(max=fanout), 0, out=ends[1:])
    position = torch.empty(int(ends[-1]), dtype=torch.int64, device=rows.device)
    if rows.numel():
        _draw[(triton.cdiv(rows.numel(), _ROWS),)](
            indptr, rows, ids, ends, position, rows.numel(), *key_words(key), FANOUT=fanout,
            P=triton.next_power_of_2(fanout), BLOCK=_ROWS, num_warps=2,
        )  # fmt: skip
    return ends, position


@triton.jit(do_not_specialize=["num_seeds"])
def _begin(seeds, indptr, ids, degree, table, sizes, num_seeds, BLOCK: tl.constexpr):
    """The seeds are the first rows."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_seeds
    node = tl.load(seeds + at, mask=ok, other=0)
    tl.store(ids + at, node, mask=ok)
    tl.store(table + node, at.to(tl.int32), mask=ok)
    begin = tl.load(indptr + node, mask=ok, other=0)
    tl.store(degree + at, (tl.load(indptr + node + 1, mask=ok, other=0) - begin).to(tl.int32), mask=ok)
    tl.store(sizes + at, tl.zeros([BLOCK], tl.int64) + num_seeds, mask=at == 0)


@triton.jit(do_not_specialize=["hop", "k0", "k1"])
def _draw_hop(
    indptr, indices, ids, ends, sizes, table, source, position, hop, k0, k1,
    FANOUT: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What each row draws: the sources, and in the table the first place of each after the rows."""
    num_rows = tl.load(sizes + 2 * hop)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_rows
    node = tl.load(ids + at, mask=ok, other=0)
    begin = tl.load(indptr + node, mask=ok, other=0)
    degree = tl.load(indptr + node + 1, mask=ok, other=0) - begin
    picks = _picks(degree, node, k0, k1, FANOUT, P, BLOCK)
    some = ok[:, None] & (tl.arange(0, P)[None, :] < tl.minimum(degree, FANOUT)[:, None])
    to = tl.load(ends + at, mask=ok, other=0)[:, None] + tl.arange(0, P)[None, :]
    edge = begin[:, None] + picks
    found = tl.load(indices + edge, mask=some, other=0)
    tl.store(source + to, found, mask=some)
    if position is not None:
        tl.store(position + to, edge, mask=some)
    tl.atomic_min(table + found, (num_rows + to).to(tl.int32), mask=some, sem="relaxed")


@triton.jit(do_not_specialize=["hop", "most_rows", "most_edges"])
def _mark_first(
    source, table, ends, sizes, place, is_first, hop, most_rows, most_edges, BLOCK: tl.constexpr
):  # fmt: skip
    """Of each edge, where its source was first seen, and whether that is here."""
    num_rows, num_edges = tl.load(sizes + 2 * hop), tl.load(ends + most_rows)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_edges
    first = tl.load(table + tl.load(source + at, mask=ok, other=0), mask=ok, other=-1)
    tl.store(place + at, first, mask=ok)
    tl.store(is_first + at, (first == num_rows + at).to(tl.int32), mask=at < most_edges)


@triton.jit(do_not_specialize=["hop", "most_rows", "most_edges"])
def _give_rows(
    source, indptr, ends, place, running, ids, degree, table, local, sizes, hop, most_rows, most_edges,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of sources, new ones after those there are, in the order of first places; and how many there are now."""
    num_rows, num_edges = tl.load(sizes + 2 * hop), tl.load(ends + most_rows)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < num_edges
    first = tl.load(place + at, mask=ok, other=0)
    after = first - num_rows
    is_new = ok & (after >= 0)
    row = tl.where(is_new, num_rows + tl.load(running + after, mask=is_new, other=0) - 1, first)
    tl.store(local + at, row.to(tl.int32), mask=ok)
    mine = is_new & (after == at)
    node = tl.load(source + at, mask=mine, other=0).to(tl.int64)
    tl.store(ids + row, node, mask=mine)
    tl.store(table + node, row.to(tl.int32), mask=mine)
    begin = tl.load(indptr + node, mask=mine, other=0)
    tl.store(degree + row, (tl.load(indptr + node + 1, mask=mine, other=0) - begin).to(tl.int32), mask=mine)
    if tl.program_id(0) == 0:
        tl.store(sizes + 2 * hop + 1, num_edges)
        tl.store(sizes + 2 * hop + 2, num_rows + tl.load(running + most_edges - 1))


@triton.jit(do_not_specialize=["which"])
def _set_free(ids, sizes, table, which, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < tl.load(sizes + which)
    node = tl.load(ids + at, mask=ok, other=0)
    tl.store(table + node, tl.full([BLOCK], 2147483647, tl.int32), mask=ok)


def serves_hops(num_seeds: int, fanouts: Sequence[int], num_nodes: int, num_edges: int) -> bool:
    """Whether ``draw_hops`` serves: fan-outs of a kernel, and what they may reach at most is not too much to take ahead."""
    if num_seeds == 0 or num_edges == 0 or not all(0 < fanout <= MOST for fanout in fanouts):
        return False
    if num_nodes + _MOST_EDGES >= 2**31:  # places of edges come after those of rows, in 32 bits
        return False
    return _bounds(num_seeds, fanouts, num_nodes, num_edges)[-1][1] <= _MOST_EDGES


def _bounds(num_seeds: int, fanouts: Sequence[int], num_nodes: int, num_edges: int) -> list[tuple[int, int]]:
    """(rows that draw, edges) of each hop at most."""
    found, rows = [], num_seeds
    for fanout in fanouts:
        edges = min(rows * fanout, num_edges)
        found.append((rows, edges))
        rows = min(rows + edges, num_nodes)
    return found


def draw_hops(
    indptr: Tensor,
    indices: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    keys: Sequence[int],
    *,
    table: Tensor,
    keep_edges: bool,
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor | None, int]]]:
    """(ids int64, in-degrees int32, for each hop (ends, rows of sources, positions of edges or None, number of sources)).

    ``seeds`` are distinct nodes; ``table`` int32 [N] holds 2^31 - 1 before and after; see ``serves_hops``. indices
    may be in pinned memory of the host. Waits for the device once, at the end, to know how many there are.
    """
    device, num_hops = seeds.device, len(fanouts)
    most = _bounds(seeds.numel(), fanouts, indptr.numel() - 1, indices.numel())
    last = min(most[-1][0] + most[-1][1], indptr.numel() - 1)
    ids = torch.empty(last, dtype=torch.int64, device=device)
    degree = torch.zeros(
        last, dtype=torch.int32, device=device
    )  # nothing is drawn for rows that there are not
    sizes = torch.empty(2 * num_hops + 1, dtype=torch.int64, device=device)
    all_ends = torch.zeros(sum(rows + 2 for rows, _ in most), dtype=torch.int64, device=device)
    _begin[(triton.cdiv(seeds.numel(), _EDGES),)](
        seeds, indptr, ids, degree, table, sizes, seeds.numel(), BLOCK=_EDGES, num_warps=4
    )
    made, start = [], 0
    for hop, (fanout, key, (rows, edges)) in enumerate(zip(fanouts, keys, most, strict=True)):
        ends = all_ends[start : start + rows + 1]
        start += rows + 2 - rows % 2  # lists begin where 16 bytes do
        torch.cumsum(degree[:rows].clamp(max=fanout), 0, out=ends[1:])
        source = torch.empty(edges, dtype=indices.dtype, device=device)
        position = torch.empty(edges, dtype=torch.int64, device=device) if keep_edges else None
        _draw_hop[(triton.cdiv(rows, _ROWS),)](
            indptr, indices, ids, ends, sizes, table, source, position, hop, *key_words(key), FANOUT=fanout,
            P=triton.next_power_of_2(fanout), BLOCK=_ROWS, num_warps=2,
        )  # fmt: skip
        place, running, local = (torch.empty(edges, dtype=torch.int32, device=device) for _ in range(3))
        grid, counts = (triton.cdiv(edges, _EDGES),), (hop, rows, edges)
        _mark_first[grid](source, table, ends, sizes, place, running, *counts, BLOCK=_EDGES, num_warps=4)
        running.cumsum_(0)
        _give_rows[grid](
            source, indptr, ends, place, running, ids, degree, table, local, sizes, *counts, BLOCK=_EDGES, num_warps=4
        )  # fmt: skip
        made.append((ends, local, position))
    _set_free[(triton.cdiv(last, _EDGES),)](ids, sizes, table, 2 * num_hops, BLOCK=_EDGES, num_warps=4)
    counted = sizes.tolist()
    layers = []
    for (ends, local, position), fanout, rows, edges, num_src in zip(
        made, fanouts, counted[::2], counted[1::2], counted[2::2], strict=False
    ):
        lists = ends[: rows + 1]
        keep_short(lists, fanout)
        layers.append((lists, local[:edges], None if position is None else position[:edges], num_src))
    return ids[: counted[-1]], degree[: counted[-1]], layers
