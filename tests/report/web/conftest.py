"""Pages of made-up runs, open in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyhop.report.explain import Explainer
from polyhop.report.page import page

OpenPage = Callable[..., Any]


@pytest.fixture
def open_page(open_tab: Callable[..., Any], until: Callable[..., None], tmp_path: Path) -> OpenPage:
    """``open_page(document, width=1280, scheme="light")`` -> its page, ready."""

    def show(document: dict[str, Any], **more: Any) -> Any:
        path = tmp_path / "page.html"
        path.write_text(page(document, "in words"), encoding="utf-8")
        tab = open_tab(path.as_uri(), **more)
        until(tab, "document.documentElement.dataset.ready === 'yes'")
        return tab

    return show


@pytest.fixture(scope="session")
def scroll_through() -> Callable[[Any], None]:
    """``scroll_through(tab)``, from top to bottom: charts are drawn when they come into sight."""

    def scroll(tab: Any) -> None:
        at = 0
        while at < tab.evaluate("document.body.scrollHeight"):
            tab.evaluate(f"window.scrollTo(0, {at})")
            tab.wait_for_timeout(40)
            at += 500

    return scroll


@pytest.fixture
def document(make_run: Any, made: SimpleNamespace) -> dict[str, Any]:
    """Two runs that have every section between them."""
    first, second = (
        make_run("first", num_steps=4),
        make_run("second", strategy="serverless", lr=0.5, epochs=3),
    )
    _add_to_first(first, made)
    told = {"functions": 2, "in_flight": 1, "waiting": 3, "again": 0, "dollars": 0.25}
    crew = {"kind": "counter", "name": "crew", "at": 4.0, **told}
    made.write(second / "trace-rank0.jsonl", [*made.rank_lines(0, 3), crew])
    (second / "bill.json").write_text('{"dollars": 0.5, "is_local": true, "servers": {}}')
    return Explainer([first, second]).document()


def _add_to_first(run: Path, made: SimpleNamespace) -> None:
    """Widths, a chunk, parts and a plan."""
    place = {"at": 2.5, "epoch": 1, "layer": 1, "backward": 0}
    widths = {"kind": "counter", "name": "widths", **place, "bits2": 9, "bits4": 3}
    chunk = made.span("forward", 2.05, 0.05, chunk=0, layer=0)
    lines = list(made.rank_lines(0, 5, 4))
    made.write(run / "trace-rank0.jsonl", [lines[0], widths, chunk, *lines[1:]])
    parts = [{"nodes": 50, "edges": 180, "train": 20, "cut_edges": 9, "halo": 4}] * 2
    balance = {"node_balance": 1.0, "edge_balance": 1.2, "train_balance": 1.0}
    cut = {"num_parts": 2, "cut": 0.25, "chance_cut": 0.5, "halo": 0.1, "replication": 1.1}
    (run / "partition.json").write_text(json.dumps({**cut, **balance, "parts": parts}))
    chosen = {"name": "halo", "epoch_s": 1.0, "bytes": {"hidden": 300}}
    (run / "plan.json").write_text(json.dumps({"chosen": chosen, "why": ["it is fast"], "others": []}))
