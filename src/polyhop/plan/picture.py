"""Curves as a picture: seconds and dollars of an epoch over the number of devices. Hollow points do not fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError
from polyhop.plan.curve import Curve
from polyhop.plan.files import replaced_whole

__all__ = ["check_name", "draw_curves"]

_COLOURS = ("#0b6e99", "#c2571a", "#4c7a34", "#7d4e9e", "#a3222d", "#5b5b5b")
_KINDS = (".svg", ".png")


def check_name(file: Path) -> None:
    """ConfigError where a picture cannot be of this kind."""
    if file.suffix not in _KINDS:
        raise ConfigError(f"--curve {file}: expected a name that ends in {' or '.join(_KINDS)}")


def draw_curves(curves: Sequence[Curve], title: str, file: Path) -> None:
    """Written as its name ends; ConfigError where it ends otherwise or cannot be written."""
    check_name(file)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    has_prices = any(point.dollars for curve in curves for point in curve.points)
    figure, axes = pyplot.subplots(1, 1 + has_prices, figsize=(5.2 * (1 + has_prices), 4.0), squeeze=False)
    _seconds(axes[0][0], curves)
    if has_prices:
        _dollars(axes[0][1], curves)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    try:
        with replaced_whole(file) as beside:
            figure.savefig(beside, dpi=150)
    except OSError as error:
        raise ConfigError(f"--curve {file}: cannot be written: {error.strerror or error}") from error
    finally:
        pyplot.close(figure)


def _seconds(axis: Any, curves: Sequence[Curve]) -> None:
    for curve, colour in zip(curves, _COLOURS * len(curves), strict=False):
        _line(axis, curve, [point.seconds for point in curve.points], colour)
    first = next(curve.points for curve in curves if curve.points)
    ranks = [point.num_ranks for point in first]
    ideal = [first[0].seconds * first[0].num_ranks / each for each in ranks]
    axis.plot(ranks, ideal, color="#999999", linestyle=":", linewidth=1, label="linear")
    _frame(axis, ranks, "seconds an epoch")
    axis.legend(fontsize=8, frameon=False)


def _dollars(axis: Any, curves: Sequence[Curve]) -> None:
    for curve, colour in zip(curves, _COLOURS * len(curves), strict=False):
        _line(axis, curve, [point.dollars for point in curve.points], colour)
    _frame(axis, [point.num_ranks for point in curves[0].points], "dollars an epoch")


def _line(axis: Any, curve: Curve, values: Sequence[float | None], colour: str) -> None:
    ranks = [point.num_ranks for point in curve.points]
    width = 2.2 if curve.is_chosen else 1.2
    axis.plot(ranks, values, color=colour, linewidth=width, label=curve.label)
    for fits, fill in ((True, colour), (False, "white")):
        at = [i for i, point in enumerate(curve.points) if point.fits is fits]
        axis.plot(
            [ranks[i] for i in at],
            [values[i] for i in at],
            "o",
            color=colour,
            markerfacecolor=fill,
            markersize=5,
        )


def _frame(axis: Any, ranks: Sequence[int], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ranks, [f"{each:,}" for each in ranks], fontsize=8)
    axis.set_xlabel("devices")
    axis.set_ylabel(label)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
