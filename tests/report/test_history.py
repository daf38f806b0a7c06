"""Reading a run folder: resumed runs, killed runs, folders that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyhop.errors import InputError
from polyhop.report import METRICS_FILE, read_history


def write(folder: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / METRICS_FILE).write_text(text, encoding="utf-8")
    return folder


def test_series_skip_epochs_without_the_value(tmp_path: Path) -> None:
    run = write(
        tmp_path, {"epoch": 0, "loss": 2}, {"epoch": 1, "loss": 1.5, "val": 0.4}, {"epoch": 2, "val": None}
    )
    history = read_history(run)
    assert history.series("loss") == [(0, 2), (1, 1.5)]
    assert history.series("val") == [(1, 0.4)]
    assert history.series("nothing") == []
    assert history.names == ["loss", "val"]


def test_resumed_run_counts_the_later_line(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        {"epoch": 0, "loss": 3},
        {"epoch": 1, "loss": 9},
        {"epoch": 1, "loss": 2},
        {"epoch": 2, "loss": 1},
    )
    assert read_history(run).series("loss") == [(0, 3), (1, 2), (2, 1)]


def test_lines_of_one_epoch_are_joined(tmp_path: Path) -> None:
    run = write(tmp_path, {"epoch": 0, "loss": 3}, {"epoch": 0, "val": 0.5})
    assert read_history(run).records == ({"epoch": 0, "loss": 3, "val": 0.5},)


def test_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    run = write(tmp_path, {"epoch": 0, "loss": 3}, '{"epoch": 1, "lo')
    assert read_history(run).series("loss") == [(0, 3)]


def test_broken_line_elsewhere_is_named(tmp_path: Path) -> None:
    run = write(tmp_path, {"epoch": 0, "loss": 3}, "{oops", {"epoch": 2, "loss": 1})
    with pytest.raises(InputError, match="line 2 is not JSON"):
        read_history(run)


def test_other_lines_are_ignored(tmp_path: Path) -> None:
    assert read_history(write(tmp_path, [1, 2], {"note": "no epoch"}, {"epoch": "x"})).records == ()


def test_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a run folder"):
        read_history(tmp_path)
