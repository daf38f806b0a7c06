"""A span's own time is its length less that of the spans directly inside it."""

from __future__ import annotations

import random

import pytest

from polyhop.report.traces import nesting
from polyhop.report.traces.nesting import Nesting


def test_inner_spans_are_taken_off_once() -> None:
    spans = Nesting()
    spans.end("innermost", 2.0, 3.0)
    spans.end("inner", 1.0, 4.0)
    spans.end("inner", 5.0, 6.0)
    spans.end("outer", 0.0, 10.0)
    own, whole = spans.take()
    assert own == {"innermost": 1.0, "inner": 3.0, "outer": 6.0}
    assert whole == {"innermost": 1.0, "inner": 4.0, "outer": 10.0}
    assert spans.take() == ({}, {})


def test_spans_side_by_side_are_not_inside_each_other() -> None:
    spans = Nesting()
    spans.end("a", 0.0, 1.0)
    spans.end("b", 1.0, 3.0)
    assert spans.take()[0] == {"a": 1.0, "b": 2.0}


def test_a_span_around_others_that_were_taken_still_knows_them() -> None:
    spans = Nesting()
    spans.end("inner", 1.0, 4.0)
    spans.take()
    spans.end("outer", 0.0, 10.0)
    assert spans.take()[0] == {"outer": 7.0}


def _told(spans: Nesting, start: float, stop: float, depth: int, rng: random.Random) -> None:
    """A random tree, told as it ends."""
    if depth > 0:
        cuts = sorted(rng.uniform(start, stop) for _ in range(6))
        for inner_start, inner_stop in zip(cuts[::2], cuts[1::2]):
            _told(spans, inner_start, inner_stop, depth - 1, rng)
    spans.end(rng.choice("abc"), start, stop)


@pytest.mark.parametrize("seed", range(5))
def test_own_times_add_up_to_the_outermost(seed: int) -> None:
    spans = Nesting()
    _told(spans, 0.0, 100.0, 4, random.Random(seed))
    own, _ = spans.take()
    assert sum(own.values()) == pytest.approx(100.0)
    intervals = spans.take_intervals()
    for name, (starts, stops, signs) in intervals.items():
        covered = sum(sign * (stop - start) for start, stop, sign in zip(starts, stops, signs, strict=True))
        assert covered == pytest.approx(own[name])


def test_what_waits_for_a_span_around_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nesting, "_MOST_OPEN", 10)
    spans = Nesting()
    for at in range(1000):
        spans.end("a", float(at), at + 1.0)
    assert len(spans._ended) <= 10
    assert spans.take()[0] == {"a": 1000.0}
