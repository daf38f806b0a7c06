"""Benches ``pipeline`` and ``pipeline-accuracy``: choices follow links, phases are simulated, pairs are kept."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.__main__ import BENCHES, WITHOUT_PEERS  # noqa: E402
from benchmarks.halo.graphs import cut  # noqa: E402
from benchmarks.halo.launches import Phase  # noqa: E402
from benchmarks.pipeline import logged, simulated, times, traffic  # noqa: E402
from benchmarks.pipeline.rank import Job  # noqa: E402
from benchmarks.pipeline.workload import NAIVE, OURS, reddit_like  # noqa: E402
from benchmarks.pipeline_accuracy import paired  # noqa: E402

from polyhop.strategies.pipeline_shape import Links  # noqa: E402


def test_both_are_listed() -> None:
    assert {"pipeline", "pipeline-accuracy"} <= set(BENCHES) & WITHOUT_PEERS


def test_the_graph_is_cut_like_reddit() -> None:
    pytest.importorskip("pymetis")
    made = cut("like reddit", reddit_like(traffic.NODES, 16), traffic.NUM_RANKS)
    assert made.graph.num_features == 16
    assert 2.5 < made.halo < 2.75


def test_choices_follow_the_links() -> None:
    """Infinitely fast ones leave nothing for the pipeline to save, crawling ones everything."""
    fast, slow = (Links(rate, rate) for rate in (1e15, 1e6))
    for case in logged.CASES:
        assert simulated.choice_of(case, fast).shapes[0].name == "halo", case
        assert simulated.choice_of(case, slow).shapes[0].name == "pipeline", case
        chosen = simulated.choice_of(case)
        assert (chosen.shapes[0].name == "halo") == (case.graph == "physics"), case
        assert chosen.logged == chosen.best


def test_simulation_of_a_phase() -> None:
    """Two equal stages, no rows: forward 1 s and backward 2 s a chunk, 4 chunks: 3 (4 + 1), and what is outside."""
    tasks = [[way, chunk, took] for way, took in (("forward", 1.0), ("backward", 2.0)) for chunk in range(4)]
    one: dict[str, Any] = {"s": 15.5, "tasks": tasks, "spans": {"wait": 3.0}, "epoch": 3, "bytes": {}}
    phase = Phase(0.0, 0.0, 1e9, {OURS: [[one, one]]}, 0.0)
    found = [{"chunk_rows": [0] * 4, "row_bytes": [400], "bounds": [0, 1, 2]}]
    assert times._simulated(found, phase, phase) == pytest.approx(15.0 + 0.5, abs=0.01)
    full = [{**found[0], "chunk_rows": [1000] * 4}]
    slow = replace(
        phase, bytes_per_s=4e5
    )  # a second a chunk: the first and the last are waited for, the others hidden
    assert times._simulated(full, phase, slow) == pytest.approx(15.0 + 0.5 + 2.0, abs=0.01)


def test_choice_of_a_phase() -> None:
    """12 s of computing by two ranks, twice that in chunks: the pipeline is worth it only where rows take longer."""
    tasks = [[way, chunk, 1.5] for way in ("forward", "backward") for chunk in range(4)]
    ours: dict[str, Any] = {"s": 16.0, "tasks": tasks, "spans": {"wait": 4.0}}
    naive: dict[str, Any] = {"s": 10.0, "tasks": [], "spans": {"wait/1/forward": 4.0}}
    fast = Phase(0.0, 0.0, 1e12, {NAIVE: [[naive, naive]], OURS: [[ours, ours]]}, 0.0)
    found = [{"chunk_rows": [1000] * 4, "row_bytes": [400]}]
    size = times._Size(4000, 0, 32, 100, 1, 1)
    assert times._chosen(found, fast, fast, size, 0.6) == (NAIVE, 1.0)
    slow = replace(fast, bytes_per_s=1e6)
    assert times._chosen(found, fast, slow, size, 0.6) == (OURS, 1.6)


def test_jobs_go_to_ranks_and_back() -> None:
    job = Job("parts", "answers", "gcn", 8, 16, 4, (0.7, 0.5), 3, 2)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_pairs_are_kept(tmp_path: Path) -> None:
    case, scores = paired.CASES[0], {"exact": {"test": [1.0]}, "pipeline": {"test": [0.5]}}
    path = str(tmp_path / "kept.jsonl")
    assert paired.Kept.open(path).get(case, 0) is None
    paired.Kept.open(path).put(case, 0, scores)
    kept = paired.Kept.open(path)
    assert kept.get(case, 0) == scores
    assert kept.get(case, 1) is None
    assert kept.get(replace(case, epochs=7), 0) is None
    assert paired.Kept.open(None).get(case, 0) is None


def test_drops_are_of_the_last_evaluations() -> None:
    exact, ours = [0.0, *[90.0] * 10], [99.0, *[89.0] * 5, *[90.0] * 5]
    pair = {
        "exact": {"test": exact, "val": exact, "s": [1.0]},
        "pipeline": {"test": ours, "val": ours, "s": [1.0]},
    }
    found = {paired.CASES[0]: {0: pair, 1: pair}}
    drop, epochs = paired._all(found)
    assert (drop.name, drop.value) == ("accuracy_drop", 0.5)
    assert drop.is_met
    assert epochs.value == pytest.approx(
        0.5
    )  # the target is 89: at the first evaluation instead of the second
