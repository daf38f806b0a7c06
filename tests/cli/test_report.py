"""``polyhop report``: a summary and a page from a run's folder; JSON, other viewers' formats, several runs, clear errors."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

Polyhop = Callable[..., Any]


@pytest.fixture
def run(polyhop: Polyhop, small: list[str]) -> Path:
    """A real run, in ``run``."""
    assert polyhop("train", *small, "--run-dir", "run").code == 0
    return Path("run")


def test_a_summary_and_a_page(polyhop: Polyhop, run: Path) -> None:
    pytest.importorskip("plotly")
    shown = polyhop("report", run)
    assert shown.code == 0
    assert "GraphSAGE on tiny, strategy single, one process (finished)" in shown.out
    assert "seconds of a mean epoch" in shown.out
    assert "page: run/report.html" in shown.err
    text = (run / "report.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "GraphSAGE on tiny" in text  # for readers without scripts
    assert not list(run.glob(".tmp-*"))


def test_json_has_everything_and_writes_nothing(polyhop: Polyhop, run: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    shown = polyhop("report", run, "--json")
    (found,) = shown.json["runs"]
    assert found["course"]["epoch"] == [1, 2, 3, 4]
    assert found["lengths"]["count"] == 4
    assert {"compute", "evaluate"} <= set(found["phases"]["names"])
    assert found["memory"]["peak"] > 1e6
    assert found["about"]["graph"] == "tiny"
    assert "timeline" not in found
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_page_elsewhere_and_none_at_all(polyhop: Polyhop, run: Path) -> None:
    pytest.importorskip("plotly")
    assert polyhop("report", run, "--out", "pages/a.html").code == 0
    assert Path("pages/a.html").exists()
    assert polyhop("report", run, "--no-html").code == 0
    assert not (run / "report.html").exists()


def test_several_runs(polyhop: Polyhop, run: Path, small: list[str]) -> None:
    pytest.importorskip("plotly")
    assert polyhop("train", *small, "--lr", "0.02", "--run-dir", "other").code == 0
    shown = polyhop("report", run, "other")
    assert shown.code == 0
    assert "options that differ" in shown.out
    assert ["lr", "0.01", "0.02"] in [line.split() for line in shown.out.splitlines()]
    assert Path("report.html").exists()
    assert "--trace takes one run" in polyhop("report", run, "other", "--trace", "t.json").err


def test_other_viewers(polyhop: Polyhop, run: Path) -> None:
    pytest.importorskip("tensorboard")
    shown = polyhop("report", run, "--no-html", "--trace", "t.json.gz", "--tensorboard", "board")
    assert shown.code == 0
    assert "trace: t.json.gz" in shown.err
    assert Path("t.json.gz").stat().st_size > 100
    assert list(Path("board/run").glob("events.*"))
    assert list(Path("board/run/rank0").glob("events.*"))


def test_without_plotly_all_but_the_page_works(
    polyhop: Polyhop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    shown = polyhop("report", run)
    assert shown.code == 0
    assert "GraphSAGE on tiny" in shown.out
    assert "no page: the page needs plotly: pip install 'polyhop[report]'" in shown.err
    assert polyhop("report", run, "--json").json["runs"]
    asked = polyhop("report", run, "--out", "a.html")
    assert asked.code == 1
    assert "polyhop[report]" in asked.err
    assert not Path("a.html").exists()


@pytest.mark.parametrize(("name", "said"), [("nowhere", "no folder nowhere"), (".", "is not a run folder")])
def test_what_is_no_run(polyhop: Polyhop, name: str, said: str) -> None:
    shown = polyhop("report", name)
    assert shown.code == 1
    assert said in shown.err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--no-html --out a.html", "--out names a page, and --no-html makes none: leave one of them out"),
        ("--json --no-html --out a.html", "--out names a page, and --no-html makes none"),
        ("--port 99", "--port is of the server that --serve starts: give both, or leave it out"),
        ("--port 8642", "--port is of the server"),
        ("--host 0.0.0.0 --json", "--host is of the server"),
        ("--serve --out a.html", "--out is not used with --serve, which only answers a browser"),
        ("--serve --no-html", "--no-html is not used with --serve"),
        ("--serve --json", "--json is not used with --serve"),
        ("--serve --trace t.json", "--trace is not used with --serve"),
        ("--serve --tensorboard board", "--tensorboard is not used with --serve"),
    ],
)
def test_options_that_would_not_be_used(
    polyhop: Polyhop, monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    """Said before the runs are looked at."""
    monkeypatch.setattr("polyhop.cli.report._serve", lambda *given: None)  # where it is not refused
    shown = polyhop("report", "nowhere", *options.split())
    assert shown.code == 1
    assert said in shown.err
    assert list(Path().iterdir()) == []


def test_json_and_a_page(polyhop: Polyhop, run: Path) -> None:
    """Both are made, also into a pipe."""
    pytest.importorskip("plotly")
    os.mkfifo("pipe")
    with ThreadPoolExecutor(1) as reader:
        got = reader.submit(_read_pipe, Path("pipe"))
        shown = polyhop("report", run, "--json", "--out", "pipe")
        assert got.result(60).startswith("<!doctype html>")
    assert shown.json["runs"]
    assert re.search(r"page: pipe \([1-9]\.\d MB\)", shown.err)
    assert Path("pipe").is_fifo()


def _read_pipe(pipe: Path) -> str:
    """All that is written to it; nothing where a file takes its place, instead of waiting for ever."""
    handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, encoding="utf-8") as file:
        is_there = select.select([file], [], [], 50)[0]
        os.set_blocking(handle, True)
        return file.read() if is_there else ""


def test_a_run_that_was_killed(polyhop: Polyhop, run: Path) -> None:
    """Half a line at the end of every file, and no result."""
    (run / "result.json").unlink()
    for name in ("trace-rank0.jsonl", "metrics.jsonl"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[:-15])
    shown = polyhop("report", run, "--json")
    assert shown.code == 0
    (found,) = shown.json["runs"]
    assert found["state"] == "running"
    assert found["course"]["epoch"] == [1, 2, 3]


def test_ranks_and_their_bytes(polyhop: Polyhop, small: list[str]) -> None:
    shown = polyhop(
        "train", *small, "--workers", "2", "--strategy", "halo", "--bits", "8", "--run-dir", "run"
    )
    assert shown.code == 0, shown.err
    (found,) = polyhop("report", "run", "--json").json["runs"]
    traffic = found["traffic"]
    assert [rank["rank"] for rank in traffic["ranks"]] == [0, 1]
    between = sum(layer["bytes"] for layer in traffic["layers"])
    assert between == pytest.approx(sum(rank["training"]["hidden"] for rank in traffic["ranks"]), abs=0.5)
    assert traffic["ranks"][0]["training"]["gradients"] > 0
    assert traffic["ranks"][0]["setup"]["weights"] > 0
    quality = found["partition"]
    assert sum(part["nodes"] for part in quality["parts"]) == 80
    assert sum(part["cut_edges"] for part in quality["parts"]) == pytest.approx(
        quality["cut"] * sum(part["edges"] for part in quality["parts"])
    )
    assert len([thread for thread in found["phases"]["threads"] if thread["is_main"]]) == 2


def test_served_until_interrupted(tmp_path: Path, polyhop: Polyhop, run: Path) -> None:
    pytest.importorskip("plotly")
    command = [sys.executable, "-m", "polyhop", "report", "--serve", str(run), "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = server.stderr.readline().split()[1]
            with urllib.request.urlopen(address + "data.json", timeout=30) as answer:
                assert json.load(answer)["runs"][0]["about"]["graph"] == "tiny"
            time.sleep(0.2)
        finally:
            server.send_signal(signal.SIGINT)
        said = server.stderr.read()
        assert server.wait(20) == 0
    assert said.strip() == "ended"


def test_served_before_it_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyhop", "report", "--serve", "later", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            server.stderr.readline()
            assert server.stderr.readline() == "waiting for later: not there, or no run yet\n"
            (tmp_path / "later").mkdir()
            (tmp_path / "later" / "config.json").write_text("{}")
            assert server.stderr.readline() == "the run has begun\n"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)
