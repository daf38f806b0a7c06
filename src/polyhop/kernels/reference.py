"""Every kernel in plain torch: fallback, oracle and baseline at once. Runs on any device; torch differentiates it.

Legend: D destinations, S sources, E edges, P pool rows, F columns, H heads, C channels per head, k rows that draw. Sums are
taken in float32 for bfloat16 and float16 rows, in the rows' own dtype otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhop.kernels.keys import fold
from polyhop.kernels.variates import Variates, turned

__all__ = [
    "DRAW_METHODS",
    "WIDTHS",
    "attention",
    "attention_mask",
    "dequantise_rows",
    "draw",
    "dropout",
    "dropout_values",
    "gather_rows",
    "keep_lanes",
    "philox",
    "quantise_bad_bits",
    "quantise_code_bytes",
    "quantise_limit",
    "quantise_rows",
    "random_u32",
    "relabel",
    "scatter_add_rows",
    "spmm",
    "sum_dtype",
    "threshold",
    "transpose",
]

DRAW_METHODS = ("uniform", "labor")
WIDTHS = (1, 2, 4, 8, 16, 32)  # bits a value of a quantised row

_NARROW = 65536  # largest degree served by 32-bit draws
_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows of the given dtype are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _destinations(indptr: Tensor, num_edges: int | None = None) -> Tensor:
    """int64 [E]: destination of each edge; told how many there are, nothing waits for a device."""
    counts = indptr[1:] - indptr[:-1]
    rows = torch.arange(counts.numel(), device=indptr.device)
    return torch.repeat_interleave(rows, counts, output_size=num_edges)


def transpose(indptr: Tensor, indices: Tensor, num_src: int) -> tuple[Tensor, Tensor, Tensor]:
    """Edges grouped by source: (indptr int64 [S + 1], destinations [E], edge positions [E]), stable."""
    sources, order = torch.sort(indices, stable=True)
    rows = torch.arange(num_src + 1, dtype=indices.dtype, device=indices.device)
    t_indptr = torch.searchsorted(sources, rows)  # a count of each source would wait for a device
    return t_indptr, _destinations(indptr, indices.numel())[order].to(indices.dtype), order.to(indices.dtype)


def spmm(
    indptr: Tensor,
    indices: Tensor,
    h: Tensor,
    *,
    second: Tensor | None = None,
    dst_start: int = 0,
    rows: Tensor | None = None,
    edge_weight: Tensor | None = None,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
    self_scale: Tensor | None = None,
) -> Tensor:
    """[D, F]: dst_scale[i] * sum_e edge_weight[e] src_scale[j] h[row(j)] + self_scale[i] h[row(dst_start + i)].

    Rows of ``second`` follow those of h.
    """
    dtype, num_dst = sum_dtype(h.dtype), indptr.numel() - 1
    sources = indices.long()
    if second is not None:
        h, rows = torch.cat([h, second]) if rows is None else _picked(h, second, rows), None
    message = h.index_select(0, sources if rows is None else rows[sources]).to(dtype)
    if edge_weight is not None or src_scale is not None:
        factor = torch.ones((), dtype=dtype, device=h.device)
        if edge_weight is not None:
            factor = factor * edge_weight.to(dtype)
        if src_scale is not None:
            factor = factor * src_scale.to(dtype)[sources]
        message = message * factor[:, None]
    out = torch.zeros(num_dst, h.shape[1], dtype=dtype, device=h.device)
    out = out.index_add(0, _destinations(indptr), message)
    if dst_scale is not None:
        out = out * dst_scale.to(dtype)[:, None]
    if self_scale is not None:
        own = slice(dst_start, dst_start + num_dst)
        mine = h[own] if rows is None else h[rows[own]]
        out = out + mine.to(dtype) * self_scale.to(dtype)[:, None]
    return out.to(h.dtype)


def attention(
    block: Any,
    x: Tensor,
    a_src: Tensor,
    a_dst: Tensor,
    *,
    negative_slope: float = 0.2,
    self_loop: bool = False,
    dropout_p: float = 0.0,
    dropout_key: int = 0,
) -> Tensor:
    """[D, H, C]: softmax over each destination's in-edges of leaky_relu(a_src[j] + a_dst[i]), times x[j]."""
    dtype, (_, heads, channels), num_dst = sum_dtype(x.dtype), x.shape, block.num_dst
    src, dst = block.indices.long(), _destinations(block.indptr)
    if self_loop:
        is_edge = src != dst + block.dst_start
        own = torch.arange(num_dst, device=x.device)
        src, dst = torch.cat([src[is_edge], own + block.dst_start]), torch.cat([dst[is_edge], own])
    score = a_src.to(dtype)[src] + a_dst.to(dtype)[dst]
    score = torch.nn.functional.leaky_relu(score, negative_slope)
    at = dst[:, None].expand(-1, heads)
    top = torch.full((num_dst, heads), -torch.inf, dtype=dtype, device=x.device)
    top = top.scatter_reduce(0, at, score.detach(), "amax")
    power = torch.exp(score - top[dst])
    total = torch.zeros(num_dst, heads, dtype=dtype, device=x.device).index_add(0, dst, power)
    alpha = power / total[dst]
    if dropout_p > 0:
        alpha = alpha * attention_mask(block, src, dst, heads, dropout_p, dropout_key).to(dtype)
    out = torch.zeros(num_dst, heads, channels, dtype=dtype, device=x.device)
    return out.index_add(0, dst, alpha[:, :, None] * x[src].to(dtype)).to(x.dtype)


