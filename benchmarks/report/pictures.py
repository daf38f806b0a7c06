"""Pictures of report pages, as a headless browser shows them, for docs/report.md.

    python -m benchmarks.report.pictures RUNS OUT      RUNS: a folder of runs, named as below

Needs the dev extra and chromium (or POLYHOP_CHROMIUM).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from polyhop.report import Explainer, page

__all__ = ["main"]


def main(runs: Path, out: Path) -> None:
    """Write report-*.png."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("POLYHOP_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name, (names, width, height, scheme, act) in PICTURES.items():
            html = Path(folder) / f"{name}.html"
            document = Explainer([runs / each for each in names]).document()
            html.write_text(page(document), encoding="utf-8")
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
            )
            tab = context.new_page()
            tab.goto(html.as_uri())
            tab.wait_for_selector(".closeup", state="attached")
            _scroll_through(tab)
            _save(act(tab), out / f"report-{name}.png")
            context.close()
        browser.close()


def _scroll_through(tab: Any) -> None:
    """Charts are drawn when they come into sight."""
    at = 0
    while at < tab.evaluate("document.body.scrollHeight"):
        tab.evaluate(f"window.scrollTo(0, {at})")
        tab.wait_for_timeout(80)
        at += 500
    tab.evaluate("window.scrollTo(0, 0)")
    tab.wait_for_timeout(300)


def _top(tab: Any) -> bytes:
    return bytes(tab.screenshot())


def _section(name: str) -> Callable[[Any], bytes]:
    return lambda tab: bytes(tab.locator(f"#{name}").screenshot())


def _close_up(tab: Any) -> bytes:
    """An epoch of the timeline, with what lies under the pointer."""
    tab.locator(".closeup").last.click()
    canvas = tab.locator("#timeline-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + 0.45 * box["width"], box["y"] + 52)
    tab.wait_for_timeout(200)
    return bytes(tab.locator("#timeline").screenshot())


def _save(data: bytes, path: Path) -> None:
    """In 256 colours, which is a third of the bytes."""
    from PIL import Image

    Image.open(BytesIO(data)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


Picture = tuple[tuple[str, ...], int, int, str, Callable[[Any], bytes]]
PICTURES: dict[str, Picture] = {
    "overview": (("halo-adaptive",), 1280, 1480, "light", _top),
    "timeline": (("pipeline",), 1280, 900, "light", _close_up),
    "functions": (("serverless",), 1280, 900, "light", _section("timeline")),
    "bytes": (("halo-adaptive",), 1280, 900, "light", _section("traffic")),
    "predicted": (("planned",), 1280, 900, "light", _section("plan")),
    "compared": (("halo", "halo-adaptive"), 1280, 1500, "dark", _top),
    "narrow": (("halo-adaptive",), 400, 1500, "light", _top),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
