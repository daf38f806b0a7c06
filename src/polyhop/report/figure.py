"""The curve of a run as a picture file, drawn by matplotlib (the ``report`` extra)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from polyhop.errors import UnsupportedError

__all__ = ["save_figure"]

Point = tuple[float, float]


def save_figure(
    path: str | PathLike[str], panels: Mapping[str, Mapping[str, Sequence[Point]]], *, title: str = ""
) -> Path:
    """Write one picture with a panel per entry; each panel holds named lines of (epoch, value).

    The file's ending chooses the format (.png, .svg, .pdf). Raises UnsupportedError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("pictures need matplotlib: pip install 'polyhop[report]'") from error
    figure = Figure(figsize=(4.5 * max(len(panels), 1), 3.2), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display and without touching pyplot's global state
    for number, (name, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), number)
        for label, points in lines.items():
            axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.4)
        axes.set_xlabel("epoch")
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.25)
        if len(lines) > 1:
            axes.legend(fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(Path(path), dpi=120)
    return Path(path)
