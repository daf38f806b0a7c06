from __future__ import annotations

import pytest
import torch

from polyhop.errors import InputError
from polyhop.kernels import random_u32, reference

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter words, key words, result words.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _join(words: list[int]) -> int:
    """Two 32-bit words, low first, as 64 bits."""
    return words[0] | words[1] << 32


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
@pytest.mark.parametrize("mode", ["native", "reference"])
def test_published_vectors(
    monkeypatch: pytest.MonkeyPatch, mode: str, counter: str, key: str, result: str
) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    c, k, r = ([int(word, 16) for word in text.split()] for text in (counter, key, result))
    ids = torch.tensor([_signed(_join(c[:2]))]).repeat(21)  # enough for full vectors and a tail
    assert random_u32(_join(k), ids, _signed(_join(c[2:]))).tolist() == [r] * 21


@pytest.mark.parametrize("n", [0, 1, 7, 8, 64, 65, 1000])
def test_equals_reference(native_only: None, n: int) -> None:
    ids = torch.randint(-(1 << 62), 1 << 62, (n,), generator=torch.Generator().manual_seed(n))
    assert torch.equal(random_u32(2**64 - 3, ids, 77), reference.random_u32(2**64 - 3, ids, 77))


def test_words_depend_on_key_id_and_other() -> None:
    ids = torch.arange(1000)
    base = random_u32(1, ids, 0)
    for changed in (random_u32(2, ids, 0), random_u32(1, ids + 1000, 0), random_u32(1, ids, 1)):
        assert (changed == base).float().mean() < 0.001
    bits = (base[:, :, None] >> torch.arange(32)) & 1
    share = bits.double().mean(0)  # 4 x 32 positions of 1000 draws: 5 standard deviations are 0.08
    assert ((share - 0.5).abs() < 0.08).all()


def test_wrong_ids_are_refused() -> None:
    with pytest.raises(InputError, match=r"ids must be int64 \[n\], got torch.int32 \[3\]"):
        random_u32(0, torch.arange(3, dtype=torch.int32))
