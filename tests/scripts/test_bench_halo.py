"""Bench ``halo``: its graphs are cut as promised, its rate search closes in, its ideals and slopes are what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.halo import codec, convergence, rivals  # noqa: E402
from benchmarks.halo.graphs import cut, make, narrowed  # noqa: E402
from benchmarks.halo.ideal import ideal  # noqa: E402
from benchmarks.halo.launches import Phase  # noqa: E402
from benchmarks.halo.rank import Trial, next_guess  # noqa: E402
from benchmarks.halo.workload import SIDES, Job, model_of  # noqa: E402
from benchmarks.lab.relimit import bucket  # noqa: E402

from polyhop.exchange import widths  # noqa: E402


def test_graphs_repeat_and_are_cut() -> None:
    graph = make("products", scale=1 / 32)
    graph.check()
    again = make("products", scale=1 / 32)
    assert torch.equal(graph.indices, again.indices)
    assert torch.equal(graph.y, again.y)
    assert graph.num_edges == pytest.approx(50 * graph.num_nodes, rel=0.05)
    made = cut("products", graph, 2)
    rows = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degree.long())
    owner = made.partition.owner
    far = {int(v) for v, u in zip(rows, graph.indices, strict=True) if owner[v] != owner[u]}
    assert made.marginal == len(far) / graph.num_nodes
    assert made.halo == made.marginal  # two parts, undirected
    assert narrowed(graph, 8).num_features == 8


@pytest.mark.parametrize("name", ["reddit", "products"])
@pytest.mark.slow
def test_half_of_the_rows_are_central(name: str) -> None:
    assert cut(name, make(name), 4).marginal <= 0.5


def test_jobs_go_to_ranks_and_back() -> None:
    job = Job("parts", "answers", SIDES, "sage", shares=(0.6, 0.8), epochs=3)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_models_start_alike() -> None:
    one, two = (model_of("gcn", 5, 3, 8, norm="layer_norm") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_the_search_closes_in(share: float) -> None:
    """Waiting that a rank cannot hide: what 4 MB take, less what is hidden, and something that no rate changes."""
    trials = [Trial(-4e6, 0.02, 0.2)]
    for _ in range(4):
        per_byte = next_guess(share, trials)
        trials.append(Trial(per_byte, max(0.0, 4e6 * per_byte - 0.05) + 0.02, 0.2))
    assert trials[-1].share == pytest.approx(share, abs=0.03)


def test_buckets_are_those_of_the_lab() -> None:
    assert bucket(1e9) == ["rate", "1000000000bit", "burst", "32000", "limit", "2500000"]
    assert bucket(20e6) == ["rate", "20000000bit", "burst", "12000", "limit", "256000"]


def phase(adaptive: dict[str, float], alone: dict[str, float], seconds: float) -> Phase:
    def one(spans: dict[str, float]) -> dict[str, Any]:
        return {"s": seconds, "cpu_s": 0.0, "spans": spans, "loss": 0.0, "bytes": {"hidden": 1000}}

    return Phase(0.8, 10, 1e4, {"adaptive": [[one(adaptive)]], "adaptive_plain": [[one(alone)]]}, 0.0)


def test_what_an_ideal_epoch_takes() -> None:
    spans = {"quantise/1/forward": 1.0, "dequantise/1/forward": 2.0, "communicate/1/forward": 10.0}
    spans |= {"wait/1/forward": 6.0, "communicate/1/backward": 5.0, "wait/1/backward": 0.0}
    found = ideal(phase(spans, {"wait/1/forward": 8.0, "wait/1/backward": 3.0}, 30.0))
    assert found.rest == 30 - 1 - 2 - 15
    assert found.crossing == max(8, 10 - 6) + max(3, 5 - 0)
    assert found.fraction == pytest.approx((1 + 2 + 12 + 13) / 30)
    assert found.by_bytes == pytest.approx(1 + 2 + 12 + max(0.1, 4 + 5))


def test_slopes() -> None:
    steps = np.arange(1, 301)
    assert convergence.slope(3.0 / steps) == pytest.approx(-1)
    assert convergence.slope(convergence.means([1.0] * 300)) == pytest.approx(0)
    assert convergence.means([4.0, 2.0]).tolist() == [4.0, 3.0]


def test_when_a_target_is_reached() -> None:
    scores = [(2, 0.5, 0.4), (4, 0.8, 0.7), (6, 0.7, 0.7)]
    assert rivals.reached(scores, [1.0] * 6, 0.6) == (4, 4.0, True)
    assert rivals.reached(scores, [1.0] * 6, 0.9) == (6, 6.0, False)


def test_no_choice_is_below_the_bound() -> None:
    pytest.importorskip("scipy")
    random = np.random.default_rng(3)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    channels = [widths.Channel(i, j, random.lognormal(0, 2, 40 + 10 * i), 16) for i, j in pairs]
    more: dict[str, Any] = {"num_ranks": 3, "group_size": 5, "widths": (2, 4, 8), "model": "slowest"}
    bound = codec.lower_bound(channels, 0.5, more)
    _, found = widths.solve(channels, 0.5, **more)
    assert bound is not None
    assert bound <= found.objective * (1 + 1e-6)
    assert found.objective <= 1.1 * bound


def quick(section: str, answer: Path, **more: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "halo",
        "--quick",
        "--only",
        section,
        "--json",
        str(answer),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, float] = json.loads(answer.read_text())
    return found


@pytest.mark.slow
def test_quick_runs_without_a_lab(tmp_path: Path) -> None:
    """Codec, and descent with its picture."""
    found = quick("codec", tmp_path / "codec.json")
    assert found["pack_gb_per_s_4bit"] > 0
    assert found["assigner_vs_exact"] < 0.1
    picture = tmp_path / "descent.png"
    found = quick("convergence", tmp_path / "convergence.json", POLYHOP_HALO_PICTURE=str(picture))
    assert found["convergence_slope_exact"] < 0
    assert found["convergence_slopes_apart"] < 0.05
    pytest.importorskip("matplotlib")
    assert picture.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")
def test_quick_runs_in_the_lab(tmp_path: Path) -> None:
    """The rate is sought, sides take turns, bytes are counted; nothing is asked of the times."""
    found = quick("speed", tmp_path / "speed.json")
    assert found["wire_ratio"] > 4
    assert 0.2 < found["fraction_of_ideal"] < 1.5
    found = quick("rivals", tmp_path / "rivals.json")
    assert found["time_to_target_adaptive_s"] > 0
