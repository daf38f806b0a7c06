"""One step of a real run of ``split`` as a picture, from the traces of its ranks.

    python -m benchmarks.split.picture RUN_DIR OUT.svg [--epoch N] [--step N]

Upper bar of a rank, its main thread: forward (blue), backward (violet), the sum of gradients (green), and waiting for rows
of other ranks or for the sum (white). Under it, in grey, rows of a layer on their way. Lower bar, the thread that works
ahead: sampling with the other ranks (orange) and loading (brown) of the mini-batches that come next.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["Lane", "draw", "lanes_of"]

MAIN = {"forward": "#4e79a7", "backward": "#9d7bb0", "sum": "#59a14f", "wait": "#ffffff"}
AHEAD = {"sample": "#f28e2b", "load": "#9c755f"}
CROSSING = "#b5b5b5"
Span = dict[str, Any]
Lane = tuple[str, list[Span]]  # a rank, its spans with seconds on a clock common to all


def lanes_of(run_dir: Path, epoch: int, step: int) -> list[Lane]:
    """Of every rank, the spans that fall into a step of an epoch, the step itself (its forward to its sum) first."""
    found = []
    for path in sorted(run_dir.glob("trace*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        about = next(r for r in records if r["kind"] == "start")
        spans = [r | {"at": r["at"] + about["origin"]} for r in records if r["kind"] == "span"]
        begins = [r["at"] for r in spans if r["name"] == "forward" and r.get("step") == step]
        ends = [r["at"] + r["seconds"] for r in spans if r["name"] == "sum" and r.get("step") == step]
        if len(begins) <= epoch or len(ends) <= epoch:
            raise SystemExit(
                f"{path} has no step {step} of epoch {epoch}: it is not of strategy split, or is shorter"
            )
        start, stop = begins[epoch], ends[epoch]
        named = {*MAIN, *AHEAD, "communicate"}
        inside = [
            r for r in spans if r["name"] in named and r["at"] < stop and r["at"] + r["seconds"] > start
        ]
        found.append((f"rank {about['rank']}", [{"at": start, "seconds": stop - start}, *inside]))
    if not found:
        raise SystemExit(f"no traces in {run_dir}: expected the run folder of polyhop train --workers N")
    return found


def draw(run_dir: Path, out: Path, epoch: int, step: int) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "polyhop"
    import matplotlib.pyplot as plt

    lanes = lanes_of(run_dir, epoch, step)
    zero = min(spans[0]["at"] for _, spans in lanes)
    end = max(spans[0]["at"] + spans[0]["seconds"] for _, spans in lanes)
    figure, axes = plt.subplots(figsize=(10, 0.8 + 1.0 * len(lanes)), layout="constrained")
    order = ("forward", "backward", "sum", "wait", "communicate", "sample", "load")
    for at, (_, spans) in enumerate(lanes):
        for span in sorted(spans[1:], key=lambda one: order.index(one["name"])):
            name = span["name"]
            low, high = 1e3 * (span["at"] - zero), 1e3 * (span["at"] - zero + span["seconds"])
            place = (at + 0.05, 0.34) if name in MAIN else (at + 0.68, 0.2)
            if name == "communicate":
                place = (at + 0.42, 0.2)
            axes.broken_barh(
                [(low, high - low)], place, facecolors={**MAIN, **AHEAD, "communicate": CROSSING}[name],
                edgecolor="#303030", linewidth=0.4,
            )  # fmt: skip
            if name == "communicate" and high - low > 20e3 * 1e-3 * (end - zero):
                arrow = "\N{RIGHTWARDS ARROW}" if span["direction"] == "forward" else "\N{LEFTWARDS ARROW}"
                axes.text(
                    (low + high) / 2,
                    at + 0.52,
                    f"{arrow}{span['layer']}",
                    ha="center",
                    va="center",
                    fontsize=7,
                )
    axes.set_xlim(0, 1e3 * (end - zero))
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([at + 0.45 for at in range(len(lanes))], [name for name, _ in lanes])
    axes.set_xlabel(
        "ms of one step; blue forward, violet backward, green sums gradients, white waits; grey: rows on their way;\n"
        "orange samples and brown loads the mini-batches that come next"
    )
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--step", type=int, default=10)
    given = parser.parse_args()
    draw(given.run_dir, given.out, given.epoch, given.step)
