"""An epoch of a real pipeline as a picture, from the traces of its ranks.

    python -m benchmarks.pipeline.picture RUN_DIR OUT.svg [--epoch N]

A bar for each rank: chunks going forward (blue) and backward (violet), with their numbers; waiting for the rows of a chunk
(white); grey is everything else: what comes before the first layer, packing, sums. Of all epochs the one that took least is
drawn, unless told.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["Lane", "draw", "lanes_of"]

COLOURS = {"forward": "#8cb4dc", "backward": "#c3a5d6", "wait": "#ffffff"}
REST = "#c9c9c9"
Span = dict[str, Any]
Lane = tuple[
    str, list[Span]
]  # a rank; the whole epoch, then its spans, with seconds on a clock common to all


def lanes_of(run_dir: Path, epoch: int | None = None) -> list[Lane]:
    """Of every rank, the spans of an epoch (which is one step), the step itself first."""
    found = []
    for path in sorted(run_dir.glob("trace*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        about = next(r for r in records if r["kind"] == "start")
        spans = [r | {"at": r["at"] + about["origin"]} for r in records if r["kind"] == "span"]
        steps = {r["step"]: r for r in spans if r["name"] == "compute" and "step" in r}
        if epoch is None and steps:
            epoch = min(steps, key=lambda step: float(steps[step]["seconds"]))
        whole = [steps[epoch]] if epoch in steps else []
        if not whole:
            raise SystemExit(f"{path} has no epoch {epoch}: it is not of strategy pipeline, or is shorter")
        start, stop = whole[0]["at"], whole[0]["at"] + whole[0]["seconds"]
        inside = [r for r in spans if r["name"] in COLOURS and start <= r["at"] < stop]
        found.append((f"rank {about['rank']}", [whole[0], *inside]))
    if not found:
        raise SystemExit(f"no traces in {run_dir}: expected the run folder of polyhop train --workers N")
    return found


def draw(run_dir: Path, out: Path, epoch: int | None = None) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "polyhop"
    import matplotlib.pyplot as plt

    lanes = lanes_of(run_dir, epoch)
    zero = min(spans[0]["at"] for _, spans in lanes)
    end = max(spans[0]["at"] + spans[0]["seconds"] for _, spans in lanes)
    figure, axes = plt.subplots(figsize=(10, 0.8 + 0.6 * len(lanes)), layout="constrained")
    for at, (_, (whole, *spans)) in enumerate(lanes):
        axes.broken_barh(
            [(1e3 * (whole["at"] - zero), 1e3 * whole["seconds"])], (at + 0.12, 0.76), facecolors=REST
        )
        for span in spans:
            low, length = 1e3 * (span["at"] - zero), 1e3 * span["seconds"]
            axes.broken_barh(
                [(low, length)], (at + 0.12, 0.76), facecolors=COLOURS[span["name"]], edgecolor="#303030", linewidth=0.4
            )  # fmt: skip
            if "chunk" in span and span["seconds"] > 0.012 * (end - zero):
                axes.text(
                    low + length / 2, at + 0.5, str(span["chunk"]), ha="center", va="center", fontsize=7
                )
    axes.set_xlim(0, 1e3 * (end - zero))
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([at + 0.5 for at in range(len(lanes))], [name for name, _ in lanes])
    axes.set_xlabel(
        "ms of one epoch; blue: a chunk goes forward, violet: backward, white: waits for its rows, grey: everything else"
    )
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epoch", type=int)
    given = parser.parse_args()
    draw(given.run_dir, given.out, given.epoch)
