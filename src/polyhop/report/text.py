"""Small plots for a terminal, in plain characters: they need no library and survive a copy into an issue.

Curves are drawn with braille dots (2 x 4 to a character); ``ascii=True`` draws with what every terminal has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["bars", "curve"]

Point = tuple[float, float]

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # braille bit of (row, column) in a cell
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def curve(points: Sequence[Point], *, width: int = 60, height: int = 10, ascii: bool = False) -> str:
    """The points (ascending x) as a line in ``height`` rows of ``width`` characters, with both axes labelled."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return "(nothing to draw)"
    low_x, high_x = points[0][0], points[-1][0]
    low_y, high_y = _padded(min(y for _, y in points), max(y for _, y in points))
    across, up = (1, 1) if ascii else (2, 4)
    last_column, last_row = width * across - 1, height * up - 1
    cells: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for x, y in points:
        column = round((x - low_x) / (high_x - low_x) * last_column) if high_x > low_x else 0
        row = round((high_y - y) / (high_y - low_y) * last_row)
        cells.update(_line(before or (column, row), (column, row)))
        before = column, row
    rows = [_row(cells, row, width, ascii) for row in range(height)]
    ticks = {
        0: high_y,
        height // 2: high_y - (high_y - low_y) * (height // 2) / (height - 1),
        height - 1: low_y,
    }
    names = {row: f"{value:.3g}" for row, value in ticks.items()}
    margin = max(len(name) for name in names.values())
    edge, foot = ("|", "+" + "-" * width) if ascii else ("│", "└" + "─" * width)
    drawn = [f"{names.get(row, ''):>{margin}} {edge}{text}".rstrip() for row, text in enumerate(rows)]
    labels = f"{low_x:g}".ljust(width - len(f"{high_x:g}")) + f"{high_x:g}"
    return "\n".join([*drawn, f"{'':>{margin}} {foot}", f"{'':>{margin}}  {labels}"])


def bars(values: Mapping[str, float], *, width: int = 40, ascii: bool = False) -> str:
    """One horizontal bar per name, the longest ``width`` characters, each with its value. Negative values are not drawn."""
    most = max(values.values(), default=0.0)
    margin = max((len(name) for name in values), default=0)
    lines = []
    for name, value in values.items():
        length = max(value, 0.0) / most * width if most > 0 else 0.0
        bar = "#" * round(length) if ascii else _bar(length)
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        lines.append(f"{name:>{margin}} {bar.ljust(width)} {shown}")
    return "\n".join(lines)


def _padded(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Cells (column, row) of the straight line between two cells, both included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]


def _row(cells: set[tuple[int, int]], row: int, width: int, ascii: bool) -> str:
    """One row of characters from the set cells."""
    if ascii:
        return "".join("*" if (column, row) in cells else " " for column in range(width))
    text = []
    for column in range(width):
        bits = sum(
            _DOTS[down][right]
            for down in range(4)
            for right in range(2)
            if (2 * column + right, 4 * row + down) in cells
        )
        text.append(chr(0x2800 + bits) if bits else " ")
    return "".join(text)


def _bar(length: float) -> str:
    """A bar of the given length in characters, to an eighth; anything above zero shows."""
    eighths = round(length * 8)
    if eighths == 0 and length > 0:
        eighths = 1
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
