"""Numbers as people read them."""

from __future__ import annotations

import pytest

from polyhop.report.units import in_unit, percent, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (3e-6, "3 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (125, "2 min 5 s"),
        (7322, "2 h 2 min"),
        (float("nan"), "-"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999 B"), (1234, "1.23 kB"), (999_600, "1 MB"), (5e15, "5e+03 TB"), (None, "-")],
)
def test_size(value: float, text: str) -> None:
    assert size(value) == text


def test_others() -> None:
    assert percent(0.12345, 2) == "12.35 %"
    assert in_unit(12345, "count") == "12,345"
    assert in_unit(0.5, "$") == "$0.500000"
    assert in_unit("x", "count") == "-"
    assert in_unit(0.5, "share") == "50.00 %"
