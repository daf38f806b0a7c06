"""Optimisers by name, schedules as pure functions of the step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from polyhop.errors import ConfigError
from polyhop.train.optim import build_optimizer, build_schedule, set_factor


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_names(name: str, kind: type) -> None:
    optimizer = build_optimizer(name, nn.Linear(3, 2), lr=0.5, weight_decay=0.1)
    assert type(optimizer) is kind
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.1)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_torch_s_plain_implementation(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, plain = nn.Linear(5, 3).to(dtype), nn.Linear(5, 3).to(dtype)
    plain.load_state_dict(ours.state_dict())
    a = build_optimizer(name, ours, lr=0.1, weight_decay=0.01, momentum=0.9 if name == "sgd" else 0.0)
    b = type(a)(
        plain.parameters(),
        **{k: v for k, v in a.defaults.items() if k not in ("fused", "decoupled_weight_decay")},
    )
    x = torch.randn(7, 5, dtype=dtype)
    for _ in range(5):
        for model, optimizer in ((ours, a), (plain, b)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, plain.weight)


def test_a_user_s_own_optimiser_is_taken() -> None:
    model = nn.Linear(2, 2)
    made = torch.optim.RMSprop(model.parameters())
    assert build_optimizer(lambda m: made, model, lr=1.0) is made


def test_unknown_names_and_empty_models() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'adam'"):
        build_optimizer("adan", nn.Linear(1, 1), lr=1)
    with pytest.raises(ConfigError, match="Known: constant, cosine, linear, step"):
        build_schedule("exponential", warmup=0, total_steps=1)
    with pytest.raises(ConfigError, match="no parameters"):
        build_optimizer("adam", nn.ReLU(), lr=1)


def test_schedules() -> None:
    constant = build_schedule(None, warmup=0, total_steps=10)
    assert {constant(step) for step in range(10)} == {1.0}
    warm = build_schedule("constant", warmup=4, total_steps=10)
    assert [warm(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = build_schedule("cosine", warmup=2, total_steps=12)
    assert cosine(0) == 0.5
    assert cosine(2) == 1.0
    assert cosine(7) == pytest.approx(0.5)
    assert cosine(12) == pytest.approx(0.0, abs=1e-12)
    assert all(cosine(s) > cosine(s + 1) for s in range(2, 12))
    linear = build_schedule("linear", warmup=0, total_steps=4)
    assert [linear(step) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    drops = build_schedule("step", warmup=0, total_steps=9, decay_steps=3, decay=0.1)
    assert [round(math.log10(drops(step))) for step in range(9)] == [0, 0, 0, -1, -1, -1, -2, -2, -2]


def test_factor_scales_every_group_s_own_base_rate() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    groups = [{"params": a.parameters(), "lr": 1.0}, {"params": b.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    for factor in (0.5, 0.25):
        assert set_factor(optimizer, factor) == factor
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([factor, factor * 0.1])
