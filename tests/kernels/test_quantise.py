"""Rows as few bits: the bytes an independent oracle writes, unbiased, within the variance bound, safe against any bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels import reference
from polyhop.kernels.keys import Key, Purpose
from polyhop.kernels.quantise import (
    NotFiniteError,
    dequantise_rows,
    quantise_rows,
    quantised_bytes,
    quantised_row_bytes,
)

KEY = Key(seed=7, epoch=3, step=11).at(Purpose.ROUND, site=2)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
WIDTHS = (1, 2, 4, 8, 16, 32)
CODED = (1, 2, 4, 8)
DRAWS = 2000


def widths(*bits: int, times: int = 1) -> Tensor:
    return torch.tensor(bits * times, dtype=torch.uint8)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def mixed_widths(n: int, seed: int = 0) -> Tensor:
    return widths(*WIDTHS)[torch.randint(6, (n,), generator=torch.Generator().manual_seed(seed))]


def odd_rows(width: int) -> Tensor:
    """float32 [16, width]: ordinary, shifted, constant, tiny, huge and denormal rows."""
    h = normal(16, width, seed=width)
    h[1] += 1000
    h[2] -= 3e4
    h[3], h[4], h[5], h[6] = 0.1, 0.0, -0.0, -7.3e11
    h[7] *= 1e30
    h[8] *= 1e-30
    h[9] *= 1e-40
    h[10] = 1e-45
    h[11, ::2] = 0.0
    h[11, 1::2] = -0.0
    h[12] = h[12].relu()
    h[13] = torch.arange(width) % 256
    h[14, 0] = 8e37
    h[15, -1] = -8e37
    return h


# ---- the bytes, against an oracle of exact fractions that shares nothing with the kernels


def philox(key: int, id_: int, other: int) -> list[int]:
    """Eight 16-bit lanes, from the definition."""
    low = 0xFFFFFFFF
    c, k = [id_ & low, id_ >> 32 & low, other & low, other >> 32 & low], [key & low, key >> 32 & low]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [q >> 32 ^ c[1] ^ k[0], q & low, p >> 32 ^ c[3] ^ k[1], p & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return [word >> 16 * half & 0xFFFF for word in c for half in (0, 1)]


def bfloat16(bits: int) -> Fraction:
    return Fraction(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def down(value: float) -> int:
    """Bits of the largest bfloat16 that is at most value: start near, and walk."""
    bits = float_bits(value) >> 16
    return bits if bfloat16(bits) <= Fraction(value) else bits + 1  # more magnitude of a negative number


def up(value: Fraction) -> int:
    bits = 0
    for power in (1 << k for k in reversed(range(15))):  # largest bfloat16 below value, then the next
        if bits + power < 0x7F80 and bfloat16(bits + power) < value:
            bits += power
    return bits + 1


def oracle(row: list[float], bits: int, key: int, id_: int) -> tuple[bytes, bytes, bytes]:
    """(codes, zero, step) of a row of float32 values."""
    f32 = numpy.float32
    if bits > 8:
        kept = [float_bits(v) for v in row]
        rounded = [v + 0x7FFF + (v >> 16 & 1) >> 16 for v in kept]
        return (
            struct.pack(f"<{len(row)}{'H' if bits == 16 else 'I'}", *(rounded if bits == 16 else kept)),
            b"",
            b"",
        )
    low, high = min(row), max(row)
    size = (len(row) * bits + 7) // 8
    if low == high:
        value = 0 if low == 0 else float_bits(low)
        codes = bytes([value & 1] + [0] * (size - 1))
        return codes, struct.pack("<H", value >> 16), struct.pack("<H", 0x8000 | (value & 0xFFFF) >> 1)
    top = (1 << bits) - 1
    zero_bits = down(0.0 if low == 0 else low)
    wanted = (high - float(bfloat16(zero_bits))) / top  # in float64, as promised
    step_bits = up(max(Fraction(wanted), Fraction(2) ** -110))
    zero, scale = f32(float(bfloat16(zero_bits))), f32(65536) / f32(float(bfloat16(step_bits)))
    number = 0
    for c, each in enumerate(row):
        fixed = min(int(numpy.rint((f32(each) - zero) * scale)), top << 16)
        lane = philox(key, id_, c // 8)[c % 8]
        code = (fixed + lane) >> 16
        assert 0 <= code <= top
        number |= code << c * bits
    return number.to_bytes(size, "little"), struct.pack("<H", zero_bits), struct.pack("<H", step_bits)


def oracle_message(h: Tensor, bits: Tensor, key: int, ids: list[int]) -> bytes:
    parts = [oracle(row, b, key, i) for row, b, i in zip(h.tolist(), bits.tolist(), ids, strict=True)]
    return b"".join(b"".join(section) for section in zip(*parts, strict=True)) if parts else b""


@pytest.mark.parametrize("bits", CODED)
@pytest.mark.parametrize("width", [1, 3, 7, 64, 255, 256, 1500])
@pytest.mark.parametrize("n", [0, 1, 5, 1000])
def test_bytes_are_the_oracles(native_only: None, n: int, width: int, bits: int) -> None:
    h = normal(n, width, seed=n + width)
    ids = torch.arange(n) * 977 + (1 << 40)
    message = quantise_rows(h, widths(bits, times=n), KEY, ids=ids)
    checked = list(range(n)) if n * width <= 10_000 else [0, 1, n // 2, n - 1][: max(1, 6000 // width)]
    size = (width * bits + 7) // 8
    assert message.numel() == n * (size + 4)
    data = message.numpy().tobytes()
    for r in checked:
        codes, zero, step = oracle(h[r].tolist(), bits, KEY, int(ids[r]))
        assert data[r * size : (r + 1) * size] == codes
        assert data[n * size + 2 * r :][:2] == zero
        assert data[n * size + 2 * n + 2 * r :][:2] == step
    decoded = dequantise_rows(message, widths(bits, times=n), width)
    again = dequantise_rows(
        quantise_rows(h, widths(bits, times=n), KEY, ids=ids), widths(bits, times=n), width
    )
    assert torch.equal(decoded, again)
    assert_on_levels(message, decoded, bits)


def assert_on_levels(message: Tensor, decoded: Tensor, bits: int) -> None:
    """Decoded values are zero + step * code, code by code, read from the bytes by shifting one large number."""
    n, width = decoded.shape
    size = (width * bits + 7) // 8
    data = message.numpy().tobytes()
    params = numpy.frombuffer(data[n * size :], dtype="<u2").astype(numpy.uint32) << 16
    zero, step = params.view(numpy.float32).reshape(2, n)
    for r in range(0, n, max(1, n // 7)):
        number = int.from_bytes(data[r * size : (r + 1) * size], "little")
        codes = [number >> c * bits & (1 << bits) - 1 for c in range(width)]
        assert number >> width * bits == 0  # padding
        if float_bits(float(step[r])) >> 31:
            assert width == 1  # the only constant rows of these tests
            continue
        expected = zero[r] + step[r] * numpy.array(codes, dtype=numpy.float32)
        assert decoded[r].tolist() == expected.tolist()


@pytest.mark.parametrize("width", [1, 2, 13, 64, 100])
def test_odd_rows_and_mixed_widths_are_the_oracles(native_only: None, width: int) -> None:
    h = odd_rows(width).repeat(6, 1)
    bits = widths(*WIDTHS).repeat_interleave(16)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    h, bits = h[order], bits[order]
    message = quantise_rows(h, bits, KEY)
    assert message.numpy().tobytes() == oracle_message(h, bits, KEY, list(range(96)))
    assert message.numel() == quantised_bytes(bits, width)
    assert bool(torch.isfinite(dequantise_rows(message, bits, width)).all())


# ---- native and reference, threads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 1, 3, 8, 15, 16, 17, 31, 33, 64, 65, 127, 200, 257, 2048, 2056, 5001])
@pytest.mark.parametrize("has_rows", [False, True])
def test_equals_reference(native_only: None, dtype: torch.dtype, width: int, has_rows: bool) -> None:
    h = (odd_rows(width) if width else torch.zeros(16, 0)).to(dtype).repeat(4, 1)
    gen = torch.Generator().manual_seed(width)
    k = 90 if has_rows else 64
    rows = torch.randint(64, (k,), generator=gen) if has_rows else None
    ids, bits = torch.randint(-(1 << 62), 1 << 62, (k,), generator=gen), mixed_widths(k, width)
    ranges, same_ranges = torch.full((k,), -1.0), torch.full((k,), -2.0)
    message = quantise_rows(h, bits, KEY, rows=rows, ids=ids, ranges=ranges)
    expected, bad = reference.quantise_rows(h, bits, KEY, rows, ids, same_ranges)
    assert bad == -1
    assert torch.equal(message, expected)
    assert torch.equal(ranges, same_ranges)
    for wanted in DTYPES:
        decoded, bad = reference.dequantise_rows(message, bits, width)
        assert bad == -1
        got = dequantise_rows(message, bits, width, dtype=wanted)
        assert got.dtype == wanted
        assert torch.equal(got, decoded.to(wanted))
        out = torch.full((k, width), 7.0, dtype=wanted)
        assert dequantise_rows(message, bits, width, out=out) is out
        assert torch.equal(out, got)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_the_front_serves_both(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", kernels)
    h, bits, ranges = odd_rows(33), mixed_widths(16), torch.empty(16)
    message = quantise_rows(h, bits, KEY, ranges=ranges)
    assert message.numpy().tobytes() == oracle_message(h, bits, KEY, list(range(16)))
    assert torch.equal(ranges, h.amax(1) - h.amin(1))
    out = torch.empty(16, 33, dtype=torch.float64)
    got = dequantise_rows(message, bits, 33, out=out)
    assert got is out
    assert torch.equal(out, dequantise_rows(message, bits, 33).double())


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 40), width=st.integers(0, 200), key=st.integers(0, 2**64 - 1), seed=st.integers(0, 99),
    power=st.integers(-44, 36),
)  # fmt: skip
def test_any_shape_equals_reference(n: int, width: int, key: int, seed: int, power: int) -> None:
    h, bits = normal(n, width, seed=seed) * 10.0**power, mixed_widths(n, seed)
    message = quantise_rows(h, bits, key)
    assert torch.equal(message, reference.quantise_rows(h, bits, key, None, torch.arange(n))[0])
    assert torch.equal(
        dequantise_rows(message, bits, width), reference.dequantise_rows(message, bits, width)[0]
    )


@pytest.mark.parametrize("width", [5, 33, 40_000])  # the last: rows wider than a range of work
def test_same_for_any_thread_count(native_only: None, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    n = 200_000 // width + 3
    h, bits, results = normal(n, width), mixed_widths(n), []
    for threads in (1, 2, 3):
        monkeypatch.setenv("POLYHOP_THREADS", str(threads))
        message = quantise_rows(h, bits, KEY)
        results.append((message, dequantise_rows(message, bits, width)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert torch.equal(results[0][0], reference.quantise_rows(h, bits, KEY, None, torch.arange(n))[0])


def test_code_depends_on_key_id_and_column_only() -> None:
    h = normal(50, 40).clamp(-3, 3)
    h[:, 0], h[:, 1] = -4, 4  # the same ends for any number of columns from two on
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))

    def arrive(key: int, columns: int = 40, **names: Tensor) -> Tensor:
        return dequantise_rows(
            quantise_rows(h[:, :columns], widths(4, times=50), key, **names), widths(4, times=50), columns
        )

    whole = arrive(KEY)
    assert torch.equal(arrive(KEY, rows=order, ids=order), whole[order])  # any order of rows
    assert torch.equal(
        arrive(KEY, 19), whole[:, :19]
    )  # any number of columns; here of a view that is not contiguous
    assert not torch.equal(arrive(KEY, ids=order), whole)
    assert not torch.equal(arrive(KEY + 1), whole)


# ---- unbiased, and how far off


def draw_many(
    h: Tensor, bits: int, encode: Callable[[Tensor, Tensor, int], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Sum over DRAWS and sum of squares of (arrived - h), float64 [n, F]."""
    total, square = torch.zeros(h.shape, dtype=torch.float64), torch.zeros(h.shape, dtype=torch.float64)
    each = 100
    for start in range(0, DRAWS, each):
        many, ids = h.repeat(each, 1), torch.arange(start * len(h), (start + each) * len(h))
        if encode is None:
            b = widths(bits, times=len(many))
            got = dequantise_rows(quantise_rows(many, b, KEY, ids=ids), b, h.shape[1])
        else:
            got = encode(many, ids, bits)
        error = (got.double() - many.double()).view(each, *h.shape)
        total += error.sum(0)
        square += error.square().sum(0)
    return total, square


