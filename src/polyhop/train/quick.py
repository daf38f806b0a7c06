"""Steps of an optimiser without what torch does around them: for mini-batches so small that this is what takes the time.

Sorting a few small parameters, asking for hooks and naming the step for profilers takes torch longer than the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

__all__ = ["quick_step"]


def quick_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """``optimizer.step``, or what it comes down to where that is known: the same kernel on the same tensors."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return optimizer.step
    if not all(map(_is_plain, optimizer.param_groups)):
        return optimizer.step

    def step() -> None:
        groups = optimizer.param_groups  # loading a state makes new ones
        states = [[optimizer.state.get(p, {}) for p in group["params"]] for group in groups]
        is_begun = all(states_of and all(states_of) for states_of in states)
        has_all = all(p.grad is not None for group in groups for p in group["params"])
        if not (is_begun and has_all) or _is_watched(optimizer):
            optimizer.step()
            return
        with torch.no_grad():
            for group, states_of in zip(groups, states, strict=True):
                _fused(group, states_of)

    return step


def _is_plain(group: dict[str, Any]) -> bool:
    """Whether one call of the fused kernel serves a group of Adam's: parameters of one kind, on the CPU, nothing unusual."""
    kinds = {(p.device.type, p.dtype, p.layout) for p in group["params"]}
    is_one = len(kinds) == 1 and next(iter(kinds))[0] == "cpu"
    asks_more = group["amsgrad"] or group["capturable"] or group["differentiable"]
    return bool(is_one and group["fused"] and not asks_more)


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to know of its steps, or has changed them."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or "step" in vars(optimizer)
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    )


def _fused(group: dict[str, Any], states: list[dict[str, torch.Tensor]]) -> None:
    """What torch.optim.adam._fused_adam does with one group."""
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        group["params"],
        [p.grad for p in group["params"]],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
