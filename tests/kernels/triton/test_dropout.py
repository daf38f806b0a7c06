from __future__ import annotations

import pytest
import torch

from polyhop.kernels import dropout, reference

KEY = (1 << 63) + 12345  # both words of the key have their upper bits in use


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(5, 3), (17, 130), (1, 8), (0, 4), (3, 257), (2, 1032)])
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
    torch.testing.assert_close(
        gradient, expected
    )  # the factor is rounded once here, and not after a product in bfloat16


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


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_relu_keeps_one_bit_of_a_unit(device: torch.device, p: float) -> None:
    h = torch.randn(6, 37, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    kept: list[torch.Tensor] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = dropout(h, None, p, KEY, relu=True)
    assert [(each.dtype, tuple(each.shape)) for each in kept] == [(torch.uint8, (6, 5))]
    out.sum().backward()
    assert h.grad is not None
    assert torch.equal(h.grad, (out > 0) / (1 - p))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gradient_that_others_hold_is_left_alone() -> None:
    """And one that nobody else holds takes the result."""
    for is_held in (False, True):
        h = torch.randn(64, 40, device="cuda", requires_grad=True)
        weight, held = torch.randn(40, 8, device="cuda"), []
        out = dropout(h * 1, None, 0.5, KEY, relu=True)
        if is_held:
            out.register_hook(held.append)
        (out @ weight).sum().backward()
        for grad in held:
            torch.testing.assert_close(grad, weight.sum(1).expand_as(grad))
        expected = (out > 0) * weight.sum(1) * 2
        torch.testing.assert_close(h.grad, expected)
