"""What a checkpoint belongs to, in a few values that can be compared and explained; the graph's are in ``graph``."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

__all__ = ["differences", "fingerprint_model"]


def fingerprint_model(model: nn.Module) -> dict[str, Any]:
    """Class, printed form (which shows widths, dropout and the like) and shapes of a model."""
    shapes = {name: [str(v.dtype).removeprefix("torch."), *v.shape] for name, v in model.state_dict().items()}
    printed = re.sub(r" at 0x[0-9a-f]+", "", repr(model))
    knobs = {
        name: value for name, value in vars(model).items() if isinstance(value, int | float | str | bool)
    }
    knobs = {name: value for name, value in knobs.items() if name != "training" and not name.startswith("_")}
    return {"class": type(model).__qualname__, "printed": printed, "options": knobs, "shapes": shapes}


def differences(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """One line for each leaf that differs, such as ``config.lr: the checkpoint has 0.01, this run 0.02``."""
    lines: list[str] = []
    for name in sorted(saved.keys() | now.keys()):
        left, right = saved.get(name), now.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += differences(left, right, f"{prefix}{name}.")
        elif left != right:
            lines.append(f"{prefix}{name}: the checkpoint has {_short(left)}, this run {_short(right)}")
    return lines


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