def attention_mask(block: Any, src: Tensor, dst: Tensor, heads: int, p: float, key: int) -> Tensor:
    """float64 [E, H]: 0 or 1 / (1 - p), keyed by destination, source and head."""
    src_ids = src if block.src_ids is None else block.src_ids[src]
    dst_ids = block.dst_ids()[dst]
    lanes = [_lanes(philox(fold(key, group), dst_ids, src_ids)) for group in range((heads + 7) // 8)]
    return keep_lanes(torch.cat(lanes, 1)[:, :heads], p)


def _picked(first: Tensor, second: Tensor | None, ids: Tensor) -> Tensor:
    """[n, F]: rows of first and of second, which follows it."""
    if second is None or second.shape[0] == 0:
        return first.index_select(0, ids)
    start = first.shape[0]
    if start == 0:
        return second.index_select(0, ids)
    in_first = first.index_select(0, ids.clamp(max=start - 1))
    in_second = second.index_select(0, (ids - start).clamp(min=0))
    return torch.where((ids < start)[:, None], in_first, in_second)


def gather_rows(
    values: Tensor, ids: Tensor, scale: Tensor | None = None, *, second: Tensor | None = None
) -> Tensor:
    """[n, F]: rows of values (and second, which follows it), small types as float32, times scale per column."""
    out = _picked(values, second, ids)
    if values.dtype in (torch.bfloat16, torch.float16, torch.int8, torch.uint8):
        out = out.to(torch.float32)
    return out if scale is None else out * scale.to(out.dtype)


def scatter_add_rows(out: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """out[ids[k]] += rows[k], in place and in order of k."""
    return out.index_add_(0, ids, rows.to(out.dtype))


def philox(key: int, ids: Tensor, other: Tensor | int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of counter (id, other): four 32-bit words, each int64 [n]."""
    other_n = torch.as_tensor(other, dtype=torch.int64, device=ids.device).expand_as(ids)
    c0, c1, c2, c3 = ids & _LOW, (ids >> 32) & _LOW, other_n & _LOW, (other_n >> 32) & _LOW
    k0, k1 = key & _LOW, (key >> 32) & _LOW
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # products wrap in int64; both halves are taken as bits
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def random_u32(key: int, ids: Tensor, other: int = 0) -> Tensor:
    """int64 [n, 4]: the four 32-bit words of each id."""
    return torch.stack(philox(key, ids, other), 1)


def _lanes(words: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """int64 [n, 8]: the 16-bit lanes of four words, low half first."""
    return torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], -1)


def threshold(p: float) -> int:
    """A 16-bit lane below this is dropped."""
    return min(max(round(p * 65536), 1), 65535)


def keep_lanes(lanes: Tensor, p: float) -> Tensor:
    """float64: 0 where the lane is dropped, else the factor that keeps the mean."""
    if p >= 1:
        return torch.zeros(lanes.shape, dtype=torch.float64, device=lanes.device)
    limit = threshold(p)
    return (lanes >= limit).to(torch.float64) * (65536 / (65536 - limit))


def dropout(h: Tensor, ids: Tensor, p: float, key: int, relu: bool = False) -> Tensor:
    """h [n, F] with units dropped by (key, ids[r], column); relu first if asked."""
    if relu:
        h = torch.relu(h)
    if p <= 0:
        return h
    blocks = torch.arange((h.shape[1] + 7) // 8, device=h.device)
    lanes = _lanes(philox(key, ids[:, None].expand(-1, blocks.numel()), blocks))
    dtype = sum_dtype(h.dtype)
    mask = keep_lanes(lanes.flatten(1)[:, : h.shape[1]], p).to(dtype)
    return torch.where(mask > 0, h.to(dtype) * mask, torch.zeros((), dtype=dtype, device=h.device)).to(
        h.dtype
    )


def dropout_values(values: Tensor, ids: Tensor, columns: Tensor, p: float, key: int) -> Tensor:
    """values [nnz] dropped as ``dropout`` would drop (row id ids[k], column columns[k])."""
    if p <= 0:
        return values
    column = columns.long()
    lanes = _lanes(philox(key, ids, column >> 3)).gather(1, (column & 7)[:, None])[:, 0]
    dtype = sum_dtype(values.dtype)
    return (values.to(dtype) * keep_lanes(lanes, p).to(dtype)).to(values.dtype)


def draw(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    fanout: int,
    key: int,
    *,
    ids: Tensor,
    source_ids: Tensor | None = None,
    method: str = "uniform",
) -> tuple[Tensor, Tensor]:
    """(int64 [k + 1], positions in indices): what ``rows`` int64 [k] draw under ``ids`` int64 [k], ascending in a row."""
    begin = indptr[rows]
    degree = indptr[rows + 1] - begin
    taken = degree if fanout < 0 else degree.clamp(max=fanout)
    ends = _ends(taken)
    position = _spread(begin, ends)
    some = (degree > taken).nonzero()[:, 0]  # the rest takes all its in-edges
    if some.numel():
        if method == "labor":
            picks = _labor(key, indices, source_ids, begin[some], degree[some], fanout)
        else:
            picks = _floyd(key, ids[some], degree[some], fanout)
        at = ends[some, None] + torch.arange(fanout, device=rows.device)
        position[at] = begin[some, None] + picks
    return ends, position


def _ends(counts: Tensor) -> Tensor:
    """int64 [n + 1]: running sum of counts [n], from 0."""
    ends = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=ends[1:])
    return ends


def _spread(begin: Tensor, ends: Tensor) -> Tensor:
    """int64 [ends[-1]]: begin[i], begin[i] + 1, ... for the ends[i + 1] - ends[i] entries of each row i."""
    shift = torch.repeat_interleave(begin - ends[:-1], ends[1:] - ends[:-1])
    return shift + torch.arange(shift.numel(), device=ends.device)


def _floyd(key: int, ids: Tensor, degree: Tensor, fanout: int) -> Tensor:
    """int64 [n, fanout]: ascending positions in the in-edge lists of ids (int64 [n]), each degree above the fan-out."""
    wide = degree > _NARROW
    picks = torch.empty(ids.numel(), fanout, dtype=torch.int64, device=ids.device)
    words = pairs = philox(key, ids)
    for i in range(fanout):
        last = degree - fanout + i
        if i and i % 2 == 0:
            pairs = philox(key, ids, i // 2)
        if i and i % 4 == 0:
            words = philox(key, ids, i // 4)
        low, high = pairs[i % 2 * 2], pairs[i % 2 * 2 + 1]
        t_wide = (
            high * (last + 1) + (low * (last + 1) >> 32)
        ) >> 32  # top half of 128 bits; degrees are below 2^31
        t = torch.where(wide, t_wide, words[i % 4] * (last + 1) >> 32)
        is_taken = (picks[:, :i] == t[:, None]).any(1)
        picks[:, i] = torch.where(is_taken, last, t)
    return picks.sort(1).values


def _labor(
    key: int, indices: Tensor, source_ids: Tensor | None, begin: Tensor, degree: Tensor, fanout: int
) -> Tensor:
    """int64 [n, fanout]: ascending positions of the sources with the smallest numbers; the earlier position wins a tie."""
    ends = _ends(degree)
    sources = indices[_spread(begin, ends)].long()
    named = sources if source_ids is None else source_ids[sources]
    number = philox(key, named)[0]
    if isinstance(key, Variates):
        number = turned(key, number, philox(key.second, named)[0])
    row = torch.repeat_interleave(torch.arange(degree.numel(), device=degree.device), degree)
    order = torch.sort(number, stable=True).indices
    order = order[torch.sort(row[order], stable=True).indices]
    best = order[ends[:-1, None] + torch.arange(fanout, device=degree.device)]
    return (best - ends[:-1, None]).sort(1).values


def relabel(ids: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids int64 [n] followed by the new ones of ``more`` by first appearance; and the int32 row of each of more."""
    everyone = torch.cat([ids, more])
    distinct, which = torch.unique(everyone, return_inverse=True)
    place = torch.arange(everyone.numel(), device=ids.device)
    first = torch.full_like(distinct, everyone.numel()).scatter_reduce(0, which, place, "amin")
    order = torch.sort(first).indices
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=ids.device)
    return distinct[order], row[which[ids.numel() :]].to(torch.int32)


_SMALLEST_STEP = 2.0**-110  # 65536 / step is a float
_LARGEST = 2.0**126  # no difference of two such values overflows


def quantise_bad_bits(bits: Tensor) -> int:
    """Place of the first width that there is not, or -1."""
    return _first(~torch.isin(bits, torch.tensor(WIDTHS, dtype=torch.uint8, device=bits.device)))


def quantise_code_bytes(bits: Tensor, num_columns: int) -> Tensor:
    """int64 [k]: bytes of each row's codes."""
    return (bits.long() * num_columns + 7) // 8


def quantise_limit(bits: Tensor) -> Tensor:
    """float32 [k]: what the magnitude of a row's values must be below."""
    return torch.where(bits == 32, torch.inf, _LARGEST).to(torch.float32)


def quantise_rows(
    h: Tensor, bits: Tensor, key: int, rows: Tensor | None, ids: Tensor, ranges: Tensor | None = None
) -> tuple[Tensor, int]:
    """uint8 [B], the message of rows int64 [k] of h in bits uint8 [k]; and -1, or the first row that cannot be sent."""
    x = (h if rows is None else h[rows]).to(torch.float32)
    low, high = (x.amin(1) + 0.0, x.amax(1)) if x.shape[1] else (x.new_zeros(len(x)), x.new_zeros(len(x)))
    limit = quantise_limit(bits)
    bad = _first(~((low > -limit) & (high < limit)))  # NaN is neither
    if bad >= 0:
        return bits.new_empty(0), bad
    if ranges is not None:
        ranges.copy_(high - low)
    ends = _ends(quantise_code_bytes(bits, x.shape[1]))
    params = torch.zeros(2, bits.numel(), dtype=torch.int64, device=h.device)  # zero, step
    parts = []
    for width in WIDTHS:
        at = (bits == width).nonzero()[:, 0]
        if not at.numel() or not x.shape[1]:
            params[1, at] = 0x8000 * (width <= 8)  # without columns: the constant 0
            continue
        if width > 8:
            wire = torch.bfloat16 if width == 16 else torch.float32
            codes = x[at].to(wire).flatten().view(torch.uint8).view(len(at), x.shape[1] * wire.itemsize)
        else:
            codes, params[:, at] = _codes(x[at], low[at], high[at], ids[at], width, key)
        parts.append((ends[at, None] + torch.arange(codes.shape[1], device=h.device), codes))
    message = bits.new_empty(int(ends[-1]))
    for place, codes in parts:
        message[place] = codes
    sent = params[:, bits <= 8].flatten()
    return torch.cat([message, torch.stack([sent & 0xFF, sent >> 8], 1).flatten().to(torch.uint8)]), -1


def dequantise_rows(message: Tensor, bits: Tensor, num_columns: int) -> tuple[Tensor, int]:
    """float32 [k, F], the rows of a message of the right length; and -1, or the first row that no encoder writes."""
    ends = _ends(quantise_code_bytes(bits, num_columns))
    halves = message[int(ends[-1]) :].long().view(2, int((bits <= 8).sum()), 2)
    zero_bits, step_bits = torch.zeros(2, bits.numel(), dtype=torch.int64, device=bits.device)
    zero_bits[bits <= 8], step_bits[bits <= 8] = halves[:, :, 0] | halves[:, :, 1] << 8
    out = torch.empty(bits.numel(), num_columns, device=bits.device)
    is_bad = torch.zeros_like(bits, dtype=torch.bool)
    for width in WIDTHS:
        at = (bits == width).nonzero()[:, 0]
        if not at.numel():
            continue
        row_bytes, top = (num_columns * width + 7) // 8, (1 << width) - 1
        packed = message[ends[at, None] + torch.arange(row_bytes, device=bits.device)]
        if width > 8:
            wire = torch.bfloat16 if width == 16 else torch.float32
            out[at] = packed.flatten().view(wire).view(len(at), num_columns).to(torch.float32)
            is_bad[at] = ~torch.isfinite(out[at]).all(1)
            continue
        shift = torch.arange(0, 8, width, device=bits.device)
        codes = ((packed.long()[:, :, None] >> shift) & top).flatten(1)[:, :num_columns]
        zero, step = _from_bits(zero_bits[at] << 16), _from_bits(step_bits[at] << 16)
        is_good = (zero.abs() <= _LARGEST) & (step >= _SMALLEST_STEP) & (step * top + zero < 2 * _LARGEST)
        lowest = codes[:, 0] & 1 if num_columns else torch.zeros_like(at)
        constant = _from_bits(zero_bits[at] << 16 | (step_bits[at] & 0x7FFF) << 1 | lowest)
        is_constant = step_bits[at] >= 0x8000
        is_bad[at] = ~torch.where(is_constant, constant.abs() < _LARGEST, is_good)
        rows = codes.to(torch.float32) * step[:, None] + zero[:, None]
        out[at] = torch.where(is_constant[:, None], constant[:, None], rows)
    return out, _first(is_bad)


def _codes(x: Tensor, low: Tensor, high: Tensor, ids: Tensor, width: int, key: int) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [m, bytes] of rows x [m, F], and the bits of their parameters int64 [2, m]: zero and step."""
    low_bits, top = _to_bits(low), (1 << width) - 1
    zero_bits = torch.where(low < 0, low_bits + 0xFFFF, low_bits) >> 16
    zero = _from_bits(zero_bits << 16)
    wanted = (high.double() - zero.double()) / top
    step = wanted.float()
    step = torch.where(step.double() < wanted, _from_bits(_to_bits(step) + 1), step).clamp(min=_SMALLEST_STEP)
    step_bits = (_to_bits(step) + 0xFFFF) >> 16
    scale = torch.full_like(step, 65536.0) / _from_bits(step_bits << 16)

    blocks = torch.arange((x.shape[1] + 7) // 8, device=x.device)
    lanes = _lanes(philox(key, ids[:, None].expand(-1, blocks.numel()), blocks)).flatten(1)[:, : x.shape[1]]
    fixed = ((x - zero[:, None]) * scale[:, None]).round().long()
    codes = (fixed.clamp(max=top << 16) + lanes) >> 16

    is_constant = low == high  # all its bits are sent, one of them as the first code's lowest
    codes[is_constant] = 0
    codes[is_constant, :1] = low_bits[is_constant, None] & 1
    params = torch.stack(
        [
            torch.where(is_constant, low_bits >> 16, zero_bits),
            torch.where(is_constant, 0x8000 | (low_bits & 0xFFFF) >> 1, step_bits),
        ]
    )
    per_byte = 8 // width
    padded = torch.nn.functional.pad(codes, (0, -x.shape[1] % per_byte)).view(len(x), -1, per_byte)
    return (padded << torch.arange(0, 8, width, device=x.device)).sum(2).to(torch.uint8), params


def _to_bits(values: Tensor) -> Tensor:
    """int64: the 32 bits of float32 values."""
    return values.contiguous().view(torch.int32).long() & _LOW


def _from_bits(bits: Tensor) -> Tensor:
    """float32: values of 32 bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _first(is_bad: Tensor) -> int:
    """Place of the first True, or -1."""
    return int(is_bad.nonzero()[0]) if bool(is_bad.any()) else -1
