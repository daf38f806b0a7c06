"""Varints: what is encoded comes back, what was not encoded is refused, and native code and reference agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels import varint

MOST = 2**63 - 1
MODES = ["native", "reference"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("POLYHOP_KERNELS", request.param)
    return str(request.param)


def leb128(value: int) -> bytes:
    """As the format's definition reads."""
    out = bytearray()
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def expected(ids: list[int]) -> bytes:
    return b"".join(leb128(b - a) for a, b in zip([0, *ids], ids))


def tensor(data: bytes | list[int]) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def check(ids: list[int]) -> None:
    given = torch.tensor(ids, dtype=torch.int64)
    data = varint.encode(given)
    assert data.dtype == torch.uint8
    assert bytes(data.tolist()) == expected(ids)
    assert varint.size(given) == data.numel()
    back = varint.decode(data, len(ids))
    assert back.dtype == torch.int64
    assert back.tolist() == ids


# Differences around every change of length, mostly of one byte as in real lists.
STEPS = st.one_of(
    st.integers(0, 127),
    st.integers(0, 127),
    st.integers(0, 40_000),
    st.integers(0, 62).map(lambda bits: 1 << bits),
    st.integers(1, 62).map(lambda bits: (1 << bits) - 1),
)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, max_size=60))
def test_round_trip(steps: list[int]) -> None:
    ids, last = [], 0
    for step in steps:
        last = min(last + step, MOST)
        ids.append(last)
    for mode in MODES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("POLYHOP_KERNELS", mode)
            check(ids)


def test_every_length(mode: str) -> None:
    """Both sides of each power of two, alone and after other ids; at most 9 bytes."""
    for bits in range(63):
        for first in {max((1 << bits) - 1, 0), 1 << bits, (1 << bits) + 1}:
            check([first])
            check([3] * 9 + [3 + first] * 3 if first <= MOST - 3 else [3])
    check([MOST])
    check([0] * 20 + [MOST] * 20)
    assert varint.size(torch.tensor([MOST])) == 9


def test_dense_lists_take_a_byte_each(mode: str) -> None:
    ids = torch.arange(0, 127 * 1000, 127)
    assert varint.size(ids) == 1000
    assert torch.equal(varint.decode(varint.encode(ids), 1000), ids)
    assert varint.size(torch.arange(0, 128 * 1000, 128)) == 1999


def test_large_lists(native_only: None) -> None:
    """Runs of one-byte differences broken at every place of the native loop's groups."""
    gen = torch.Generator().manual_seed(0)
    for share in (0.0, 0.01, 0.1, 0.5):
        steps = torch.randint(128, (100_003,), generator=gen)
        is_far = torch.rand(steps.numel(), generator=gen) < share
        steps[is_far] = torch.randint(1 << 45, (int(is_far.sum()),), generator=gen)
        ids = steps.cumsum(0)
        data = varint.encode(ids)
        assert data.numel() == varint.size(ids)
        assert torch.equal(varint.decode(data, ids.numel()), ids)


def test_nothing(mode: str) -> None:
    check([])
    with pytest.raises(InputError, match="0 ids end after 0 of 1 bytes"):
        varint.decode(tensor([0]), 0)


