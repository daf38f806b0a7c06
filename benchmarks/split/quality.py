"""Section ``quality``: owners by structure and by what is sampled, judged on fresh mini-batches. Counts alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.graphs import describe
from benchmarks.harness import Figure
from benchmarks.split.graphs import blocks
from polyhop.partition import partition
from polyhop.sample.presample import Trial, presample
from polyhop.sample.splitting import SplitQuality, judge, presampled

__all__ = ["run"]

PARTS, FAN_OUTS = 4, [10, 10, 10]
SEEDS = (1, 2, 3)  # of the graphs


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Cut and rows on communities; balance and cut where the train nodes lie in one corner; how many batches that takes."""
    size = 12_000 if is_quick else 60_000
    yield from _communities(size)
    yield from _corner(size, SEEDS[:1] if is_quick else SEEDS)


def _communities(size: int) -> Iterator[Figure]:
    graph = blocks(size)
    print(f"  {describe(graph)}", flush=True)
    found = presampled(graph, PARTS, FAN_OUTS, size // 60, method="metis").quality
    details = _told(found)
    yield Figure("cut_presampled", found.cut, "share", details, at_most=0.16)
    yield Figure("cut_by_lot", found.chance_cut, "share", "owners by lot: 1 - 1 / P is expected")
    yield Figure("rows_vs_lot", found.row_share, "share", details, at_most=0.3)


def _corner(size: int, seeds: tuple[int, ...]) -> Iterator[Figure]:
    even, ours, gains = [], [], []
    for seed in seeds:
        graph = blocks(size, is_corner=True, seed=seed)
        trial, fresh = Trial(graph, FAN_OUTS, size // 60), Trial(graph, FAN_OUTS, size // 60, site=1)
        plain = judge(fresh, partition(replace(graph, split=None), PARTS, "metis"), 6)
        weighed = judge(fresh, partition(graph, PARTS, "metis", node_weight=presample(trial).load), 6)
        made = presampled(graph, PARTS, FAN_OUTS, size // 60, method="metis").quality
        even.append(plain.batch_balance)
        ours.append(made.batch_balance)
        gains.append(weighed.cut / made.cut)
        print(
            f"  corner {seed}: by structure {_told(plain)}; nodes weighed {_told(weighed)}; edges too {_told(made)}",
            flush=True,
        )
    each = f"{len(seeds)} graphs of {size:,} nodes, train nodes in one of 8 fields: edges of the busiest rank over the mean"
    yield Figure("balance_structure", min(even), "x", f"least of {each}", at_least=2.0)
    yield Figure("balance_presampled", max(ours), "x", f"largest of {each}", at_most=1.25)
    details = (
        ", ".join(f"{gain:.2f}" for gain in gains) + ": sampled edges cut without weights of edges over with"
    )
    yield Figure("cut_gain_edge_weights", sum(gains) / len(gains), "x", details, at_least=1.2)


def _told(found: SplitQuality) -> str:
    rows = f"rows {100 * found.row_share:.0f} % of those by lot"
    return f"cut {100 * found.cut:.1f} %, busiest {found.batch_balance:.2f}, {rows}"
