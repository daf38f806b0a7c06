"""What a plan had predicted (plan.json) beside what the run measured; a ratio above 1: it took more than was thought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["prediction"]


def prediction(plan: Mapping[str, Any] | None, measured: Mapping[str, Any]) -> dict[str, Any] | None:
    """``measured``: the other sections of the run. None where there is no plan that says anything."""
    chosen = plan.get("chosen") if plan is not None else None
    if plan is None or not isinstance(chosen, dict):
        return None
    others = [each for each in _list(plan.get("others")) if isinstance(each, dict)]
    rows = [
        *_seconds(chosen, measured),
        *_memory(chosen, measured),
        *_bytes(chosen, measured),
        *_dollars(chosen, measured),
    ]
    return {
        "name": str(chosen.get("name") or chosen.get("strategy") or "plan"),
        "rows": [row | {"ratio": _ratio(row)} for row in rows],
        "why": [str(line) for name in ("why", "advice") for line in _list(plan.get(name))],
        "ranked": [_candidate(each) for each in ([chosen, *others] if others else [])],
        "assumed": [[str(word) for word in _list(each)] for each in _list(plan.get("assumed"))],
    }


def _row(what: str, unit: str, predicted: Any, measured: Any) -> dict[str, Any]:
    return {"what": what, "unit": unit, "predicted": _number(predicted), "measured": _number(measured)}


def _seconds(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    lengths, own = measured.get("lengths") or {}, _own_seconds(measured)
    rows = [_row("epoch, training alone", "s", chosen.get("epoch_s"), lengths.get("train_s"))]
    rows += [_row(f"of it: {name}", "s", value, own.get(name)) for name, value in _items(chosen.get("parts"))]
    if chosen.get("evaluate_s") is not None:
        rows.append(_row("evaluation", "s", chosen["evaluate_s"], own.get("evaluate")))
    return rows


def _own_seconds(measured: Mapping[str, Any]) -> dict[str, float]:
    """Of a mean epoch, mean over the ranks' main threads."""
    mains = [
        entry["seconds"] for entry in (measured.get("phases") or {}).get("threads", []) if entry["is_main"]
    ]
    names = {name for seconds in mains for name in seconds}
    return {name: sum(seconds.get(name, 0.0) for seconds in mains) / len(mains) for name in names}


def _memory(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The process has one peak: that of whatever needs the most."""
    parts = [
        number for _, value in _items(chosen.get("memory_bytes")) if (number := _number(value)) is not None
    ]
    if not parts:
        return []
    return [_row("memory, at most", "bytes", max(parts), (measured.get("memory") or {}).get("peak"))]


def _bytes(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of the rank that sends the most, in an epoch's training."""
    sent = measured.get("traffic") or {}
    busiest: dict[str, float] = next(
        (e["training"] for e in sent.get("ranks", []) if e["rank"] == sent.get("busiest")), {}
    )
    return [
        _row(f"sent by the busiest rank: {kind}", "bytes", value, busiest.get(kind, 0.0))
        for kind, value in _items(chosen.get("bytes"))
    ]


def _dollars(chosen: Mapping[str, Any], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    if chosen.get("dollars") is None:
        return []
    bill, count = (
        (measured.get("functions") or {}).get("bill") or {},
        (measured.get("lengths") or {}).get("count"),
    )
    paid = _number(bill.get("dollars"))
    return [
        _row("dollars an epoch", "$", chosen["dollars"], paid / count if paid is not None and count else None)
    ]


def _candidate(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": str(entry.get("name") or entry.get("strategy") or "?"),
        "epoch_s": _number(entry.get("epoch_s")),
        "is_exact": entry.get("is_exact"),
        "why_not": _words(entry.get("why_not")),
    }


def _words(value: Any) -> str | None:
    """A text, or several."""
    return (
        "; ".join(map(str, value)) or None
        if isinstance(value, list)
        else None
        if value is None
        else str(value)
    )


def _ratio(row: Mapping[str, Any]) -> float | None:
    if row["predicted"] is None or row["measured"] is None or row["predicted"] <= 0:
        return None
    return float(f"{row['measured'] / row['predicted']:.4g}")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _items(value: Any) -> list[tuple[str, Any]]:
    return [(str(name), each) for name, each in value.items()] if isinstance(value, dict) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
