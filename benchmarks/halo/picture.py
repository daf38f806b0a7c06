"""The overlap of a real run as a picture: what each rank's messages and waits looked like in one step, from its trace.

    python -m benchmarks.halo.picture RUN_DIR OUT.svg [--step N]

Upper bar of a rank: computing (blue), waiting (white), quantising and opening messages (orange). Lower bar: messages on
their way (grey), from the moment they leave to the moment they are taken.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["draw", "spans_of"]

COLOURS = {"quantise": "#f28e2b", "dequantise": "#f28e2b", "wait": "#ffffff", "communicate": "#9c9c9c"}
COMPUTE = "#4e79a7"


def spans_of(run_dir: Path, step: int) -> list[tuple[str, float, list[dict[str, Any]]]]:
    """(rank, seconds of the step's start on a clock common to all, spans inside it) of every rank's trace."""
    found = []
    for path in sorted(run_dir.glob("trace*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        origin = next(r["origin"] for r in records if r["kind"] == "start")
        rank = next(r["rank"] for r in records if r["kind"] == "start")
        spans = [r | {"at": r["at"] + origin} for r in records if r["kind"] == "span"]
        whole = [r for r in spans if r["name"] == "compute" and r.get("step") == step]
        if not whole:
            raise SystemExit(f"{path} has no step {step}")
        start, stop = whole[0]["at"], whole[0]["at"] + whole[0]["seconds"]
        inside = [r for r in spans if r["name"] in COLOURS and start <= r["at"] < stop and "layer" in r]
        found.append((f"rank {rank}", start, [whole[0], *inside]))
    return found


def draw(run_dir: Path, out: Path, step: int) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    ranks = spans_of(run_dir, step)
    zero = min(start for _, start, _ in ranks)
    figure, axes = plt.subplots(figsize=(10, 0.7 + 0.75 * len(ranks)), layout="constrained")
    for at, (_, _, spans) in enumerate(ranks):
        whole, *inside = spans
        top, low = at + 0.1, at + 0.52
        axes.broken_barh(
            [(1e3 * (whole["at"] - zero), 1e3 * whole["seconds"])], (top, 0.38), facecolors=COMPUTE
        )
        for span in sorted(inside, key=lambda s: s["name"] == "communicate"):
            place = (low, 0.28) if span["name"] == "communicate" else (top, 0.38)
            axes.broken_barh(
                [(1e3 * (span["at"] - zero), 1e3 * span["seconds"])],
                place,
                facecolors=COLOURS[span["name"]],
                edgecolor="#303030",
                linewidth=0.4,
            )
            if span["name"] == "communicate" and span["seconds"] > 0.02 * whole["seconds"]:
                arrow = "\N{RIGHTWARDS ARROW}" if span["direction"] == "forward" else "\N{LEFTWARDS ARROW}"
                middle = 1e3 * (span["at"] - zero + span["seconds"] / 2)
                axes.text(middle, low + 0.14, f"{arrow}{span['layer']}", ha="center", va="center", fontsize=7)
    axes.set_yticks([at + 0.45 for at in range(len(ranks))], [name for name, _, _ in ranks])
    axes.invert_yaxis()
    axes.set_xlabel(
        "ms of one step; blue computes, orange quantises, white waits; grey: messages of a layer on their way"
    )
    figure.savefig(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int, default=15)
    given = parser.parse_args()
    draw(given.run_dir, given.out, given.step)
