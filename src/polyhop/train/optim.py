"""Optimisers and learning-rate schedules.

The learning rate is a pure function of the step, so a resumed run needs no schedule state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from polyhop.errors import ConfigError, unknown

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "OptimizerFactory",
    "Schedule",
    "build_optimizer",
    "build_schedule",
    "set_factor",
]

OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
"""Makes a user's own optimiser (parameter groups, other methods) for a model."""

Schedule = Callable[[int], float]
"""Global step -> factor on every group's base learning rate."""

OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "cosine", "linear", "step")


def build_optimizer(
    given: str | OptimizerFactory,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
) -> torch.optim.Optimizer:
    """The optimiser of a name, or what the user's factory returns; momentum is for sgd."""
    if callable(given):
        return given(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no parameters to train")
    fused = all(p.is_floating_point() for p in parameters)
    if given == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay, fused=fused)
    if given == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=fused)
    if given == "sgd":
        return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=momentum, fused=fused)
    raise ConfigError(unknown("optimizer", given, OPTIMIZERS))


def build_schedule(
    name: str | None, *, warmup: int, total_steps: int, decay_steps: int = 0, decay: float = 0.1
) -> Schedule:
    """Factor by global step: a linear rise over ``warmup`` steps, then the named course over the rest.

    constant: 1. cosine, linear: from 1 to 0 at ``total_steps``. step: times ``decay`` every ``decay_steps`` steps.
    """
    rest = max(total_steps - warmup, 1)
    courses: dict[str, Schedule] = {
        "constant": lambda step: 1.0,
        "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * min((step - warmup) / rest, 1.0))),
        "linear": lambda step: 1 - min((step - warmup) / rest, 1.0),
        "step": lambda step: decay ** (step // max(decay_steps, 1)),
    }
    course_name = name or "constant"
    if course_name not in courses:
        raise ConfigError(unknown("schedule", course_name, SCHEDULES))
    course = courses[course_name]
    return lambda step: (step + 1) / warmup if step < warmup else course(step)


def set_factor(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group's learning rate to its base rate (kept as ``base_lr``) times the factor; returns the first group's."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("base_lr", group["lr"]) * factor
    return float(optimizer.param_groups[0]["lr"])