def test_ids_must_ascend(mode: str) -> None:
    for run in (varint.encode, varint.size):
        with pytest.raises(InputError, match=r"ids\[0\] = -1, expected ids of at least 0"):
            run(torch.tensor([-1, 4]))
        with pytest.raises(InputError, match=r"ids\[12\] = 3 after 4, expected ascending"):
            run(torch.tensor([4] * 12 + [3, 1]))
        with pytest.raises(InputError, match=r"ids\[1\] = -9223372036854775808 after"):
            run(torch.tensor([MOST, -(2**63)]))


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        ([], 1, "1 ids cannot be in 0 bytes"),
        ([1, 2], 3, "3 ids cannot be in 2 bytes"),
        ([1, 2], -1, "-1 ids cannot be"),
        ([1, 2], 1 << 60, "cannot be in 2 bytes"),
        ([1, 0x80], 2, "id 1: the bytes end"),
        ([0x80] * 8, 1, "id 0: the bytes end"),
        ([0x80, 0x80, 1], 2, "id 1: the bytes end"),
        ([1, 2, 3], 2, "2 ids end after 2 of 3 bytes"),
        ([1] * 20, 9, "9 ids end after 9 of 20 bytes"),
        ([1, 0x80, 0], 2, "id 1: a zero byte"),
        ([0x80] * 8 + [0], 1, "id 0: a zero byte"),
        ([0x80] * 9 + [1], 1, r"id 0: beyond 2\^63 - 1"),
        ([0xFF] * 30, 1, r"id 0: |the bytes end"),
        ([0xFF] * 8 + [0x7F, 1], 2, r"id 1: beyond 2\^63 - 1"),
        ([0xFF] * 8 + [0x7F] + [0] * 7 + [1] * 20, 28, r"beyond 2\^63 - 1"),
        ([0xFF] * 8 + [0x7F] + [0xFF] * 8 + [0x7F], 2, r"id 1: beyond 2\^63 - 1"),
    ],
)
def test_bytes_that_nobody_encoded(mode: str, data: list[int], count: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        varint.decode(tensor(data), count)


def outcome(data: Tensor, count: int) -> list[int] | None:
    try:
        return varint.decode(data, count).tolist()
    except InputError:
        return None


def test_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random bytes, rich in every kind of byte: ids that encode to the same bytes, or refused; alike in both modes."""
    rng = np.random.default_rng(0)
    kinds = [
        rng.integers(0, 256, 40_000),
        rng.integers(0, 128, 40_000),
        rng.choice([0, 1, 0x7F, 0x80, 0x81, 0xFF], 40_000),
        np.where(rng.random(40_000) < 0.05, 0x85, rng.integers(0, 128, 40_000)),
    ]
    accepted = 0
    for trial in range(3000):
        size = int(rng.integers(0, 40))
        at = int(rng.integers(0, 40_000 - size))
        data = torch.from_numpy(kinds[trial % 4][at : at + size].astype(np.uint8))
        ends = int((data < 128).sum())
        count = ends if trial % 3 else int(rng.integers(0, size + 2))
        monkeypatch.setenv("POLYHOP_KERNELS", "native")
        ids = outcome(data, count)
        if ids is not None:
            accepted += 1
            assert ids == sorted(ids)
            assert all(0 <= i <= MOST for i in ids)
            assert bytes(data.tolist()) == expected(ids)
        monkeypatch.setenv("POLYHOP_KERNELS", "reference")
        assert outcome(data, count) == ids
    assert 500 < accepted < 2500


def test_no_byte_beyond_the_end(native_only: None) -> None:
    """Every cut of a message is refused, though the bytes that would complete it lie right behind in memory."""
    ids = torch.tensor([5, 6, 7, 300, 301, 1 << 40, (1 << 40) + 1, 1 << 61, MOST]).repeat_interleave(4)
    data = varint.encode(ids)
    for cut in range(data.numel()):
        with pytest.raises(InputError):
            varint.decode(data[:cut], ids.numel())
    assert torch.equal(varint.decode(data, ids.numel()), ids)


def test_wrong_arguments(mode: str) -> None:
    for run in (varint.encode, varint.size):
        with pytest.raises(InputError, match="ids must be int64"):
            run(torch.tensor([1.0]))
    with pytest.raises(InputError, match="data must be uint8"):
        varint.decode(torch.tensor([1]), 1)


def test_strided_views(mode: str) -> None:
    ids = torch.arange(40)[::2]
    data = varint.encode(ids)
    assert torch.equal(varint.decode(data.repeat_interleave(2)[::2], 20), ids)
