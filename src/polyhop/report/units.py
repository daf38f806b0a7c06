"""Numbers as people read them on a terminal; "-" stands for what is not known."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["in_unit", "percent", "seconds", "size"]

_NONE = "-"


def in_unit(value: Any, unit: str) -> str:
    """s, bytes, share, $ or count."""
    if unit == "s":
        return seconds(value)
    if unit == "bytes":
        return size(value)
    if unit == "share":
        return percent(value, 2)
    if not _is_number(value):
        return _NONE
    return f"${value:.6f}" if unit == "$" else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def seconds(value: Any) -> str:
    """µs to hours."""
    if not _is_number(value):
        return _NONE
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 120:
        return f"{int(value // 60)} min {int(value % 60)} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * scale >= 1 or unit == "µs":
            return f"{value * scale:.3g} {unit}" if value else "0"
    raise AssertionError("one of the units fits")


def size(value: Any) -> str:
    """Bytes, in powers of 1000."""
    if not _is_number(value):
        return _NONE
    amount, names = float(value), ["B", "kB", "MB", "GB", "TB"]
    while abs(amount) >= 999.5 and len(names) > 1:
        amount, names = amount / 1000, names[1:]
    return f"{amount:.3g} {names[0]}" if amount else "0"


def percent(value: Any, places: int = 1) -> str:
    """Of a share."""
    return f"{100 * value:.{places}f} %" if _is_number(value) else _NONE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
