"""Bench ``macro``: its graphs follow the recipe, its brute force counts what it says, jobs survive the way to the ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.macro import drawn  # noqa: E402
from benchmarks.macro.graphs import SHAPES, make  # noqa: E402
from benchmarks.macro.workload import Job, Side  # noqa: E402


@pytest.mark.parametrize(("name", "num_parts"), [("A", 4), ("C", 4), ("D", 8)])
def test_graphs_follow_the_recipe(name: str, num_parts: int) -> None:
    shape = replace(SHAPES[name], log_nodes=15, batch=4, train=0.125)
    fixed = make(shape, 3)
    graph, owner = fixed.graph, fixed.partition.owner
    graph.check()
    rows = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degree.long())
    code, back = rows * graph.num_nodes + graph.indices, graph.indices.long() * graph.num_nodes + rows
    assert torch.equal(code, torch.unique(back))  # sorted, both directions, none twice
    assert not (rows == graph.indices).any()
    assert fixed.partition.num_parts == num_parts
    assert graph.split is not None
    each = torch.bincount(owner[graph.split.train], minlength=num_parts)
    assert each.tolist() == [fixed.num_steps * shape.batch] * num_parts
    assert graph.in_degree[graph.split.train].min() > 0
    again = make(shape, 3)
    assert torch.equal(again.graph.indices, graph.indices)
    assert torch.equal(again.graph.split.train, graph.split.train)


def test_windows_are_unions() -> None:
    steps = [np.array(ids) for ids in ([3, 1], [1, 2], [7])]
    assert [ids.tolist() for ids in drawn.windows(steps, 2)] == [[1, 2, 3], [7]]
    assert [ids.tolist() for ids in drawn.windows(steps, 8)] == [[1, 2, 3, 7]]


def test_what_a_pool_fetches() -> None:
    """Four slots: rows of the window before stay; then the least recent one goes first."""
    steps = [np.array(ids) for ids in ([0, 1], [1, 2], [3, 4], [1, 0])]
    assert [ids.tolist() for ids in drawn.fetched([steps], 1, 9, None)[0]] == [[0, 1], [1, 2], [3, 4], [0, 1]]
    assert [ids.tolist() for ids in drawn.fetched([steps], 1, 9, 4)[0]] == [[0, 1], [2], [3, 4], [0]]
    with pytest.raises(AssertionError, match="two windows must fit"):
        drawn.fetched([[np.arange(3), np.arange(3, 6)]], 1, 9, 4)


def test_jobs_go_to_ranks_and_back() -> None:
    job = Job(
        "parts", "answers", 8, (3, 2), {"a": Side(4, delta=True, room=9, epochs=(0, 1)), "b": Side(rpc=True)}
    )
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


@pytest.mark.slow
def test_the_quick_run_counts_every_row(tmp_path: Path) -> None:
    """Four ranks, ten sides: rows as brute force counts them, messages as the formula says."""
    answer = tmp_path / "macro.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "macro",
        "--quick",
        "--only",
        "rows",
        "--json",
        str(answer),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(answer.read_text())
    assert found["rows_vs_brute_force"] == found["messages_vs_formula"] == 1
    assert found["rows_ratio_k8"] > 1.5
    assert found["rows_predicted_over_measured"] < 1.2
