"""The report says what is normal, and marks what is not."""

from __future__ import annotations

import torch

from polyhop.partition.quality import Quality, quality_of_counts


def _rows(**changed: float) -> dict[str, str]:
    usual = {
        "cut": 0.2,
        "node_balance": 1.05,
        "edge_balance": 1.8,
        "train_balance": 1.02,
        "halo": 0.7,
        "replication": 1.7,
        "chance_cut": 0.875,
    }
    return dict(Quality(**{**usual, **changed}).rows())


def test_says_what_is_usual_and_marks_nothing() -> None:
    rows = _rows()
    assert "20.0 % of edges (at random: 87.5 %; usual" in rows["cut"]
    assert "nodes 1.05, edges 1.80, train nodes 1.02 (" in rows["balance"]
    assert "replication 1.70 (usual" in rows["halo"]
    assert "HIGH" not in "".join(rows.values())


def test_marks_what_is_not() -> None:
    assert "HIGH: no better than chance" in _rows(cut=0.87)["cut"]
    assert "nodes 1.30 HIGH, edges 1.80, train" in _rows(node_balance=1.3)["balance"]
    assert "edges 2.50 HIGH, train" in _rows(edge_balance=2.5)["balance"]
    assert "train nodes 1.30 HIGH (" in _rows(train_balance=1.3)["balance"]


def test_one_part_and_nothing_at_all() -> None:
    for nodes in (5, 0):
        found = quality_of_counts(torch.tensor([nodes]), torch.tensor([0]), None, num_cut=0, num_halo=0)
        assert (found.cut, found.node_balance, found.train_balance) == (0.0, 1.0, 1.0)
        assert "HIGH" not in dict(found.rows())["cut"]
