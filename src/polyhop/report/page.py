"""The report as one HTML page that needs nothing else: no network, no other file.

``web/`` holds its pieces: a template, a style, and scripts that are joined, in the order below, into one scope. The
plotting library is the one that the package ``plotly`` carries (the ``report`` extra). The page's own policy lets no script
run but these, by their hashes, and no address be asked but, where it is served live, the server's.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyhop.errors import UnsupportedError

__all__ = ["in_script", "page"]

_FOLDER = Path(__file__).parent / "web"
_SCRIPTS = (
    *(
        "words",
        "elements",
        "theme",
        "packed",
        "plots",
        "runs",
        "head",
        "curves",
        "time",
        "traffic",
        "strategies",
        "parts",
    ),
    *(
        "prediction",
        "options",
        "timeline_view",
        "timeline_paint",
        "timeline",
        "timeline_input",
        "live",
        "start",
    ),
)
_START = "polyhop.start();"


def page(document: Mapping[str, Any], text: str = "", *, live: str | None = None) -> str:
    """HTML of a report; ``text``: the same in words, for readers without scripts; ``live``: where news are asked for."""
    plotly = _plotly()
    script = (
        "(function () {\n'use strict';\n" + "\n".join(_read(f"{name}.js") for name in _SCRIPTS) + "\n})();"
    )
    hashes = " ".join(f"'sha256-{_hash(each)}'" for each in (script, plotly, _START))
    policy = (
        (
            f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {'none' if live is None else 'self'}"
        )
        .replace("-src none", "-src 'none'")
        .replace("-src self", "-src 'self'")
    )
    names = ", ".join(run["name"] for run in document["runs"])
    filled = {
        "policy": html.escape(policy, quote=False),
        "title": html.escape(f"polyhop: {names}"),
        "style": _read("page.css"),
        "text": html.escape(text),
        "data": in_script({**document, "live": live}),
        "script": script,
        "plotly": plotly,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], _read("page.html"))


def in_script(value: Any) -> str:
    """JSON that cannot end the element it stands in; what JSON cannot say is null."""
    text = json.dumps(_finite(value), separators=(",", ":"), default=str, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnsupportedError(
            "the page needs plotly: pip install 'polyhop[report]' (--no-html prints the report without it)"
        ) from error
    text = str(get_plotlyjs())
    if "</script" in text.lower():
        raise UnsupportedError(
            "this plotly cannot stand inside a page: install the version that polyhop pins"
        )
    return text


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
