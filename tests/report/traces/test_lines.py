"""Whole lines are read from any byte on, in pieces, whatever state a killed process left the file in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyhop.report.traces import lines
from polyhop.report.traces.lines import pieces


def records(path: Path, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
    return [record for piece in pieces(path, start, stop) for record in piece.records]


@pytest.fixture(params=["msgspec", "json"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to decode."""
    if request.param == "json":
        monkeypatch.setitem(sys.modules, "msgspec.json", None)
    else:
        pytest.importorskip("msgspec")
    return str(request.param)


@pytest.mark.usefixtures("decoder")
def test_lines_are_read_in_pieces_that_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 100)
    path = tmp_path / "t.jsonl"
    given = [{"kind": "span", "number": at, "text": "é" * (at % 40)} for at in range(50)]
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in given), encoding="utf-8")
    found = list(pieces(path))
    assert len(found) > 10
    assert [record for piece in found for record in piece.records] == given
    assert [piece.start for piece in found[1:]] == [piece.stop for piece in found[:-1]]
    assert found[-1].stop == path.stat().st_size
    middle = found[5]
    assert records(path, middle.start, middle.stop) == middle.records


@pytest.mark.usefixtures("decoder")
def test_what_follows_the_last_line_end_waits(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    (piece,) = pieces(path)
    assert (piece.records, piece.stop, piece.num_broken) == ([{"a": 1}], 9, 0)
    with path.open("a") as file:
        file.write("}\n")
    assert records(path, piece.stop) == [{"a": 2}]


@pytest.mark.usefixtures("decoder")
def test_broken_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n{"b": \n[1, 2]\n"text"\n{"a": 2}\n')
    (piece,) = pieces(path)
    assert piece.records == [{"a": 1}, {"a": 2}]
    assert piece.num_broken == 3


@pytest.mark.usefixtures("decoder")
def test_a_start_behind_half_a_line_is_read(tmp_path: Path, made: SimpleNamespace) -> None:
    path = tmp_path / "t.jsonl"
    begin = json.dumps(made.start(3))
    path.write_text(f'{{"a": 1}}\n{{"kind": "span", "name": "comp{begin}\n{{"a": 2}}\n')
    assert records(path) == [{"a": 1}, made.start(3), {"a": 2}]


@pytest.mark.usefixtures("decoder")
def test_numbers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": NaN}\n{"a": 2}\n')
    first, second = records(path)
    assert first["a"] != first["a"]
    assert second == {"a": 2}


def test_an_empty_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    assert list(pieces(tmp_path / "t.jsonl")) == []
