"""``polyhop data``: the description as a table and as JSON, for graphs with and without the usual parts."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_embedded_graph(polyhop) -> None:
    shown = polyhop("data", "debian-packages")
    assert shown.code == 0
    for part in (
        "63,436 (1,818 without edges)",
        "0 to 21,815",
        "0.494",
        "train 37,960",
        "nodes by in-degree",
    ):
        assert part in shown.out
    assert "16384-32767 ▏" in shown.out


def test_json(polyhop, tiny_dir: Path) -> None:
    facts = polyhop("data", "tiny", "--data-dir", tiny_dir, "--json").json
    assert facts["num_nodes"] == 80
    assert sum(facts["in_degree"]["histogram"]) == 80
    assert facts["split"] == {"train": 40, "val": 20, "test": 20}


def test_list_of_names(polyhop, tiny_dir: Path) -> None:
    assert "debian-packages, tiny" in polyhop("data", "--data-dir", tiny_dir).out
    assert polyhop("data", "--json").json["names"] == ["debian-packages"]


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_DATA", raising=False)


def test_bare_edges(polyhop) -> None:
    Path("e.csv").write_text("source,target,weight\n0,1,0.5\n1,2,2\n2,2,1\n")
    shown = polyhop("data", "e.csv")
    assert shown.code == 0, shown.err
    assert "directed, weighted, 1 loops" in shown.out
    assert "homophily" not in shown.out


def test_synthetic(polyhop) -> None:
    shown = polyhop("data", "sbm:?nodes=300&classes=3&p_in=0.05&p_out=0.005", "--json")
    assert shown.code == 0, shown.err
    assert shown.json["num_nodes"] == 300
    assert shown.json["homophily"] > 0.5
