"""How a finished run is shown: the curve, the numbers, the picture, and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.cli import console
from polyhop.errors import UnsupportedError

if TYPE_CHECKING:
    from polyhop.trainer import Result

__all__ = ["show_result"]


def show_result(result: Result, folder: Path, as_json: bool, *, can_predict: bool = True) -> None:
    """Print the outcome: one JSON document, or a curve and a table; curve.png goes into the run folder."""
    from polyhop.report import History, curve

    history = History(tuple(result.history))
    loss, val = history.series("loss"), history.series("val")
    is_here = folder.is_dir()  # rank 0 may have written it on another host
    series = {"loss": loss, "val": val, "test": history.series("test")}
    picture = _save_picture(folder, result.metric, series) if is_here else None
    if as_json:
        console.print_json({**result.to_json(), "curve": None if picture is None else str(picture)})
        return
    name, drawn = (f"validation {result.metric}", val) if len(val) > 1 else ("training loss", loss)
    if len(drawn) > 1:
        print(f"\n{name} over epochs\n{curve(drawn, ascii=console.is_ascii())}\n")
    rows = [(f"test {result.metric}", _shown(result.test))]
    at = "" if result.best_epoch is None else f" at epoch {result.best_epoch}"
    rows.append((f"best validation {result.metric}", f"{_shown(result.best_val)}{at}"))
    rows.append(("trained", f"{result.epochs} epochs, {result.steps:,} steps, {result.seconds:.1f} s"))
    if "bill" in result.summary:
        rows.append(("cost", _cost(result.summary["bill"])))
    rows.append(("run folder", str(folder) if is_here else f"{folder} on the host of rank 0, not here"))
    if picture is not None:
        rows.append(("picture", str(picture)))
    if can_predict:
        rows.append(("next", f"polyhop predict {folder} --out predictions.csv"))
    console.show_table(rows)


def _cost(bill: Mapping[str, Any]) -> str:
    would = "would have cost " if bill["is_local"] else ""
    return f"{would}${bill['dollars']:.6f} on {bill['server_kind']} with {bill['num_requests']:,} functions (bill.json)"


def _shown(value: float | None) -> str:
    return "none (no such nodes)" if value is None else f"{100 * value:.2f} %"


def _save_picture(folder: Path, metric: str, series: dict[str, list[tuple[float, float]]]) -> Path | None:
    """curve.png in the run folder, where matplotlib is installed and there is something to draw."""
    from polyhop.report import save_figure

    if len(series["loss"]) < 2:
        return None
    scored = {name: series[name] for name in ("val", "test") if series[name]}
    panels = {"training loss": {"loss": series["loss"]}, **({metric: scored} if scored else {})}
    picture = folder / "curve.png"
    try:
        return save_figure(picture, panels, title=folder.name)
    except UnsupportedError:
        return None  # the curve on the terminal says the same; 'polyhop env' tells what the extra adds
    except OSError as error:  # the run is done, and safe
        picture.unlink(missing_ok=True)
        print(f"polyhop: cannot write {picture}: {error.strerror or error}", file=sys.stderr)
        return None
