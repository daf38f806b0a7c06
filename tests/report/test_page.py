"""The page is one file that holds everything, and nothing that a run folder says can become markup or script."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from polyhop.errors import UnsupportedError
from polyhop.report.explain import Explainer
from polyhop.report.page import in_script, page

EVIL = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">{{style}}&amp;'


@pytest.fixture
def plotly() -> None:
    pytest.importorskip("plotly")


def held(text: str) -> Any:
    """The document inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.usefixtures("plotly")
def test_the_page_holds_the_document(make_run: Any) -> None:
    document = Explainer([make_run()]).document()
    text = page(document, "in words")
    assert held(text) == {**json.loads(json.dumps(document)), "live": None}
    assert "<pre>in words</pre>" in text
    assert "plotly.js v" in text
    assert "{{" not in text.split("<script>")[0]
    assert len(text) < 6_000_000


@pytest.mark.usefixtures("plotly")
def test_nothing_is_asked_of_a_network(make_run: Any) -> None:
    text = page(Explainer([make_run()]).document())
    asked = re.findall(r"<(?:script|img|iframe|link)[^>]*(?:src|href)=[^>]*>", text.split("plotly.js v")[0])
    assert asked == ['<link rel="icon" href="data:,">']
    policy = re.search(r'Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "connect-src 'self'" in page(Explainer([make_run("b")]).document(), live="data.json")


@pytest.mark.usefixtures("plotly")
def test_what_files_say_is_no_markup(make_run: Any) -> None:
    run = make_run(graph=EVIL, strategy=EVIL)
    document = Explainer([run]).document()
    document["runs"][0]["name"] = EVIL
    text = page(document, EVIL)
    assert "window.hacked" in text
    assert "<script>window.hacked" not in text
    assert "<img src=x" not in text
    assert text.count("</script>") == 4
    assert held(text)["runs"][0]["about"]["graph"] == EVIL


def test_json_in_a_script_cannot_end_it() -> None:
    text = in_script({"a": "</script><!--", "b": [float("nan"), float("inf"), 1.5], "c": {1: "&"}})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--", "b": [None, None, 1.5], "c": {"1": "&"}}


def test_without_plotly_the_extra_is_named(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UnsupportedError, match=r"polyhop\[report\]"):
        page(Explainer([make_run()]).document())
