"""Plans of a graph that nobody stores: made in a moment whatever its size, kept by runs, and right about bytes."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

TERABYTE = "synth:procedural?nodes=1e9&features=256"
SMALL = "synth:procedural?nodes=200000&features=32&train=3000"
GIVEN = ["--workers", 2, "--fanout", "10,5", "--batch-size", 500, "--hidden", 16]


def test_a_terabyte_is_planned_without_being_made(polyhop) -> None:
    tracemalloc.start()
    shown = polyhop("plan", TERABYTE, "--workers", 4, "--fanout", "10,5", "--json", "--out", "plan.json")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shown.code == 0, shown.err
    assert most < 2e8
    assert {each["strategy"] for each in (shown.json["chosen"], *shown.json["others"])} == {"data", "macro"}
    assert "12,000,000,000 edges" in dict(shown.json["assumed"])["graph"]
    assert json.loads(Path("plan.json").read_text())["chosen"]["strategy"] in ("data", "macro")


def test_on_a_cluster(polyhop) -> None:
    shown = polyhop("plan", TERABYTE, "--cluster", "p4d.24xlarge", "--fanout", "10,5")
    assert shown.code == 0, shown.err
    assert "1,000,000,000 nodes" in shown.out
    assert "1,024" in shown.out, "curves"


def test_statistics_are_written_and_read(polyhop) -> None:
    polyhop("plan", SMALL, "--fanout", "10,5", "--statistics-out", "graph.json")
    cluster = ["--cluster", "p4d.24xlarge", "--fanout", "10,5", "--workers", 4, "--json"]
    read, named = polyhop("plan", "--statistics", "graph.json", *cluster), polyhop("plan", SMALL, *cluster)
    assert read.code == named.code == 0, read.err + named.err
    assert read.json["others"] == named.json["others"]


@pytest.mark.parametrize("strategy", ["data", "macro"])
def test_a_run_keeps_its_plan_and_sends_what_was_foreseen(polyhop, strategy: str) -> None:
    told = ["--strategy", strategy, "--epochs", 4, "--run-dir", "run", "--progress", "plain"]
    shown = polyhop("train", SMALL, *GIVEN, *told)
    assert shown.code == 0, shown.err
    report = polyhop("report", "run", "--json").json
    (found,) = report["runs"]
    rows = {row["what"]: row for row in found["prediction"]["rows"]}
    sent = next(row for what, row in rows.items() if what.endswith("features"))
    assert sent["measured"] == pytest.approx(sent["predicted"], rel=0.1)


def test_a_run_picks_its_strategy(polyhop) -> None:
    shown = polyhop("train", SMALL, *GIVEN, "--epochs", 1, "--run-dir", "run", "--progress", "plain")
    assert shown.code == 0, shown.err
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["chosen"]["strategy"] == json.loads(Path("run/config.json").read_text())["strategy"]
    assert plan["chosen"]["strategy"] in ("data", "macro")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "draw mini-batches, one fan-out for each layer"),
        (["--fanout", "10,5", "--partitioner", "metis"], "there are no edges to cut it by"),
        (
            ["--fanout", "10,5", "--cluster", "p4d.24xlarge", "--partitioner", "metis"],
            "there are no edges to cut it by",
        ),
        (["--fanout", "10,5", "--strategy", "split"], "'split' cannot train this model so"),
        (["--fanout", "10,5", "--cache", "1MB"], "leave cache out"),
    ],
)
def test_refused(polyhop, more: list[str], told: str) -> None:
    shown = polyhop("plan", SMALL, "--workers", 2, *more)
    assert shown.code == 1
    assert told in shown.err
