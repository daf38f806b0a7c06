"""Who was faster where it was measured by others: from each set-up the same order must be foreseen.

Where it is not, the reason is written beside the comparison, and the day it is right the test says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.plan.comparisons import MARGIN, Comparison, comparisons  # noqa: E402
from benchmarks.plan.foreseen import predicted  # noqa: E402
from benchmarks.plan.published import figures, table  # noqa: E402

SHARE = (
    "by the rates that are known tensor work is a few per cent of an epoch there: what functions save by doing it is what "
    "they cost; the paper saved more time (1.3 and 1.8 times) with fewer of them alive"
)
FIGURE_8 = (
    "figure 8 and table 4 cannot both be met: figure 8 has GPUs 1.3 times as slow against CPU only as table 4 and figure "
    "10, to which the rates are fitted; table 4 has the order that is foreseen for seconds (0.75)"
)
WRONG = {
    "GCN Reddit-large: value of functions against CPU only": SHARE,
    "GCN Friendster: value of functions against CPU only": SHARE,
    "GAT Reddit-small: value of functions against CPU only": (
        "the paper's functions compute what belongs to edges too, most of GAT's work on a graph of 493 edges a node; in "
        "this forecast servers do"
    ),
    "GCN Amazon on 8 servers: seconds of functions against GPUs": FIGURE_8,
}


def _case(each: Comparison) -> object:
    marks = [pytest.mark.xfail(reason=WRONG[each.name], strict=True)] if each.name in WRONG else []
    is_large = each.more.get("hidden", 0) > 500 or each.more.get("num_layers", 0) > 32
    marks += [pytest.mark.slow] if each.paper == "gnnpipe" and is_large else []
    return pytest.param(each, id=f"{each.paper}-{each.name}", marks=marks)


@pytest.mark.parametrize("comparison", [_case(each) for each in comparisons()])
def test_order(comparison: Comparison) -> None:
    ratio = predicted(comparison)
    assert ratio > 0
    told = f"measured {comparison.least:.2f} .. {comparison.most:.2f}, foreseen {ratio:.2f}"
    assert comparison.is_right(ratio), told


def test_reversals_are_among_them() -> None:
    """Cases in which the paper's system lost beyond the margin."""
    lost = [each.name for each in comparisons() if each.most < 1 / MARGIN]
    physics = [name for name in lost if name.startswith("Physics") and "pipeline" in name]
    assert len(physics) >= 4
    assert "Orkut SAGE: GSplit against P3" in lost
    assert any("Reddit-small" in name and "GPUs" in name for name in lost)


def test_reasons_are_of_comparisons() -> None:
    names = [each.name for each in comparisons()]
    assert len(set(names)) == len(names)
    assert set(WRONG) <= set(names)


def test_every_assumption_names_what_it_is_of() -> None:
    for each in comparisons():
        for part in (each.graph, each.model, each.cluster):
            for assumed in part.get("assumed", ()):
                name = assumed.split(":")[0].split(" and ")[0]
                is_field = name in part or name in ("all", "rates") or name.startswith("the machine")
                assert is_field, f"{each.name}: {assumed}"


def test_figures_and_table() -> None:
    first = next(each for each in comparisons() if each.is_clear and each.measured > 1)
    right, wrong = (first, 2.0), (first, 0.5)
    order, error = figures([right, wrong])
    assert (order.value, order.is_met) == (0.5, False)
    assert error.name == "published_ratio_error"
    lines = list(table([right, wrong]))
    assert lines[0].endswith("2.00")
    assert lines[1].endswith("the other way round")
