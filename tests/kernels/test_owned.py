"""The backward pass of relu writes over a gradient only where nobody else can see it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from polyhop.kernels import dropout
from polyhop.kernels.owned import Owned

OTHER = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def relu(h: Tensor) -> Tensor:
    return dropout(h, None, 0.0, 0, relu=True)


def _leaf() -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _held_by_a_hook(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    out = act(x * 1)
    out.register_hook(held.append)
    (out @ OTHER).square().sum().backward()


def _kept_by_retain_grad(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    out = act(x * 1)
    out.retain_grad()
    (out @ OTHER).square().sum().backward()
    held.append(out.grad)


def _given_by_the_caller(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    held.append(OTHER.clone())
    act(x * 1).backward(held[0])


def _part_of_the_callers(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    held.append(torch.cat([OTHER, OTHER]))
    act(x * 1).backward(held[0][:6])


def _shared_by_two_terms(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    ((act(x * 1) + act(x * 3)) @ OTHER).square().sum().backward()


def _shared_as_slices(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    (torch.cat([act(x * 1), act(x * 3)]) @ OTHER).square().sum().backward()


def _one_value_for_all(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    act(x * 1).sum().backward()


def _asked_for_beside(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    out = act(x * 1)
    held += torch.autograd.grad((out @ OTHER).square().sum(), [out, x])


def _seen_as_numpy(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    out, arrays = act(x * 1), []
    out.register_hook(lambda grad: arrays.append(grad.numpy()))
    (out @ OTHER).square().sum().backward()
    held.append(torch.from_numpy(arrays[0]))


def _alone(act: Callable[[Tensor], Tensor], x: Tensor, held: list[Tensor]) -> None:
    (act(x * 1) @ OTHER).square().sum().backward()


@pytest.mark.parametrize(
    "scene",
    [
        _held_by_a_hook,
        _kept_by_retain_grad,
        _given_by_the_caller,
        _part_of_the_callers,
        _shared_by_two_terms,
        _shared_as_slices,
        _one_value_for_all,
        _asked_for_beside,
        _seen_as_numpy,
        _alone,
    ],
)
def test_what_others_see_stays_as_torch_leaves_it(native_only: None, scene: Callable[..., None]) -> None:
    results = []
    for act in (relu, torch.relu):
        x, held = _leaf(), []
        scene(act, x, held)
        results.append([*([] if x.grad is None else [x.grad]), *held])
    assert len(results[0]) == len(results[1]) > 0
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


def test_a_gradient_that_nobody_holds_is_written_over(native_only: None) -> None:
    seen: dict[str, int] = {}

    class Above(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            made = grad * 2
            seen["made"] = made.data_ptr()
            return made

    class Below(Above):
        @staticmethod
        def backward(ctx, grad):
            seen["got"] = grad.data_ptr()
            return grad

    x = _leaf()
    (Above.apply(relu(Below.apply(x))) @ OTHER).sum().backward()
    assert seen["made"] == seen["got"]


def test_never_owned_where_torch_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    owned = Owned(relu)
    owned.measure()
    assert not owned(torch.ones(2, 2))


def test_never_owned_if_a_held_gradient_looks_the_same() -> None:
    owned = Owned(torch.relu)  # its backward pass does not ask, so nothing is measured
    owned.measure()
    assert not owned(torch.ones(2, 2))


def test_measuring_does_not_depend_on_torchs_defaults(native_only: None) -> None:
    module = importlib.import_module("polyhop.kernels.dropout")
    owned = Owned(lambda h: module._Dropout.apply(h, None, 0.0, 0, 0, True, False))
    torch.set_default_dtype(torch.float16)
    try:
        owned.measure()
    finally:
        torch.set_default_dtype(torch.float32)
    assert owned._seen is None


def test_measuring_is_invisible_to_checkpointing(native_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("polyhop.kernels.dropout")
    monkeypatch.setattr(
        module, "_owned", Owned(lambda h: module._Dropout.apply(h, None, 0.0, 0, 0, True, False))
    )
    x = _leaf()
    out = torch.utils.checkpoint.checkpoint(lambda h: relu(h * 2) @ OTHER, x, use_reentrant=False)
    out.sum().backward()  # counts saved tensors: the first forward pass must save as many as the second
    assert torch.equal(x.grad, torch.autograd.grad((torch.relu(x * 2) @ OTHER).sum(), x)[0])
