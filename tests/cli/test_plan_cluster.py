"""``polyhop plan --cluster``: from a graph or its statistics, a ranked table, curves and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

CLUSTER = "extends: c7i.8xlarge\nhosts: 2\nranks: 2\n"


@pytest.fixture(autouse=True)
def _files(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_DATA", raising=False)
    Path("c.yaml").write_text(CLUSTER)


def test_all_of_it(polyhop, tiny_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    given = ["plan", "tiny", "--data-dir", tiny_dir, "--cluster", "c.yaml", "--hidden", 8]
    shown = polyhop(*given, "--fanout", "3,3", "--statistics-out", "s.json", "--curve", "curve.svg")
    assert shown.code == 0, shown.err
    order = [
        "assumed",
        "cluster",
        "2 of 2 c7i.8xlarge, 4 ranks",
        "an epoch",
        "dollars",
        "(chosen)",
        "1,024",
        "picture",
    ]
    places = [shown.out.index(part) for part in order]
    assert places == sorted(places)
    assert Path("curve.svg").read_text().count("<svg") == 1
    again = polyhop(
        "plan", "--statistics", "s.json", "--cluster", "c.yaml", "--hidden", 8, "--fanout", "3,3", "--json"
    )
    assert again.code == 0, again.err
    assert again.json["workers"] == 4
    assert again.json["chosen"]["dollars"] > 0
    for curve in again.json["curves"]:
        assert [point["num_ranks"] for point in curve["points"]] == [1 << power for power in range(11)]


def test_fewer_ranks_than_there_are(polyhop, tiny_dir: Path) -> None:
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--cluster", "c.yaml", "--workers", 2, "--json")
    assert shown.code == 0, shown.err
    assert shown.json["workers"] == 2
    assert "1 of 2 c7i.8xlarge" in dict(shown.json["assumed"])["cluster"]


def test_statistics_alone(polyhop, tiny_dir: Path) -> None:
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--statistics-out", "s.json")
    assert shown.code == 0, shown.err
    assert shown.out == ""
    assert Path("s.json").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "a plan needs a graph: give its name, or --statistics FILE"),
        (
            ["tiny", "--statistics", "s.json", "--cluster", "c.yaml"],
            "both say what the graph is: leave one out",
        ),
        (["--statistics", "s.json"], "--statistics is for clusters: add --cluster"),
        (
            ["--statistics", "s.json", "--cluster", "c.yaml", "--statistics-out", "t.json"],
            "--statistics-out: s.json has them already",
        ),
        (
            ["tiny", "--statistics-out", "none/s.json"],
            "--statistics-out none/s.json: cannot be written: there is no",
        ),
        (["tiny", "--cluster", "c.yaml", "--curve", "none/c.svg"], "--curve none/c.svg: cannot be written"),
        (
            ["paper:amazon"],
            "paper:amazon has sizes alone, for functions of a cloud: add --strategy serverless",
        ),
        (["tiny", "--curve", "c.svg"], "--curve is for clusters: add --cluster"),
        (["tiny", "--cluster", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (
            ["tiny", "--cluster", "c.yaml", "--workers", "5"],
            "the cluster has 4 ranks, 2 on each of its 2 hosts",
        ),
        (["tiny", "--cluster", "c.yaml", "--curve", "c.gif"], "expected a name that ends in .svg or .png"),
        (
            ["--statistics", "none.json", "--cluster", "c.yaml"],
            "none.json is not a file of 'polyhop plan NAME",
        ),
    ],
)
def test_refused(polyhop, tiny_dir: Path, more: list[str], told: str) -> None:
    shown = polyhop("plan", *more, "--data-dir", tiny_dir)
    assert shown.code == 1
    assert told in shown.err
