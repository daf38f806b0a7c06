"""Rows as bytes: exact where they are stored so, within the stated error elsewhere, always as long as promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import ConfigError, InputError
from polyhop.exchange.codec import DTYPES, MixedCodec, RowCodec
from polyhop.kernels.quantise import NotFiniteError

F32, F64, BF16, I8, U8 = torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8
STORED = (F32, F64, BF16, I8, U8)
SMALLEST_NORMAL = torch.finfo(F32).tiny

# What each (stored, --feature-dtype) sends: dtype of the values, and whether a scale per row is made.
SENT: dict[tuple[torch.dtype, str], tuple[torch.dtype, bool]] = {
    **{(stored, "auto"): (stored, False) for stored in STORED},
    (F32, "float32"): (F32, False),
    (F64, "float32"): (F64, False),
    (BF16, "float32"): (F32, False),
    (I8, "float32"): (F32, False),
    (U8, "float32"): (F32, False),
    (F32, "bfloat16"): (BF16, False),
    (F64, "bfloat16"): (BF16, False),
    (BF16, "bfloat16"): (BF16, False),
    (I8, "bfloat16"): (I8, False),  # smaller already
    (U8, "bfloat16"): (U8, False),
    (F32, "int8"): (I8, True),
    (F64, "int8"): (I8, True),
    (BF16, "int8"): (I8, True),
    (I8, "int8"): (I8, False),
    (U8, "int8"): (U8, False),
}


def rows_of(stored: torch.dtype, num_rows: int = 9, num_columns: int = 5) -> Tensor:
    rng = torch.Generator().manual_seed(4)
    rows = torch.randn(num_rows, num_columns, generator=rng, dtype=F64)
    if stored == I8:
        return (rows * 60).clamp(-128, 127).to(I8)
    return (rows.abs() * 60).clamp(0, 255).to(U8) if stored == U8 else rows.to(stored)


def assert_within_half_a_step(rows: Tensor, got: Tensor) -> None:
    """|error| <= max|row| / 254, and float32's own rounding of the scale and of the product."""
    rows = rows.double()
    step = rows.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((got.double() - rows).abs() <= step * 0.5 + rows.abs() * 2.0**-20 + 1e-44).all())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_round_trip(stored: torch.dtype, name: str) -> None:
    rows = rows_of(stored)
    codec = RowCodec.of(name, 5, stored)
    assert (codec.dtype, codec.is_quantised) == SENT[stored, name]
    data = codec.encode(rows)
    assert data.dtype == U8
    assert list(data.shape) == [9 * codec.row_bytes]
    got = codec.decode(data, 9)
    assert list(got.shape) == [9, 5]
    assert got.dtype == (F32 if codec.is_quantised else codec.dtype)
    if codec.is_quantised:
        assert_within_half_a_step(rows, got)
    elif codec.dtype == BF16 and stored != BF16:
        assert bool(((got.double() - rows.double()).abs() <= rows.double().abs() * 2.0**-8).all())
    else:
        assert torch.equal(got.double(), rows.double())
    assert torch.equal(codec.rounded(rows).double(), got.double())  # own rows are as those that arrive


def test_every_pair_is_listed() -> None:
    assert set(SENT) == {(stored, name) for stored in STORED for name in DTYPES}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 5), (3, 0), (0, 0), (1, 1)])
def test_sizes_at_the_edge(name: str, num_rows: int, num_columns: int) -> None:
    codec = RowCodec.of(name, num_columns, F32)
    data = codec.encode(rows_of(F32, num_rows, num_columns))
    assert data.numel() == num_rows * codec.row_bytes
    assert list(codec.decode(data, num_rows).shape) == [num_rows, num_columns]


def test_bytes_of_a_row() -> None:
    sizes = {name: RowCodec.of(name, 100, F32).row_bytes for name in DTYPES}
    assert sizes == {"auto": 400, "float32": 400, "bfloat16": 200, "int8": 104}


# Up to 2^127: at the very end of float32 the rounded scale times 127 overflows, as rounding to bfloat16 does.
floats = st.floats(-(2.0**127), 2.0**127, width=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(floats, min_size=3, max_size=3), min_size=1, max_size=6))
def test_int8_errs_by_half_a_step_at_most(values: list[list[float]]) -> None:
    rows = torch.tensor(values, dtype=F32)
    codec = RowCodec.of("int8", 3, F32)
    got = codec.rounded(rows)
    # Where 1 / scale is beyond float32, a row is sent as zeros: an error of less than 127 / 2^128.
    is_tiny = rows.abs().amax(dim=1) < 127 * 2.0**-127
    assert_within_half_a_step(rows[~is_tiny], got[~is_tiny])
    assert bool(((got[is_tiny] - rows[is_tiny]).abs() <= 127 * 2.0**-127).all())
    assert bool((got * rows >= 0).all())  # no value changes its sign
    assert bool(torch.isfinite(got).all())


@settings(max_examples=100, deadline=None)
@given(st.lists(floats.filter(lambda v: v == 0 or abs(v) >= SMALLEST_NORMAL), min_size=1, max_size=20))
def test_bfloat16_errs_by_two_to_the_minus_eight(values: list[float]) -> None:
    rows = torch.tensor([values], dtype=F32)
    got = RowCodec.of("bfloat16", len(values), F32).rounded(rows).float()
    assert bool(((got - rows).abs() <= rows.abs() * 2.0**-8).all())


def test_int8_keeps_zeros_and_the_largest_value() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0], [-3.0, 0.0, 1.0], [127.0, -64.0, 1.0]])
    got = RowCodec.of("int8", 3, F32).rounded(rows)
    assert torch.equal(got[0], rows[0])
    assert got[1].tolist() == pytest.approx([-3.0, 0.0, 1.0], abs=1.5 / 127)
    assert float(got[1, 0]) == pytest.approx(-3.0, rel=1e-6)
    assert torch.equal(got[2], rows[2])  # whole numbers up to 127 are levels themselves