def largest_z(h: Tensor, bits: int, encode: Callable[[Tensor, Tensor, int], Tensor] | None = None) -> float:
    """Of every element's mean over DRAWS. Its standard error is the rounding's own, sqrt(p (1 - p)) steps, from the exact
    fraction p; p is kept 1e-3 off its ends, where 2000 draws cannot tell a normal from a rare event."""
    total, _ = draw_many(h, bits, encode)
    zero, step = parameters(h, bits)
    p = ((h.double() - zero[:, None]) / step[:, None]) % 1
    p = p.clamp(1e-3, 1 - 1e-3)
    return float((total / DRAWS / (step[:, None] * (p * (1 - p) / DRAWS).sqrt())).abs().max())


def parameters(h: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """float64 [n], float64 [n]: zero and step of rows, from the oracle."""
    zero = [down(low) for low in h.amin(1).tolist()]
    step = [
        up((Fraction(high) - bfloat16(z)) / ((1 << bits) - 1))
        for z, high in zip(zero, h.amax(1).tolist(), strict=True)
    ]
    as_float = [[float(bfloat16(b)) for b in side] for side in (zero, step)]
    return torch.tensor(as_float[0], dtype=torch.float64), torch.tensor(as_float[1], dtype=torch.float64)


def telling_rows() -> Tensor:
    """float32 [10, 96]: centred, one-sided, with large offsets of both signs, skewed, tiny and huge."""
    h = normal(10, 96, seed=5)
    h[1] = h[1].relu()
    h[2] += 100
    h[3] -= 100
    h[4] += 5000
    h[5] = h[5].exp() ** 2
    h[6] *= 1e-12
    h[7] *= 1e20
    h[8] = h[8] * 0.01 + 1
    h[9] = torch.linspace(-1, 1, 96)
    return h


@pytest.mark.parametrize("bits", CODED)
def test_every_element_is_unbiased(native_only: None, bits: int) -> None:
    assert largest_z(telling_rows(), bits) < 5.5  # 960 elements: a largest of 5.5 has probability 4e-5


def round_parameters_last(h: Tensor, ids: Tensor, bits: int) -> Tensor:
    """The tempting variant: codes from float32 parameters, which are rounded to bfloat16 on the wire."""
    top = (1 << bits) - 1
    zero, step = h.amin(1, keepdim=True), (h.amax(1, keepdim=True) - h.amin(1, keepdim=True)) / top
    blocks = torch.arange((h.shape[1] + 7) // 8)
    words = reference.philox(KEY, ids[:, None].expand(-1, blocks.numel()), blocks)
    lanes = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], -1).flatten(1)[
        :, : h.shape[1]
    ]
    codes = ((h - zero) / step + lanes / 65536).floor().clamp(0, top)
    return codes * step.bfloat16().float() + zero.bfloat16().float()


