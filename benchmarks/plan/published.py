"""Section ``published``: who is foreseen to be faster, against what was measured by the authors of five systems.

Every comparison of ``tests/plan/published`` is foreseen from its set-up; nothing here is timed, so any machine will do.

published_order         share of the comparisons with a clear winner (more than 1.1 either way) whose winner is foreseen
published_ratio_error   how far foreseen ratios are off, the median: 1.3 = by 1.3 times, up or down
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.harness import Figure
from benchmarks.plan.comparisons import Comparison, comparisons
from benchmarks.plan.foreseen import predicted

__all__ = ["figures", "run", "table"]

Found = Sequence[tuple[Comparison, float]]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """The table, and both figures. ``is_quick``: every fourth comparison."""
    found = [(each, predicted(each)) for each in comparisons()[:: 4 if is_quick else 1]]
    for line in table(found):
        print(f"  {line}", flush=True)
    yield from figures(found)


def table(found: Found) -> Iterator[str]:
    """A line each."""
    for each, ratio in found:
        measured = f"{each.least:.2f}" if each.least == each.most else f"{each.least:.2f} .. {each.most:.2f}"
        verdict = "" if each.is_right(ratio) else "the other way round"
        print_name = f"{each.paper}: {each.name}"
        yield f"{print_name:78} measured {measured:>12}  foreseen {ratio:6.2f}  {verdict}".rstrip()


def figures(found: Found) -> Iterator[Figure]:
    """Of all of them, and paper by paper in words."""
    clear = [(each, ratio) for each, ratio in found if each.is_clear]
    right = [each.is_right(ratio) for each, ratio in clear]
    wrong = [each.name for each, ratio in clear if not each.is_right(ratio)]
    told = f"{sum(right)} of {len(clear)} clear ones, {_by_paper(clear)}; not: {'; '.join(wrong) or 'none'}"
    yield Figure("published_order", sum(right) / len(clear), "share", told, at_least=1.0)
    errors = [each.error(ratio) for each, ratio in found]
    worst = max(found, key=lambda one: one[0].error(one[1]))
    yield Figure(
        "published_ratio_error",
        math.exp(statistics.median(errors)),
        "x",
        f"median of {len(found)}; the worst {worst[0].name}: {worst[1]:.2f}, measured {worst[0].measured:.2f}",
        at_most=2.0,
    )


def _by_paper(clear: Found) -> str:
    papers = list(dict.fromkeys(each.paper for each, _ in clear))
    told = []
    for paper in papers:
        here = [each.is_right(ratio) for each, ratio in clear if each.paper == paper]
        told.append(f"{paper} {sum(here)} of {len(here)}")
    return ", ".join(told)
