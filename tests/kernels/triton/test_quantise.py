from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels import dequantise_rows, quantise_rows, quantised_bytes, reference
from polyhop.kernels.quantise import NotFiniteError

KEY = (1 << 63) + 99
WIDTHS = reference.WIDTHS


def _rows(width: int, dtype: torch.dtype) -> Tensor:
    """Rows with constants, zeros of both signs, tiny and huge values among them."""
    h = torch.randn(21, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64) * 3
    h[3], h[5], h[6] = h[3, :1] if width else 0.0, 0.0, -0.0
    h[7] *= 1e-35
    h[8] *= 1e30
    return h.to(dtype)


def _bits(kind: int) -> Tensor:
    """One width for all rows; 0 = mixed."""
    if kind:
        return torch.full((21,), kind, dtype=torch.uint8)
    return torch.tensor(WIDTHS, dtype=torch.uint8)[
        torch.randint(6, (21,), generator=torch.Generator().manual_seed(4))
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [0, 1, 16, 100, 130, 256])
@pytest.mark.parametrize("kind", [0, 2, 4, 8])
def test_bytes_and_rows_of_the_host(
    device: torch.device, poison: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, kind: int
) -> None:  # fmt: skip
    _check(device, monkeypatch, _rows(width, dtype), _bits(kind))


@pytest.mark.parametrize("kind", [1, 16, 32])
def test_other_widths(device: torch.device, poison: None, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    _check(device, monkeypatch, _rows(33, torch.float32), _bits(kind))


def _check(device: torch.device, monkeypatch: pytest.MonkeyPatch, h: Tensor, bits: Tensor) -> None:
    gen = torch.Generator().manual_seed(1)
    ids, rows = torch.randint(1 << 40, (21,), generator=gen), torch.randint(21, (21,), generator=gen)
    answers = []
    for place, mode in ((device, "triton"), (torch.device("cpu"), "native")):
        monkeypatch.setenv("POLYHOP_KERNELS", mode)
        ranges = torch.zeros(21, device=place)
        message = quantise_rows(
            h.to(place), bits.to(place), KEY, rows=rows.to(place), ids=ids.to(place), ranges=ranges
        )
        back = dequantise_rows(message, bits.to(place), h.shape[1], dtype=h.dtype)
        plain = quantise_rows(h.to(place), bits.to(place), KEY)
        answers.append([t.cpu() for t in (message, ranges, back, plain)])
    for ours, theirs in zip(*answers, strict=True):
        if (
            ours.dtype == torch.bfloat16 and device.type == "cpu"
        ):  # Triton's interpreter cuts what a device rounds
            torch.testing.assert_close(ours, theirs)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [0, 2, 4, 8, 16, 32])
def test_a_message_may_begin_anywhere(device: torch.device, kind: int) -> None:
    """Words of several bytes are read at once only where they lie at multiples of their size."""
    h, bits = _rows(64, torch.float32).to(device), _bits(kind).to(device)
    message = quantise_rows(h, bits, KEY)
    aligned = dequantise_rows(message, bits, 64)
    for before in (1, 2, 4):
        moved = torch.cat([message.new_zeros(before), message])[before:]
        assert moved.data_ptr() % 4 == before % 4
        assert torch.equal(dequantise_rows(moved, bits, 64), aligned)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_steps_are_the_smallest_that_reach_the_top(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:  # fmt: skip
    """Spans at whole multiples of a bfloat16, and a hair beside them: where the next step begins, on every device alike."""
    gen = torch.Generator().manual_seed(width)
    steps = (1 + torch.randint(128, (400,), generator=gen) / 128) * 2.0 ** torch.randint(
        -40, 40, (400,), generator=gen
    )
    top = steps.double() * (2**width - 1)
    hair = torch.tensor([0.0, 2.0**-23, -(2.0**-23), 2.0**-30, 2.0**-60])[torch.arange(400) % 5].double()
    low = torch.where(
        torch.arange(400) % 2 == 0, 0.0, -top * hair.abs()
    )  # so small that it may vanish beside the top
    h = torch.stack([low, top * (1 + hair), top / 3, low], 1).float()
    bits = torch.full((400,), width, dtype=torch.uint8)
    ours = quantise_rows(h.to(device), bits.to(device), KEY)
    monkeypatch.setenv("POLYHOP_KERNELS", "native")
    assert torch.equal(ours.cpu(), quantise_rows(h, bits, KEY))


def test_what_cannot_be_sent_is_named(device: torch.device) -> None:
    h = torch.randn(4, 6, device=device)
    h[2, 3] = torch.nan
    bits = torch.full((4,), 4, dtype=torch.uint8, device=device)
    with pytest.raises(NotFiniteError, match=r"h\[2, 3\] = nan, row 2 of the message"):
        quantise_rows(h, bits, KEY)
    with pytest.raises(InputError, match=r"rows\[1\] = 4, outside the 4 rows of h"):
        quantise_rows(h, bits[:2], KEY, rows=torch.tensor([0, 4], device=device))
    with pytest.raises(InputError, match=r"bits\[1\] = 3, expected one of 1, 2, 4"):
        quantised_bytes(torch.tensor([1, 3, 4, 5], dtype=torch.uint8, device=device), 6)


@pytest.mark.parametrize("kind", [4, 16, 32])
def test_a_damaged_message_is_refused(device: torch.device, kind: int) -> None:
    bits = torch.full((3,), kind, dtype=torch.uint8, device=device)
    message = quantise_rows(torch.randn(3, 6, device=device), bits, KEY)
    message[6 * kind // 8 : 12 * kind // 8] = 255  # the second row's codes
    if kind <= 8:
        message[9 + 2 : 9 + 4] = 255  # and its zero
    with pytest.raises(InputError, match="row 1 of 3 holds"):
        dequantise_rows(message, bits, 6)