def test_parameters_rounded_last_are_biased() -> None:
    """The same test, the same rows (without the large offsets, which would make it too easy), must fail."""
    rows = telling_rows()[[0, 1, 5, 9]]
    assert largest_z(rows, 8) < 5.5
    assert largest_z(rows, 8, round_parameters_last) > 20


@pytest.mark.parametrize("bits", CODED)
def test_variance(native_only: None, bits: int) -> None:
    """D S^2 / 6 on average over Gaussian rows, D S^2 / 4 at most in any row; S is the step that was sent."""
    h = normal(64, 256, seed=9)
    _, square = draw_many(h, bits)
    _, step = parameters(h, bits)
    ratio = (square / DRAWS).sum(1) / (256 * step**2 / 6)
    noise = (
        0.01  # of a row's sum of 256 variances, each from 2000 draws: 1 / sqrt(256 * 2000) times about 1.5
    )
    assert bool((ratio <= 1.5 * (1 + noise)).all())
    if bits > 1:  # one bit: nearly all of a Gaussian row lies in the middle of its only step
        assert 0.97 <= float(ratio.mean()) <= 1.03
    wanted = (h.amax(1) - h.amin(1)).double() / ((1 << bits) - 1)
    assert bool((step >= wanted).all())
    assert bool((step <= wanted * (1 + 2**-6) + 2.0**-7 * h.amin(1).abs() / ((1 << bits) - 1)).all())


