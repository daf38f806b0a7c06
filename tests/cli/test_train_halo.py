"""``polyhop train --strategy halo``: it trains and reports, is predicted from, and says what is wrong with its options."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def halo(small: list[str]) -> list[str]:
    """Arguments of a run on two ranks that takes a moment."""
    return ["train", *small, "--run-dir", "run", "--workers", "2", "--strategy", "halo"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--bits", "3", r"unknown bits '3'"),
        ("--bits", "adaptiv", r"unknown bits 'adaptiv'.*adaptive"),
        ("--bits-lambda", "1.5", r"bits_lambda=1\.5: expected a number in 0 \.\. 1"),
        ("--bits-lambda", "-0.1", r"bits_lambda=-0\.1: expected a number in 0 \.\. 1"),
        ("--bits-lambda", "nan", r"bits_lambda=nan: expected a number in 0 \.\. 1"),
        ("--bits-period", "1", r"bits_period=1: expected a whole number of at least 2"),
        ("--halo", "sampeld", r"unknown halo 'sampeld'.*sampled"),
        ("--halo-share", "2", r"halo_share=2\.0: expected a number in 0 \.\. 1"),
    ],
)
def test_options_that_cannot_be(polyhop, halo: list[str], option: str, value: str, message: str) -> None:
    shown = polyhop(*halo, option, value)
    assert shown.code in (1, 2)
    assert "Traceback" not in shown.err
    lines = [line for line in shown.err.splitlines() if "error" in line.lower()]
    assert lines, shown.err
    assert re.search(message, shown.err), shown.err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fanout", "4,3"], "full graph"),
        pytest.param(["--halo", "sampled", "--bits", "adaptive"], "number of bits", marks=pytest.mark.slow),
        (["--halo", "sampled", "--model", "gat"], "GATConv"),
    ],
)
def test_options_that_do_not_go_together(polyhop, halo: list[str], more: list[str], message: str) -> None:
    shown = polyhop(*halo, *more)
    assert shown.code == 1
    told = [line for line in shown.err.splitlines() if line.startswith("polyhop: error: ")]
    assert len(told) == 1, shown.err
    assert message in told[0]


def test_one_process_cannot(polyhop, small: list[str]) -> None:
    shown = polyhop("train", *small, "--strategy", "halo")
    assert shown.code == 1
    assert "--workers" in shown.err


def test_trains_reports_and_predicts(polyhop, halo: list[str], tiny_dir: Path) -> None:
    shown = polyhop(*halo, "--bits", "adaptive", "--bits-period", "2", "--json")
    assert shown.code == 0, shown.err
    assert shown.json["epochs"] == 4
    assert 0 <= shown.json["test"] <= 1
    config = json.loads(Path("run/config.json").read_text())
    assert (config["strategy"], config["bits"], config["bits_period"]) == ("halo", "adaptive", 2)
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 4
    spans = [json.loads(line) for line in Path("run/trace-rank1.jsonl").read_text().splitlines()]
    names = {span.get("name") for span in spans}
    assert {"communicate", "wait", "quantise", "dequantise"} <= names
    predicted = polyhop("predict", "run", "--out", "p.csv", "--json")
    assert predicted.code == 0, predicted.err
    assert predicted.json["scores"]["test"] == pytest.approx(shown.json["test"])
    with Path("p.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 80


def test_says_that_input_rows_cross_once(halo: list[str], tmp_path: Path) -> None:
    """A process of its own: rank 0, which is one, writes what is said."""
    command = [sys.executable, "-m", "polyhop", *(word if word != "none" else "plain" for word in halo)]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert re.search("input rows cross(ed)? once", shown.stderr + shown.stdout), shown.stderr


@pytest.mark.slow
def test_the_same_as_one_process(polyhop, small: list[str], halo: list[str]) -> None:
    """Scores of a run on two ranks are those of one process."""
    alone = polyhop("train", *small, "--run-dir", "alone", "--precision", "64-true", "--json")
    shown = polyhop(*halo, "--precision", "64-true", "--json")
    assert (alone.code, shown.code) == (0, 0), shown.err
    for name in ("test", "best_val", "best_epoch"):
        assert shown.json[name] == pytest.approx(alone.json[name]), name


@pytest.mark.slow
@pytest.mark.realdata
def test_a_real_graph(polyhop, data_dir: Path) -> None:
    given = [
        "--data-dir",
        data_dir,
        "--workers",
        2,
        "--strategy",
        "halo",
        "--bits",
        "adaptive",
        "--epochs",
        3,
    ]
    shown = polyhop(
        "train", "debian-packages", *given, "--hidden", 32, "--run-dir", "run", "--progress", "none"
    )
    assert shown.code == 0, shown.err
    assert "test accuracy" in shown.out
    predicted = polyhop("predict", "run", "--json")
    assert predicted.code == 0, predicted.err
    assert predicted.json["scores"]["test"] > 0.05
