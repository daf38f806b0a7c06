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
@pytest.mark.parametrize("width", [0, 1, 16, 100, 130])
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
