"""A series keeps its ends and an even spacing, however long it becomes."""

from __future__ import annotations

from itertools import pairwise

from polyhop.report.traces.series import Series


def test_a_short_one_is_whole() -> None:
    series = Series(max_moments=8)
    for at in range(5):
        series.add(float(at), {"v": at})
    assert [at for at, _ in series.moments] == [0, 1, 2, 3, 4]


def test_a_long_one_is_thinned_and_ends_with_the_newest() -> None:
    series = Series(max_moments=8)
    for at in range(1000):
        series.add(float(at), {"v": at})
    times = [at for at, _ in series.moments]
    assert len(times) <= 9
    assert times[0] == 0
    assert times[-1] == 999
    assert times == sorted(times)
    gaps = [b - a for a, b in pairwise(times[:-1])]
    assert max(gaps) <= 4 * min(gaps)
