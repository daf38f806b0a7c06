"""The run folder keeps two runs apart and goes back to where a checkpoint was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyhop.errors import ConfigError
from polyhop.train.folder import RunFolder, automatic_name


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", may_continue=False)
    folder.write_config({"lr": 0.1})
    folder.close()
    with pytest.raises(ConfigError, match="already holds a run: continue it with resume='auto'"):
        RunFolder(tmp_path / "run", may_continue=False)
    RunFolder(tmp_path / "run", may_continue=True).close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, may_continue=True)
    with pytest.raises(ConfigError, match="in use by another process"):
        RunFolder(tmp_path, may_continue=True)
    code = f"""
from pathlib import Path
from polyhop.train.folder import RunFolder
RunFolder(Path({str(tmp_path)!r}), may_continue=True)
"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "in use by another process" in other.stderr
    folder.close()
    RunFolder(tmp_path, may_continue=True).close()


def test_records_past_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, may_continue=False)
    for step in (10, 20, 30):
        folder.append_metrics({"epoch": step // 10, "step": step, "val": float("nan")})
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "st')  # cut short by a kill
    folder = RunFolder(tmp_path, may_continue=True)
    assert folder.rewind(20) == [{"epoch": 1, "step": 10, "val": None}, {"epoch": 2, "step": 20, "val": None}]
    folder.append_metrics({"epoch": 3, "step": 31})
    folder.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 31]


def test_an_impossible_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir=.* cannot be used"):
        RunFolder(tmp_path / "file" / "run", may_continue=False)


def test_automatic_names_are_plain_and_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = automatic_name("synth:products?scale=0.1", "GraphSAGE")
    assert first.name.endswith("-synth-products-scale-0.1-graphsage")
    first.mkdir(parents=True)
    assert automatic_name("synth:products?scale=0.1", "GraphSAGE") != first


def test_a_disk_that_takes_half_a_metric_keeps_none_of_it(small_disk: Path) -> None:
    folder, ballast = RunFolder(small_disk, may_continue=True), small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))

    def fill() -> None:
        for epoch in range(100):
            folder.append_metrics({"step": epoch, "text": "x" * 15_000})

    with pytest.warns(RuntimeWarning, match=r"a record of metrics.jsonl is lost: No space left"):
        fill()
    assert (small_disk / "metrics.jsonl").read_text().endswith("}\n")
    ballast.unlink()
    kept = folder.rewind(10)
    folder.append_metrics({"step": 11})
    assert [record["step"] for record in [*kept, *folder.rewind(99)[-1:]]] == [*range(11), 11]
    folder.close()


def test_a_disk_that_refuses_a_metric_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    folder = RunFolder(tmp_path, may_continue=True)
    with pytest.warns(RuntimeWarning, match="lost: No space left"):
        folder.append_metrics({"epoch": 1})
    folder.close()