def test_values_on_a_level_always_arrive() -> None:
    """Whole numbers 0 .. 255 at 8 bits have step 1: no draw moves them, also not the largest codes."""
    h = torch.arange(256.0).repeat(500, 1)
    bits = widths(8, times=500)
    assert torch.equal(dequantise_rows(quantise_rows(h, bits, KEY), bits, 256), h)
    pair = torch.tensor([[-2.0, 6.0, 6.0, -2.0]]).repeat(500, 1)
    bits = widths(1, times=500)
    assert torch.equal(dequantise_rows(quantise_rows(pair, bits, KEY), bits, 4), pair)


# ---- constants, corners, what cannot be sent


@pytest.mark.parametrize("bits", CODED)
@pytest.mark.parametrize("width", [1, 2, 7, 64, 100])
def test_constant_rows_are_exact(native_only: None, width: int, bits: int) -> None:
    gen = torch.Generator().manual_seed(width)
    anything = torch.randint(0, 1 << 31, (3000,), generator=gen).to(torch.int32).view(torch.float32)
    values = torch.cat(
        [anything, -anything, torch.tensor([0.0, 0.1, 1 / 3, -1e-45, 1.1754944e-38, 1e30, -1e30])]
    )
    values = values[values.abs() < 2.0**126]
    assert len(values) > 5000
    h = values[:, None].expand(-1, width).contiguous()
    b = widths(bits, times=len(h))
    ranges = torch.ones(len(h))
    assert torch.equal(
        dequantise_rows(quantise_rows(h, b, KEY, ranges=ranges), b, width).view(torch.int32),
        h.view(torch.int32),
    )
    assert not ranges.any()


