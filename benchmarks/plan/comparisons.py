"""What was published about who is faster, as data: set-ups and measured ratios (``tests/plan/published/*.json``).

A ratio is the baseline's time over the system's (or the system's value over the baseline's): above 1 the system wins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from benchmarks.harness import ROOT

__all__ = ["MARGIN", "Comparison", "comparisons"]

FOLDER = ROOT / "tests" / "plan" / "published"
MARGIN = 1.1  # measured ratios nearer to 1 say nothing of the order


@dataclass(frozen=True)
class Comparison:
    """Two ways to train the same, and how many times as fast the first was."""

    paper: str  # the file's name
    name: str
    graph: Mapping[str, Any]
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    system: Mapping[str, Any]
    baseline: Mapping[str, Any]
    least: float  # of the ratio; the same as ``most`` unless a range was published
    most: float
    source: str  # where the notes have it
    more: Mapping[str, Any] = field(
        default_factory=dict
    )  # of the set-up: batches, fan-outs, what is compared

    @property
    def measured(self) -> float:
        """In the middle of a range."""
        return math.sqrt(self.least * self.most)

    @property
    def is_clear(self) -> bool:
        """Whether one of the two was faster beyond the margin."""
        return self.least > MARGIN or self.most < 1 / MARGIN

    def is_right(self, predicted: float) -> bool:
        """Whether a prediction has the measured order; either will do where it was not clear."""
        return not self.is_clear or (predicted > 1) == (self.measured > 1)

    def error(self, predicted: float) -> float:
        """Of the ratio, as a logarithm; 0 inside a range."""
        return max(0.0, math.log(self.least / predicted), math.log(predicted / self.most))


@cache
def comparisons() -> tuple[Comparison, ...]:
    """All of them, paper by paper."""
    return tuple(
        _comparison(file.stem, about, each)
        for file in sorted(FOLDER.glob("*.json"))
        for about in [json.loads(file.read_text(encoding="utf-8"))]
        for each in about["comparisons"]
    )


_NAMED = ("graph", "model", "cluster", "system", "baseline")


def _comparison(paper: str, about: Mapping[str, Any], given: Mapping[str, Any]) -> Comparison:
    told = {
        "graph": "graphs",
        "model": "models",
        "cluster": "clusters",
        "system": "systems",
        "baseline": "systems",
    }
    found = {name: {"name": given[name], **about[told[name]][given[name]]} for name in _NAMED}
    more = {
        name: value
        for name, value in given.items()
        if name not in (*_NAMED, "name", "seconds", "ratio", "from")
    }
    least, most = _ratio(given)
    return Comparison(
        paper,
        given["name"],
        **found,
        least=least,
        most=most,
        source=given["from"],
        more={**about["batches"], **more},
    )


def _ratio(given: Mapping[str, Any]) -> tuple[float, float]:
    if "seconds" in given:
        system, baseline = given["seconds"]
        return baseline / system, baseline / system
    ratio = given["ratio"]
    return (ratio[0], ratio[1]) if isinstance(ratio, list) else (ratio, ratio)
