"""Terminal plots: what is drawn is where it belongs, and odd input draws something sane."""

from __future__ import annotations

import math
import unicodedata

import pytest

from polyhop.report import bars, curve


def plot_rows(text: str, edge: str) -> list[str]:
    return [line.split(edge, 1)[1] for line in text.splitlines() if edge in line]


def test_rising_line_rises() -> None:
    rows = plot_rows(curve([(0, 0), (9, 9)], width=10, height=10, ascii=True), "|")
    assert [row.ljust(10).index("*") for row in rows] == list(range(9, -1, -1))


# Where Unicode puts each numbered dot of a braille character: (row, column).
DOT = {"1": (0, 0), "2": (1, 0), "3": (2, 0), "4": (0, 1), "5": (1, 1), "6": (2, 1), "7": (3, 0), "8": (3, 1)}


def braille_dots(rows: list[str]) -> set[tuple[int, int]]:
    """(row, column) of every dot, read off the characters' names."""
    dots = set()
    for row, text in enumerate(rows):
        for column, character in enumerate(text):
            numbers = "" if character == " " else unicodedata.name(character).rpartition("-")[2]
            dots |= {(4 * row + DOT[n][0], 2 * column + DOT[n][1]) for n in numbers}
    return dots


def test_braille_dots_are_the_ascii_drawing_at_eight_times_the_detail() -> None:
    points = [(float(x), math.sin(x / 5) * x) for x in range(40)]
    coarse = plot_rows(curve(points, width=12, height=5), "│")
    fine = plot_rows(curve(points, width=24, height=20, ascii=True), "|")
    stars = {
        (row, column) for row, text in enumerate(fine) for column, mark in enumerate(text) if mark == "*"
    }
    assert braille_dots(coarse) == stars


def test_axes_say_the_range() -> None:
    lines = curve([(3, 0.25), (40, 0.75)], width=30, height=5).splitlines()
    assert lines[0].startswith("0.75 ")
    assert lines[4].startswith("0.25 ")
    assert lines[-1].split() == ["3", "40"]


@pytest.mark.parametrize("points", [[(0, 1)], [(0, 1), (1, 1)], [(5, 0), (5, 2)]])
def test_flat_and_single_points_are_drawn(points: list[tuple[float, float]]) -> None:
    assert "*" in curve(points, ascii=True)


def test_points_that_are_no_numbers_are_left_out() -> None:
    clean = curve([(0, 1), (2, 3)], ascii=True)
    assert curve([(0, 1), (1, math.nan), (2, 3)], ascii=True) == clean
    assert curve([(0, math.inf)]) == "(nothing to draw)"
    assert curve([]) == "(nothing to draw)"


def test_bars_are_proportional() -> None:
    lines = bars({"a": 10, "long": 5, "none": 0}, width=20).splitlines()
    assert lines[0] == "   a " + "█" * 20 + " 10"
    assert lines[1].startswith("long " + "█" * 10 + " ")
    assert "█" not in lines[2]


def test_small_bar_shows() -> None:
    assert "▏" in bars({"big": 1_000_000, "small": 1}).splitlines()[1]


def test_ascii_bars_and_fractions() -> None:
    assert bars({"a": 0.5, "b": 0.25}, width=4, ascii=True) == "a #### 0.5\nb ##   0.25"


def test_bars_of_nothing() -> None:
    assert bars({}) == ""
    assert bars({"a": 0}).split() == ["a", "0"]