@pytest.mark.parametrize("bits", CODED)
def test_corners_stay_within_a_step(native_only: None, bits: int) -> None:
    h = odd_rows(64)
    b = widths(bits, times=16)
    got = dequantise_rows(quantise_rows(h, b, KEY), b, 64)
    assert bool(torch.isfinite(got).all())
    slack = 2.0**-7 * h.amin(1).abs().double()  # of the zero point
    step = ((h.amax(1).double() - h.amin(1).double() + slack) / ((1 << bits) - 1)).clamp(min=2.0**-110) * (
        1 + 2**-6
    )
    error = (got.double() - h.double()).abs()
    assert bool((error <= step[:, None] + h.double().abs() * 2.0**-20).all())
    for constant in (3, 4, 5, 6, 10, 11):
        assert torch.equal(got[constant], h[constant])


def test_passed_through_rows() -> None:
    h = normal(4, 9).double() * 1e10
    h[3, 2] = 3.4e38
    bits = widths(16, 32, 16, 32)
    got = dequantise_rows(quantise_rows(h, bits, KEY), bits, 9, dtype=torch.float64)
    assert torch.equal(got[1::2], h[1::2].float().double())
    assert torch.equal(got[::2], h[::2].float().bfloat16().double())


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("width", "column"), [(1, 0), (7, 6), (64, 0), (70, 69), (256, 100)])
def test_what_is_not_finite_is_refused(
    monkeypatch: pytest.MonkeyPatch, kernels: str, bits: int, bad: float, width: int, column: int
) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", kernels)
    h = normal(3000, width)
    h[1234, column] = bad
    h[2999, 0] = math.nan
    with pytest.raises(
        NotFiniteError, match=rf"h\[1234, {column}\] = {bad}, row 1234 .* at {bits} bits"
    ) as caught:
        quantise_rows(h, widths(bits, times=3000), KEY)
    assert caught.value.row == 1234
    rows = torch.tensor([5, 6, 1234, 2999])
    with pytest.raises(NotFiniteError, match=rf"h\[1234, {column}\].*row 2 of the message") as caught:
        quantise_rows(h, widths(bits, times=4), KEY, rows=rows)
    assert caught.value.row == 2
    assert quantise_rows(h, widths(bits, times=2), KEY, rows=rows[:2]).numel()  # the others are no obstacle


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_too_large_for_their_width(
    monkeypatch: pytest.MonkeyPatch, kernels: str, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", kernels)
    limit = 2.0**126
    for value in (limit * (1 - 2**-24), -limit * (1 - 2**-24)):
        h = torch.tensor([[value, -value, 0.0]] * 5, dtype=dtype)
        got = dequantise_rows(quantise_rows(h, widths(1, 2, 4, 8, 16), KEY), widths(1, 2, 4, 8, 16), 3)
        assert bool(torch.isfinite(got).all())
    for bits in (1, 2, 4, 8, 16):
        with pytest.raises(NotFiniteError, match=r"expected finite values below 8\.51e\+37"):
            quantise_rows(torch.tensor([[0.0, -limit]], dtype=dtype), widths(bits), KEY)
    if dtype == torch.float64:
        with pytest.raises(NotFiniteError, match=r"= 1e\+300, .* below inf"):
            quantise_rows(torch.tensor([[1e300]], dtype=dtype), widths(32), KEY)


# ---- sizes and arguments


def test_bytes_against_float32() -> None:
    rows = 1000
    for bits, share in ((1, 0.036), (2, 0.067), (4, 0.130), (8, 0.255), (16, 0.5), (32, 1.0)):
        message = quantise_rows(normal(rows, 256), widths(bits, times=rows), KEY)
        assert message.numel() / (rows * 256 * 4) <= share
        assert quantised_row_bytes(widths(bits), 256).tolist() == [message.numel() // rows]


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_bytes_of_a_message(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", kernels)
    bits = widths(*WIDTHS)
    assert quantised_row_bytes(bits, 9).tolist() == [2 + 4, 3 + 4, 5 + 4, 9 + 4, 18, 36]
    assert quantised_bytes(bits, 9) == 89
    assert quantised_bytes(bits, 0) == 16
    assert quantised_bytes(bits[:0], 9) == 0
    for bad in (0, 3, 5, 64, 255):
        with pytest.raises(InputError, match=rf"bits\[2\] = {bad}, expected one of 1, 2, 4, 8, 16, 32"):
            quantised_bytes(widths(1, 32, bad, 7), 9)


def test_wrong_arguments() -> None:
    h, bits = torch.ones(3, 4), widths(4, 4, 4)
    with pytest.raises(
        InputError, match=r"h must be \[n, F\] of float32, float64, bfloat16, got torch.int64 \[3, 4\]"
    ):
        quantise_rows(h.long(), bits, KEY)
    with pytest.raises(InputError, match=r"bits must be uint8 \[k\], got torch.int64 \[3\]"):
        quantise_rows(h, bits.long(), KEY)
    with pytest.raises(InputError, match=r"bits must have shape \[3\], one of each row of h, got \[2\]"):
        quantise_rows(h, bits[:2], KEY)
    with pytest.raises(InputError, match=r"rows must have shape \[3\], got \[2\]"):
        quantise_rows(h, bits, KEY, rows=torch.arange(2))
    with pytest.raises(InputError, match="ids must be int64"):
        quantise_rows(h, bits, KEY, ids=torch.arange(3, dtype=torch.int32))
    with pytest.raises(InputError, match="ranges must be float32 and contiguous"):
        quantise_rows(h, bits, KEY, ranges=torch.empty(3, dtype=torch.float64))
    message = quantise_rows(h, bits, KEY)
    with pytest.raises(
        InputError, match=r"dtype must be one of float32, float64, bfloat16, got torch\.float16"
    ):
        dequantise_rows(message, bits, 4, dtype=torch.float16)
    with pytest.raises(InputError, match=r"out must be contiguous \[3, 4\], got \[4, 3\]"):
        dequantise_rows(message, bits, 4, out=torch.empty(4, 3))
    with pytest.raises(InputError, match=r"message must be uint8 \[B\], got torch.int8"):
        dequantise_rows(message.view(torch.int8), bits, 4)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, 3, 1 << 62, -(1 << 62)])
def test_rows_outside(monkeypatch: pytest.MonkeyPatch, kernels: str, bad: int) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", kernels)
    with pytest.raises(InputError, match=rf"rows\[1\] = {bad}, outside the 3 rows of h"):
        quantise_rows(torch.ones(3, 4), widths(4, 4), KEY, rows=torch.tensor([0, bad]))


# ---- bytes from elsewhere


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize(
    ("bits", "zero", "step", "is_good"),
    [
        (8, 0x3F80, 0x3F80, True),
        (8, 0x7F80, 0x3F80, False),  # infinite zero point
        (8, 0xFF80, 0x3F80, False),
        (8, 0x7FC0, 0x3F80, False),  # NaN
        (8, 0x7F00, 0x3F80, False),  # beyond 2^126
        (8, 0x0000, 0x7F80, False),  # infinite step
        (8, 0x0000, 0x7FFF, False),
        (8, 0x0000, 0x7F00, False),  # 255 steps overflow
        (1, 0x0000, 0x7F00, False),  # one step of 2^127
        (1, 0x0000, 0x7EFF, True),
        (8, 0x0000, 0x0000, False),  # no step
        (8, 0x0000, 0x0001, False),  # smaller than any step
        (8, 0x0000, 0x087F, False),
        (8, 0x0000, 0x0880, True),  # 2^-110
        (8, 0x3F80, 0x8000, True),  # the constant 1
        (8, 0x7F80, 0x8000, False),  # the constant infinity
        (8, 0xFFFF, 0xFFFF, False),  # NaN
        (8, 0x7E80, 0x8000, False),  # 2^126
    ],
)
def test_parameters_that_no_row_has(
    monkeypatch: pytest.MonkeyPatch, kernels: str, bits: int, zero: int, step: int, is_good: bool
) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", kernels)
    b = widths(bits, bits, 32)
    message = quantise_rows(normal(3, 5), b, KEY)
    params = len(message) - 8
    message[params + 2 : params + 4] = torch.tensor([zero & 0xFF, zero >> 8])
    message[params + 6 : params + 8] = torch.tensor([step & 0xFF, step >> 8])
    if is_good:
        assert bool(torch.isfinite(dequantise_rows(message, b, 5)).all())
        return
    with pytest.raises(
        InputError, match="row 1 of 3 holds a zero point or step that no row has; the message is damaged"
    ):
        dequantise_rows(message, b, 5)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("bits", [16, 32])
def test_passed_through_bytes_that_are_not_finite(
    monkeypatch: pytest.MonkeyPatch, kernels: str, bits: int
) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", kernels)
    b = widths(2, bits)
    message = quantise_rows(normal(2, 70), b, KEY)
    message[18 + 69 * bits // 8 : 18 + 70 * bits // 8] = 0xFF
    with pytest.raises(InputError, match="row 1 of 2 holds a value that is not finite"):
        dequantise_rows(message, b, 70)


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(0, 12), width=st.integers(0, 90), seed=st.integers(0, 99), cut=st.integers(-40, 40),
    hits=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=20),
)  # fmt: skip
def test_cut_and_damaged_messages(
    n: int, width: int, seed: int, cut: int, hits: list[tuple[int, int]]
) -> None:
    """Another length is refused, and both lengths said; other bytes give finite rows or are refused, the same by both."""
    bits = mixed_widths(n, seed)
    message = quantise_rows(normal(n, width, seed=seed), bits, KEY)
    for at, value in hits:
        if message.numel():
            message[at % message.numel()] = value
    total = message.numel()
    other = message[: total + cut] if cut < 0 else torch.cat([message, message.new_zeros(cut)])
    if other.numel() != total:
        with pytest.raises(
            InputError, match=rf"{other.numel()} bytes, expected {total} for {n} rows of {width}"
        ):
            dequantise_rows(other, bits, width)
    expected, bad = reference.dequantise_rows(message, bits, width)
    if bad >= 0:
        with pytest.raises(InputError, match=rf"row {bad} of {n} holds"):
            dequantise_rows(message, bits, width)
        return
    got = dequantise_rows(message, bits, width)
    assert bool(torch.isfinite(got).all())
    assert torch.equal(got, expected)


@settings(max_examples=100, deadline=None)
@given(
    data=st.binary(max_size=400), bits=st.lists(st.sampled_from(WIDTHS), max_size=8), width=st.integers(0, 40)
)
def test_any_bytes(data: bytes, bits: list[int], width: int) -> None:
    b = widths(*bits)
    total = quantised_bytes(b, width)
    message = torch.tensor(list((data * (total // max(1, len(data)) + 1))[:total]), dtype=torch.uint8)
    if message.numel() != total:
        with pytest.raises(InputError, match="the message is cut or is another"):
            dequantise_rows(message, b, width)
        return
    expected, bad = reference.dequantise_rows(message, b, width)
    if bad >= 0:
        with pytest.raises(InputError, match=rf"row {bad} of {len(bits)} holds"):
            dequantise_rows(message, b, width)
    else:
        assert torch.equal(dequantise_rows(message, b, width), expected)
