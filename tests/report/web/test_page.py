"""The page in a real browser: no errors, no requests, readable at any width and in the dark, and everything in it works."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from polyhop.report.explain import Explainer

pytest.importorskip("plotly")

EVIL = "</script><img src=x onerror='window.hacked = 1'><b>graph</b>"
OpenPage = Callable[..., Any]
Until = Callable[..., None]
Scroll = Callable[[Any], None]

# The least contrast of any text with what is behind it, as WCAG defines it.
CONTRAST = """(() => {
  const light = (colour) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; }
    return 'rgb(255, 255, 255)';
  };
  const texts = [...document.querySelectorAll('h1, h2, h3, p, td, th, summary, a, button, .card *, .badge, label')];
  return Math.min(...texts.filter((e) => e.offsetParent && e.textContent.trim()).map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
})()"""


def test_every_section_is_drawn(
    open_page: OpenPage, scroll_through: Scroll, document: dict[str, Any]
) -> None:
    tab = open_page(document)
    scroll_through(tab)
    shown = tab.evaluate(
        "[...document.querySelectorAll('section')].filter((s) => !s.hidden).map((s) => s.id)"
    )
    assert shown == [
        *("compared", "curves", "time", "timeline", "traffic", "pipeline", "widths", "functions", "plan"),
        *("memory-section", "partition", "options"),
    ]
    drawn = tab.evaluate(
        "[...document.querySelectorAll('.plot')].map((p) => [p.id, p.querySelector('.main-svg') !== null])"
    )
    assert len(drawn) == 16
    assert [name for name, is_drawn in drawn if not is_drawn] == []
    links = tab.evaluate("[...document.querySelectorAll('nav li')].filter((l) => !l.hidden).length")
    assert links == len(shown)


def test_one_run_alone(open_page: OpenPage, scroll_through: Scroll, make_run: Any) -> None:
    tab = open_page(Explainer([make_run(num_ranks=1)]).document())
    scroll_through(tab)
    assert tab.locator("#compared").is_hidden()
    assert tab.locator("#runs").count() == 0
    assert tab.locator("#partition").is_hidden()
    assert tab.locator(".card").first.inner_text().startswith("test accuracy")
    assert tab.locator("h1").inner_text() == "run"


def test_runs_can_be_chosen(open_page: OpenPage, until: Until, document: dict[str, Any]) -> None:
    tab = open_page(document)
    tab.locator("#curve-loss").scroll_into_view_if_needed()
    lines = "document.querySelectorAll('#curve-loss .scatterlayer .trace').length"
    until(tab, f"{lines} === 2")
    tab.uncheck("[data-run='0']")
    until(tab, f"{lines} === 1")
    assert tab.locator("#compared th").all_inner_texts().count("first") == 0
    assert tab.locator("#partition").is_hidden()
    assert tab.locator("#functions").is_visible()
    tab.uncheck("[data-run='1']")
    assert "No run is shown" in tab.locator("#compared").inner_text()
    tab.check("[data-run='0']")
    until(tab, f"{lines} === 1")
    assert tab.locator("#partition").is_visible()


def test_axis_legend_and_numbers_of_charts(
    open_page: OpenPage, until: Until, document: dict[str, Any]
) -> None:
    tab = open_page(document)
    tab.locator("#curve-loss").scroll_into_view_if_needed()
    title = "document.querySelector('#curve-loss .xtitle')?.textContent"
    until(tab, f"{title} === 'epoch'")
    tab.click("[data-axis='seconds']")
    until(tab, f"{title} === 'seconds of training'")
    assert tab.get_attribute("[data-axis='seconds']", "aria-pressed") == "true"
    tab.locator("#phases").scroll_into_view_if_needed()
    bars = "document.querySelectorAll('#phases .barlayer .trace').length"
    until(tab, f"{bars} > 0")
    before = tab.evaluate(bars)
    tab.click("#phases + .legend button[data-name='wait']")
    until(tab, f"{bars} === {before - 1}")
    figure = tab.locator("figure:has(#traffic-kinds)")
    figure.locator("summary").click()
    figure.locator("td").first.wait_for()
    cells = figure.locator("td").all_inner_texts()
    assert cells[0] == "first · rank 0 training"
    assert "400 B" in cells


@pytest.mark.parametrize("width", [1280, 400])
def test_readable(
    open_page: OpenPage, until: Until, scroll_through: Scroll, document: dict[str, Any], width: int
) -> None:
    """Nothing sticks out to the side, and text stands out from what is behind it, also in the dark."""
    tab = open_page(document, width=width)
    scroll_through(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    out = tab.evaluate(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll') && !e.closest('svg')"
        " && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert out == []
    assert tab.evaluate(CONTRAST) >= 4.5
    tab.emulate_media(color_scheme="dark")
    until(tab, "document.documentElement.dataset.theme === 'dark'")
    assert tab.evaluate(CONTRAST) >= 4.5


def test_dark_as_the_system_says_or_as_chosen(open_page: OpenPage, document: dict[str, Any]) -> None:
    tab = open_page(document, scheme="dark")
    theme = "document.documentElement.dataset.theme"
    assert tab.evaluate(theme) == "dark"
    tab.click("#theme")
    assert tab.evaluate(theme) == "light"
    tab.emulate_media(color_scheme="light")
    tab.click("#theme")
    assert tab.evaluate(theme) == "dark"


def test_printed(open_page: OpenPage, document: dict[str, Any]) -> None:
    """All charts are on paper, in light colours, though none was looked at."""
    tab = open_page(document, scheme="dark")
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    plots = "[...document.querySelectorAll('.plot')].filter((p) => !p.closest('[hidden]'))"
    assert tab.evaluate(f"{plots}.length") == 16
    assert tab.evaluate(f"{plots}.filter((p) => !p.querySelector('.main-svg')).length") == 0
    tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"


def test_what_files_say_stays_text(
    open_page: OpenPage, scroll_through: Scroll, make_run: Any, made: SimpleNamespace
) -> None:
    run = make_run(graph=EVIL, strategy=EVIL, metric=EVIL)
    lines, odd = list(made.rank_lines(0, 5)), made.span(EVIL, 2.2, 0.1, EVIL, layer=1, note=EVIL)
    made.write(run / "trace-rank0.jsonl", [*lines[:5], odd, *lines[5:]])
    plan = {"chosen": {"name": EVIL, "epoch_s": 1, "parts": {EVIL: 1}}, "why": [EVIL]}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "partition.json").write_text(json.dumps({"cut": EVIL, "parts": [{"nodes": EVIL}]}))
    document = Explainer([run, make_run("other")]).document()
    document["runs"][0]["name"] = EVIL
    tab = open_page(document)
    scroll_through(tab)
    for details in tab.locator("details").all():
        if details.is_visible():
            details.locator("summary").first.click()
    assert tab.evaluate("window.hacked") is None
    label = tab.evaluate("document.querySelector('#phases .ytick text').textContent")
    assert "<b>graph</b> · rank 0" in label
    assert tab.locator("main img, header img, main b b").count() == 0
    assert EVIL in tab.locator("header").inner_text()


def test_a_run_of_which_little_is_known(open_page: OpenPage, scroll_through: Scroll, make_run: Any) -> None:
    run = make_run(is_done=False)
    for path in run.iterdir():
        path.write_text("{}" if path.name == "config.json" else "")
    tab = open_page(Explainer([run]).document())
    scroll_through(tab)
    assert "graph without a name" in tab.locator("header").inner_text()
    assert tab.locator("#timeline").is_hidden()
    assert tab.locator("#options").is_visible()
