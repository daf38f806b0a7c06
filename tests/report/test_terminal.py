"""The terminal shows what the document says, with rich and without, in plain characters too."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from polyhop.report.explain import Explainer
from polyhop.report.terminal import plain, show


@pytest.fixture
def document(make_run: Any) -> dict[str, Any]:
    runs = [make_run("a"), make_run("b", lr=0.5)]
    quality = {
        "num_parts": 2,
        "cut": 0.25,
        "chance_cut": 0.5,
        "halo": 0.1,
        "node_balance": 1.0,
        "edge_balance": 1.2,
    }
    (runs[0] / "partition.json").write_text(json.dumps(quality))
    (runs[0] / "plan.json").write_text(json.dumps({"chosen": {"name": "halo", "epoch_s": 1.7}}))
    return Explainer(runs).document()


def test_the_numbers_are_there(document: dict[str, Any]) -> None:
    text = plain(document)
    assert "GCN on tiny, strategy halo, 2 ranks (finished)" in text
    assert "median epoch, training alone   850 ms" in text
    assert "25.0 % of edges cut" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["rank", "0", "600", "ms", "200", "ms", "150", "ms", "50", "ms"] in rows
    assert ["hidden", "300", "B", "200", "B", "14", "B"] in rows
    assert ["epoch,", "training", "alone", "1.7", "s", "850", "ms", "0.5"] in rows
    assert ["lr", "0.01", "0.5"] in rows


def test_plain_characters(document: dict[str, Any]) -> None:
    plain(document, ascii=True).encode("ascii")


@pytest.mark.parametrize("has_rich", [True, False])
def test_shown(
    document: dict[str, Any],
    has_rich: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    document["runs"][0]["name"] = "[bold]a[/bold]"
    show(document)
    text = capsys.readouterr().out
    assert "[bold]a[/bold]" in text
    assert "850 ms" in text
    assert "options that differ" in text


def test_a_run_of_which_nothing_is_known(make_run: Any) -> None:
    run = make_run(is_done=False)
    for path in run.iterdir():
        if path.name != "config.json":
            path.unlink()
    (run / "config.json").write_text("{}")
    text = plain(Explainer([run]).document())
    assert "a graph without a name" in text
    assert "no trace" in text