@pytest.mark.parametrize("value", [1e-45, 1e-40, SMALLEST_NORMAL])
def test_rows_too_small_for_a_scale_become_zeros(value: float) -> None:
    got = RowCodec.of("int8", 2, F32).rounded(torch.tensor([[value, -value], [1.0, value]]))
    assert got[0].tolist() == [0.0, 0.0]
    assert got[1, 0] == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_hidden(bad: float) -> None:
    """int8 has no code for it: the row that holds it arrives as NaN, the others as ever. The floats carry it as it is."""
    rows = torch.tensor([[1.0, bad, 0.0], [1.0, 2.0, 3.0]])
    got = RowCodec.of("int8", 3, F32).rounded(rows)
    assert bool(torch.isnan(got[0]).all())
    assert_within_half_a_step(rows[1:], got[1:])
    for name in ("auto", "bfloat16"):
        carried = RowCodec.of(name, 3, F32).rounded(rows).float()
        assert torch.equal(carried.nan_to_num(7.0), rows.nan_to_num(7.0))


def test_the_same_bytes_every_time_wherever_a_row_stands() -> None:
    rows = rows_of(F32, 12)
    codec = RowCodec.of("int8", 5, F32)
    assert torch.equal(codec.encode(rows), codec.encode(rows.clone()))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(codec.rounded(rows)[order], codec.rounded(rows[order]))
    assert torch.equal(codec.rounded(rows.t().contiguous().t()), codec.rounded(rows))


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_twice_is_rounding_once(name: str) -> None:
    codec = RowCodec.of(name, 5, F32)
    once = codec.rounded(rows_of(F32, 200)).float()
    assert torch.allclose(codec.rounded(once).float(), once, rtol=1e-6, atol=0)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'bfloat16'"):
        RowCodec.of("bfloat", 3, F32)


# ---- rows of mixed widths

MIXED = torch.tensor([2, 32, 1, 8, 16, 4, 2], dtype=U8)
PICKED = torch.tensor([4, 0, 8, 2, 2, 6, 5])  # rows of a part that one peer reads


def test_one_message_mixes_widths() -> None:
    rows, ranges = rows_of(F32, 9, 100), torch.empty(7)
    codec = MixedCodec(100, MIXED)
    data = codec.encode(rows, PICKED, PICKED + 1000, 77, ranges)
    assert codec.num_rows == 7
    assert data.numel() == codec.num_bytes == 25 + 400 + 13 + 100 + 200 + 50 + 25 + 5 * 4
    wanted = rows[PICKED]
    assert torch.equal(ranges, wanted.amax(1) - wanted.amin(1))
    got = MixedCodec(100, MIXED.clone()).decode(data)
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(got[4], wanted[4].bfloat16().float())
    for row, bits in ((0, 2), (2, 1), (3, 8), (5, 4), (6, 2)):
        step = (float(ranges[row]) + 2.0**-7 * float(wanted[row].abs().max())) / (2**bits - 1) * (1 + 2**-6)
        assert float((got[row] - wanted[row]).abs().max()) <= step


def test_mixed_rows_do_not_depend_on_their_neighbours() -> None:
    """A row's codes are a function of key, id and the row: another selection, another order, the same values."""
    rows, ids = rows_of(F32, 9, 33), torch.arange(9) + 50
    whole = MixedCodec(33, torch.full((9,), 4, dtype=U8))
    everything = whole.decode(whole.encode(rows, None, ids, 5))
    some = MixedCodec(33, torch.full((7,), 4, dtype=U8))
    assert torch.equal(some.decode(some.encode(rows, PICKED, ids[PICKED], 5)), everything[PICKED])
    assert not torch.equal(whole.decode(whole.encode(rows, None, ids, 6)), everything)


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
def test_mixed_rows_are_decoded_in_place(dtype: torch.dtype) -> None:
    codec = MixedCodec(20, MIXED)
    data = codec.encode(rows_of(dtype, 9, 20), PICKED, None, 5)
    halo = torch.zeros(30, 20, dtype=dtype)
    codec.decode(data, out=halo[10:17])
    assert torch.equal(halo[10:17], codec.decode(data, dtype))
    assert not halo[:10].any()
    assert not halo[17:].any()


def test_an_empty_mixed_message() -> None:
    codec = MixedCodec(20, MIXED[:0])
    data = codec.encode(rows_of(F32, 9, 20), PICKED[:0], None, 5)
    assert data.numel() == codec.num_bytes == 0
    assert list(codec.decode(data).shape) == [0, 20]


def test_mixed_errors() -> None:
    codec, rows = MixedCodec(20, MIXED), rows_of(F32, 9, 20)
    data = codec.encode(rows, PICKED, None, 5)
    for other in (data[:-1], torch.cat([data, data[:1]]), data[:0]):
        with pytest.raises(
            InputError, match=rf"{other.numel()} bytes, expected {codec.num_bytes} for 7 rows"
        ):
            codec.decode(other)
    with pytest.raises(InputError, match=r"rows of 20 columns expected, got \[9, 5\]"):
        codec.encode(rows[:, :5], PICKED, None, 5)
    with pytest.raises(InputError, match=r"bits\[1\] = 3"):
        MixedCodec(20, torch.tensor([2, 3], dtype=U8))
    rows[8, 3] = float("nan")
    with pytest.raises(NotFiniteError, match=r"h\[8, 3\] = nan") as caught:
        codec.encode(rows, PICKED, None, 5)
    assert caught.value.row == 2
