"""Run folders as training writes them, made up: every second and byte in them is known."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ORIGIN = 1_763_000_000.0
MakeRun = Callable[..., Path]


def span(name: str, at: float, seconds: float, thread: str = "MainThread", **facts: Any) -> dict[str, Any]:
    return {"kind": "span", "name": name, "at": at, "seconds": seconds, "thread": thread, **facts}


def start(rank: int = 0, origin: float = ORIGIN, host: str = "a") -> dict[str, Any]:
    return {"kind": "start", "rank": rank, "pid": 1, "host": host, "origin": origin}


def marks(epoch: int, at: float, hidden: float, scored: float, resident: float) -> list[dict[str, Any]]:
    """What every rank notes at the end of an epoch."""
    return [
        {
            "kind": "counter",
            "name": "traffic",
            "at": at,
            "epoch": epoch,
            "hidden": hidden,
            "gradients": 10 * epoch,
        },
        {"kind": "counter", "name": "evaluation", "at": at, "epoch": epoch, "hidden": scored},
        {
            "kind": "counter",
            "name": "memory",
            "at": at,
            "epoch": epoch,
            "resident": resident,
            "peak": resident + 5,
        },
        {"kind": "instant", "name": "epoch", "at": at, "epoch": epoch},
    ]


def epoch_lines(rank: int, epoch: int, begin: float, *, num_steps: int = 1) -> list[dict[str, Any]]:
    """An epoch of 1 s: each step computes, and waits inside; messages are in flight; a fifth of it is evaluation."""
    lines, length = [], 0.8 / num_steps
    for step in range(num_steps):
        at, number = begin + step * length, (epoch - 1) * num_steps + step
        inner = at + 0.25 * length
        lines += [
            span("wait", inner, 0.25 * length, layer=1, direction="forward"),
            span("communicate", at, 0.5 * length, layer=1, direction="forward", bytes=(rank + 1) * 100),
            span("compute", at, length, step=number),
        ]
    lines.append(span("evaluate", begin + 0.8, 0.15, step=epoch * num_steps))
    return lines


def rank_lines(rank: int, epochs: int, num_steps: int = 1, set_up_s: float = 2.0) -> Iterator[dict[str, Any]]:
    """A rank's whole trace."""
    yield start(rank, ORIGIN + rank)
    yield from marks(0, set_up_s, 50.0, 0.0, 1000.0)
    for epoch in range(1, epochs + 1):
        begin = set_up_s + epoch - 1
        yield from epoch_lines(rank, epoch, begin, num_steps=num_steps)
        sent = 50.0 + epoch * ((rank + 1) * 100 * num_steps + 7)
        yield from marks(epoch, begin + 1.0, sent, 7.0 * epoch, 1000.0 + epoch)


def write_lines(path: Path, lines: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")


def _config(**more: Any) -> dict[str, Any]:
    model = {"class": "GCN", "options": {"num_layers": 2, "hidden_channels": 16}}
    graph = {"nodes": 100, "edges": 400, "features": 8, "classes": 3}
    given = {
        "strategy": "halo",
        "max_epochs": 5,
        "lr": 0.01,
        "graph": "tiny",
        "num_ranks": 2,
        "metric": "accuracy",
    }
    return given | {"identity": {"model": model, "graph": graph}, "torch": "2"} | more


@pytest.fixture(scope="session")
def made() -> SimpleNamespace:
    """Makers of trace lines: ``span``, ``start``, ``marks``, ``epoch_lines``, ``rank_lines``; ``write(path, lines)``."""
    makers = {
        "span": span,
        "start": start,
        "marks": marks,
        "epoch_lines": epoch_lines,
        "rank_lines": rank_lines,
    }
    return SimpleNamespace(**makers, write=write_lines, ORIGIN=ORIGIN)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run("name", num_ranks=2, epochs=5, num_steps=1, is_done=True, **config)`` -> the folder."""

    def make(
        name: str = "run",
        *,
        num_ranks: int = 2,
        epochs: int = 5,
        num_steps: int = 1,
        is_done: bool = True,
        **more: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = _config(num_ranks=num_ranks, max_epochs=epochs, **more)
        (folder / "config.json").write_text(json.dumps(config))
        for rank in range(num_ranks):
            write_lines(folder / f"trace-rank{rank}.jsonl", rank_lines(rank, epochs, num_steps))
        course = [
            {
                "epoch": e,
                "step": e,
                "loss": 1 / e,
                "val": 1 - 1 / (e + 1),
                "test": 0.9 - 1 / (e + 1),
                "seconds": float(e),
            }
            for e in range(1, epochs + 1)
        ]
        write_lines(folder / "metrics.jsonl", course)
        if is_done:
            done = {
                "metric": "accuracy",
                "best_val": course[-1]["val"],
                "test": course[-1]["test"],
                "best_epoch": epochs,
            }
            (folder / "result.json").write_text(
                json.dumps(done | {"epochs": epochs, "seconds": float(epochs)})
            )
        return folder

    return make


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser to look at pages with."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("POLYHOP_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no browser: apt install chromium, or name one in POLYHOP_CHROMIUM")
    return found


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    """A headless browser; pages are opened with ``open_page``."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright (the dev extra)")
    with api.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Callable[..., Any]]:
    """``open_tab(address, width=1280, scheme="light")`` -> the tab; what goes wrong in it fails the test.

    Wrong is an error or a warning on the console (unless it has the words ``forgiven``), an exception, or a request to
    anywhere but the address.
    """
    contexts, wrong = [], list[str]()

    def show(
        address: str, *, width: int = 1280, scheme: str = "light", forgiven: str = "?", **more: Any
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **more)
        contexts.append(context)
        tab, allowed = context.new_page(), (address, "blob:", "data:")

        def hear(told: Any) -> None:
            if told.type in ("error", "warning") and forgiven not in told.text:
                wrong.append(told.text)

        tab.on("console", hear)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda asked: None if asked.url.startswith(allowed) else wrong.append(asked.url))
        tab.goto(address)
        return tab

    yield show
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture(scope="session")
def until() -> Callable[[Any, str], None]:
    """``until(tab, expression)``: wait until it is true.

    The page's policy lets nothing be evaluated inside it, so it is asked again and again.
    """

    def wait(tab: Any, expression: str, limit_s: float = 20.0) -> None:
        stop = time.monotonic() + limit_s
        while not _is_true(tab, expression):
            assert time.monotonic() < stop, f"never true: {expression}"
            tab.wait_for_timeout(20)

    return wait


def _is_true(tab: Any, expression: str) -> bool:
    """False also while the tab goes to another page."""
    from playwright.sync_api import Error

    try:
        return bool(tab.evaluate(expression))
    except Error as error:
        if "context was destroyed" not in str(error):
            raise
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a browser share one: they go to one process of pytest-xdist."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("browser"))
