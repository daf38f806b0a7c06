"""The timeline in a real browser: zoomed in every way, read by pointer, its names hidden, its run changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("plotly")

OpenPage = Callable[..., Any]
Until = Callable[..., None]
GUTTER_PX = 150
WHOLE = (0.0, pytest.approx(8.0))


def view_of(tab: Any) -> tuple[float, float]:
    start, stop = tab.evaluate(
        "(({start, stop}) => [start, stop])(document.getElementById('timeline-canvas').dataset)"
    )
    return float(start), float(stop)


def open_timeline(tab: Any, until: Until) -> Any:
    canvas = tab.locator("#timeline-canvas")
    canvas.scroll_into_view_if_needed()
    until(tab, "document.getElementById('timeline-canvas').dataset.stop !== undefined")
    return canvas


def test_zoomed_in_every_way(open_page: OpenPage, until: Until, document: dict[str, Any]) -> None:
    tab = open_page(document)
    canvas = open_timeline(tab, until)
    for zoom in (_by_wheel, _by_buttons, _by_keys, _by_dragging):
        assert view_of(tab) == WHOLE
        zoom(tab, canvas, until)
        canvas.dblclick(position={"x": 300, "y": 10})
    assert view_of(tab) == WHOLE


def _by_wheel(tab: Any, canvas: Any, until: Until) -> None:
    """Once the timeline was clicked."""
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + 400, box["y"] + 10)
    tab.mouse.wheel(0, -300)
    assert view_of(tab) == WHOLE  # the page scrolls: nobody clicked
    canvas.scroll_into_view_if_needed()
    canvas.click(position={"x": 400, "y": 10})
    tab.mouse.wheel(0, -300)
    until(tab, "Number(document.getElementById('timeline-canvas').dataset.stop) < 7.9")
    start, stop = view_of(tab)
    assert stop - start == pytest.approx(8.0 / 2.71828, rel=0.01)


def _by_buttons(tab: Any, canvas: Any, until: Until) -> None:
    tab.click("#timeline-in")
    assert view_of(tab) == pytest.approx((2.0, 6.0))
    tab.click("#timeline-out")
    assert view_of(tab) == WHOLE
    tab.locator(".closeup").last.click()
    assert view_of(tab) == pytest.approx((6.0, 8.0), abs=0.01)
    tab.click("#timeline-whole")
    assert view_of(tab) == WHOLE


def _by_keys(tab: Any, canvas: Any, until: Until) -> None:
    canvas.press("+")
    assert view_of(tab) == pytest.approx((2.0, 6.0))
    canvas.press("ArrowRight")
    assert view_of(tab) == pytest.approx((2.8, 6.8))
    for _ in range(6):
        canvas.press("ArrowLeft")
    assert view_of(tab) == pytest.approx((0.0, 4.0))  # there is nothing before the run
    canvas.press("-")
    assert view_of(tab) == WHOLE
    canvas.press("+")
    canvas.press("Home")
    assert view_of(tab) == WHOLE


def _by_dragging(tab: Any, canvas: Any, until: Until) -> None:
    box = canvas.bounding_box()
    left, width = box["x"] + GUTTER_PX, box["width"] - GUTTER_PX
    tab.mouse.move(left + width * 0.25, box["y"] + 40)
    tab.mouse.down()
    tab.mouse.move(left + width * 0.5, box["y"] + 42, steps=4)
    tab.mouse.up()
    assert view_of(tab) == pytest.approx((2.0, 4.0), abs=0.02)


def test_fingers(open_page: OpenPage, until: Until, document: dict[str, Any]) -> None:
    """One moves, two zoom."""
    tab = open_page(document, width=400, has_touch=True)
    canvas = open_timeline(tab, until)
    box = canvas.bounding_box()

    def touch(kind: str, *points: tuple[float, int]) -> None:
        for x, number in points:
            at = {"clientX": box["x"] + x, "clientY": box["y"] + 40}
            canvas.dispatch_event(kind, {"pointerId": number, "pointerType": "touch", "bubbles": True, **at})

    tab.evaluate("document.getElementById('timeline-canvas').setPointerCapture = () => {}")
    touch("pointerdown", (150, 1), (250, 2))
    touch("pointermove", (100, 1), (300, 2))
    touch("pointerup", (100, 1), (300, 2))
    start, stop = view_of(tab)
    assert stop - start == pytest.approx(4.0, rel=0.05)
    touch("pointerdown", (300, 3))
    touch("pointermove", (200, 3))
    touch("pointerup", (200, 3))
    assert view_of(tab)[0] > start


def test_what_lies_under_the_pointer_is_told(
    open_page: OpenPage, until: Until, document: dict[str, Any]
) -> None:
    tab = open_page(document)
    canvas = open_timeline(tab, until)
    tab.locator(".closeup").first.click()
    assert canvas.get_attribute("data-closeups") != "0"
    box, (start, stop) = canvas.bounding_box(), view_of(tab)
    scale = (box["width"] - GUTTER_PX) / (stop - start)

    def point(second: float, y: float) -> None:
        tab.mouse.move(box["x"] + GUTTER_PX + scale * (second - start), box["y"] + y)

    point(2.3, 36)
    hint = tab.locator(".hint")
    hint.wait_for()
    assert hint.inner_text().splitlines() == ["compute, 200 ms", "epoch 1, step 1", "rank 0, MainThread"]
    point(2.27, 50)
    assert hint.inner_text().startswith("wait, 50 ms\nepoch 1, layer 1, direction forward")
    point(3.9, 36)  # epoch 1 of rank 1; rank 0 is in its second
    assert "evaluate" in hint.inner_text()


def test_shares_are_told_where_there_is_no_close_up(
    open_page: OpenPage, until: Until, document: dict[str, Any]
) -> None:
    for run in document["runs"]:
        run["timeline"]["closeups"] = []
    tab = open_page(document)
    canvas = open_timeline(tab, until)
    assert canvas.get_attribute("data-closeups") == "0"
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + GUTTER_PX + (box["width"] - GUTTER_PX) * 2.9 / 8.0, box["y"] + 36)
    hint = tab.locator(".hint")
    hint.wait_for()
    assert hint.inner_text().splitlines() == ["rank 0 · rank 0, at 2.9 s", "evaluate 100 %"]


def test_numbers_names_and_runs(open_page: OpenPage, until: Until, document: dict[str, Any]) -> None:
    """What is in sight is told in numbers; a name can be hidden; another run can be looked at."""
    tab = open_page(document)
    canvas = open_timeline(tab, until)
    tab.locator("#timeline summary").click()
    until(tab, "document.querySelector('#timeline tbody tr') !== null")
    rows = [row.split("\t") for row in tab.locator("#timeline tbody tr").all_inner_texts()]
    found = {(rank, track, name): share for rank, track, name, _, share in rows}
    assert float(found["rank 1", "MainThread", "compute"].split()[0]) == pytest.approx(37.5, abs=1)
    assert float(found["rank 1", "MainThread", "wait"].split()[0]) == pytest.approx(12.5, abs=1)
    before = canvas.screenshot()
    tab.click(".timeline .legend [data-name='compute']")
    assert tab.get_attribute(".timeline .legend [data-name='compute']", "aria-pressed") == "false"
    assert canvas.screenshot() != before
    tab.select_option("#timeline select", label="second")
    until(tab, "Number(document.getElementById('timeline-canvas').dataset.stop) < 7")
    assert view_of(tab) == pytest.approx((0, 6.0))
