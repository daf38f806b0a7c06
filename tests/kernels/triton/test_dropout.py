from __future__ import annotations

import pytest
import torch

from polyhop.kernels import dropout, reference

KEY = (1 << 63) + 12345  # both words of the key have their upper bits in use


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(5, 3), (17, 130), (1, 8), (0, 4), (3, 257)])
@pytest.mark.parametrize("relu", [False, True])
def test_drops_the_units_of_the_host(
    device: torch.device, poison: None, dtype: torch.dtype, rows: int, width: int, relu: bool
) -> None:
    gen = torch.Generator().manual_seed(rows)
    h, grad = (torch.randn(rows, width, generator=gen, dtype=torch.float64).to(dtype) for _ in range(2))
    ids = torch.randint(1 << 50, (rows,), generator=gen)
    results = []
    for run, place in ((dropout, device), (reference.dropout, torch.device("cpu"))):
        leaf = h.to(place).clone().requires_grad_()
        out = run(leaf, ids.to(place), 0.3, KEY, relu=relu)
        out.backward(grad.to(place))
        assert leaf.grad is not None
        results.append((out.detach().cpu(), leaf.grad.cpu()))
    (ours, gradient), (theirs, expected) = results
    if dtype == torch.bfloat16 and device.type == "cpu":  # Triton's interpreter cuts what a device rounds
        torch.testing.assert_close(ours, theirs)
    else:
        assert torch.equal(ours, theirs)
    assert torch.equal(gradient == 0, expected == 0)
    torch.testing.assert_close(gradient, expected)  # the factor is rounded once here, and not after a product in bfloat16


def test_ids_from_a_start_and_in_place(device: torch.device) -> None:
    h = torch.randn(9, 20, generator=torch.Generator().manual_seed(0)).to(device)
    ids = torch.arange(40, 49, device=device)
    expected = dropout(h, ids, 0.5, KEY, relu=True)
    assert torch.equal(dropout(h, None, 0.5, KEY, id_start=40, relu=True), expected)
    assert torch.equal(dropout(h.clone(), ids, 0.5, KEY, relu=True, in_place=True), expected)


def test_nan_passes_a_relu(device: torch.device) -> None:
    h = torch.full((4, 8), torch.nan, device=device)
    kept = dropout(torch.ones_like(h), None, 0.5, KEY) > 0
    assert torch.equal(dropout(h, None, 0.5, KEY, relu=True).isnan(), kept)
