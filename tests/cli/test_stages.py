"""Progress in stages: plain lines elsewhere, bars on a terminal."""

from __future__ import annotations

import sys

import pytest

from polyhop.cli.stages import stages


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with stages("edges") as tell:
        for done in range(1, 1001):
            tell("scan", done, 1000)
        tell("reading ids", 7, 0)
        tell("reading ids", 9, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "scan: 1/1,000 edges", "scan: 1,000/1,000 edges", "reading ids: 7 edges", "reading ids: 9 edges",
    ]  # fmt: skip


def test_bars_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with stages("edges") as tell:
        tell("scan", 5, 10)
        tell("scan", 10, 10)
        tell("pass 1", 3, 10)
    shown = capsys.readouterr().err
    assert "scan" in shown
    assert "10/10" in shown
    assert "pass 1" in shown


def test_the_last_words_of_an_interrupted_stage(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with stages("edges") as tell:
            tell("scan", 1, 10)
            tell("scan", 2, 10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert "scan: 2/10 edges" in capsys.readouterr().err
