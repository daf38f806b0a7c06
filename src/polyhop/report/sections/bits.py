"""Widths of quantised rows over time: how many rows of each layer left in how many bits, from which epoch on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhop.report.traces.tally import RankTally

__all__ = ["bits"]

_PREFIX = "bits"


def bits(tallies: Sequence[RankTally]) -> dict[str, Any] | None:
    """Of all ranks together, each time that widths were chosen; None where they were not."""
    found: dict[tuple[int, int, int], dict[int, float]] = {}
    for tally in tallies:
        for record in tally.widths:
            rows = found.setdefault(_place(record), {})
            for name, count in record.items():
                if name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdigit():
                    width = int(name.removeprefix(_PREFIX))
                    rows[width] = rows.get(width, 0.0) + float(count)
    choices = [
        {"epoch": epoch, "layer": layer, "direction": "backward" if back else "forward", **_told(rows)}
        for (epoch, layer, back), rows in sorted(found.items())
        if rows
    ]
    if not choices:
        return None
    widths = sorted({width for choice in choices for width in choice["rows"]})
    return {"widths": widths, "choices": choices}


def _place(record: dict[str, Any]) -> tuple[int, int, int]:
    return int(record.get("epoch", 0)), int(record.get("layer", 0)), int(record.get("backward", 0))


def _told(rows: dict[int, float]) -> dict[str, Any]:
    total = sum(rows.values())
    mean = sum(width * count for width, count in rows.items()) / total
    return {"rows": {width: rows[width] for width in sorted(rows)}, "mean": round(mean, 3)}
