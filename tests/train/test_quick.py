"""Quick steps: torch's own, to the bit, whatever comes between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from polyhop.train.optim import build_optimizer
from polyhop.train.quick import quick_step


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[tuple[nn.Module, Any]]:
    """Two equal models, each with its optimiser."""
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
        made.append((model, build_optimizer(name, model, lr=0.1, **options)))
    return made


def fill(model: nn.Module, seed: int, skip: int | None = None) -> None:
    rng = torch.Generator().manual_seed(seed)
    for at, parameter in enumerate(model.parameters()):
        grad = torch.randn(parameter.shape, generator=rng).to(parameter.dtype)
        parameter.grad = None if at == skip else grad


def assert_equal(a: tuple[nn.Module, Any], b: tuple[nn.Module, Any]) -> None:
    for mine, theirs in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
        ours, wanted = a[1].state[mine], b[1].state[theirs]
        assert ours.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(name: str, dtype: torch.dtype) -> None:
    a, b = pair(name, dtype, weight_decay=0.01)
    step = quick_step(a[1])
    for turn in range(6):
        for model, optimizer in (a, b):
            fill(model, turn, skip=2 if turn == 3 else None)
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + turn)
        step()
        b[1].step()
        assert_equal(a, b)


def test_a_loaded_state_is_used() -> None:
    a, b = pair("adam")
    step = quick_step(a[1])
    for turn in range(3):
        fill(a[0], turn)
        step()
    b[0].load_state_dict(a[0].state_dict())
    b[1].load_state_dict(copy.deepcopy(a[1].state_dict()))
    again = quick_step(b[1])
    for take, (model, _) in ((step, a), (again, b)):
        fill(model, 9)
        take()
    assert_equal(a, b)
    kept = copy.deepcopy(b[1].state_dict())
    kept["param_groups"][0]["lr"] = 0.5
    for _, optimizer in (a, b):
        optimizer.load_state_dict(copy.deepcopy(kept))  # under steps that were made before
    again = b[1].step
    for take, (model, _) in ((step, a), (again, b)):
        fill(model, 10)
        take()
    assert_equal(a, b)


def test_takes_the_kernel_itself_only_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), _ = pair("adam")
    step, calls = quick_step(optimizer), []
    fill(model, 0)
    step()  # the first makes the state: torch's
    whole = type(optimizer).step
    monkeypatch.setattr(type(optimizer), "step", lambda self: calls.append("torch") or whole(self))
    step()
    assert calls == []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    step()
    assert calls == ["torch", "hook"]
    handle.remove()
    step()
    assert calls == ["torch", "hook"]


@pytest.mark.parametrize("change", [{"amsgrad": True}, {"fused": False}])
def test_others_keep_their_own_step(change: dict[str, bool]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), **{"fused": True, **change})
    assert quick_step(optimizer) == optimizer.step
    assert quick_step(torch.optim.RMSprop(model.parameters())) is not None
