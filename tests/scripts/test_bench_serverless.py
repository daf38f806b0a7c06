"""Bench ``serverless``: what its sections make of what they measured."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.__main__ import BENCHES  # noqa: E402
from benchmarks.serverless import convergence, emulated, overlap, rival, savings, value  # noqa: E402
from benchmarks.serverless.published import TABLE_4  # noqa: E402
from benchmarks.serverless.running import Spent  # noqa: E402

from polyhop.serverless.cluster import Cluster, tasks_of  # noqa: E402
from polyhop.serverless.prices import load_prices  # noqa: E402
from polyhop.serverless.rates import PUBLISHED  # noqa: E402
from polyhop.serverless.shapes import PAPER  # noqa: E402


def test_sections_are_listed() -> None:
    assert {"overlap", "convergence", "savings", "scale", "value"} <= set(BENCHES["serverless"])


def test_an_epoch_is_held_against_the_longer_half_and_against_the_sum() -> None:
    def epochs(seconds: float, graph_s: float, tensor_s: float) -> overlap.Epochs:
        return overlap.Epochs((Spent(seconds, graph_s, tensor_s, 80, 10**9),), {0: 5}, 0.0)

    found = {
        "staleness 0": epochs(4.4, 4.0, 3.0),
        "pipe": epochs(5.0, 2.0, 4.0),
        "one at a time": epochs(11.5, 3.5, 2.5),
    }
    made = {each.name: each for each in overlap.figures(found)}
    assert made["epoch_vs_max_phase"].value == pytest.approx(1.1)
    assert made["epoch_vs_max_phase"].is_met
    assert made["pipe_epoch_vs_max_phase"].value == pytest.approx(1.25)
    assert made["unpipelined_vs_sum"].value == pytest.approx(11.5 / (6.0 + 80 * overlap.LATENCY_S))
    assert made["epoch_vs_max_alone"].value == pytest.approx(4.4 / 3.5)


def test_savings_that_are_a_byte_off_are_a_miss() -> None:
    nodes, hidden, classes = 100, 16, 5
    ways = {way: 10**6 + savings.by_hand(way, nodes, hidden, classes) for way in savings.WAYS}
    ran = {way: (size, size) for way, size in ways.items()}
    assert [each.is_met for each in savings.figures(ran, nodes, hidden, classes, "")] == [True, True, True]
    ran[False, True] = (ways[False, True] + 1, ways[False, True])
    counted, formula, _ = savings.figures(ran, nodes, hidden, classes, "")
    assert (counted.value, formula.value) == (1, 1)
    assert not counted.is_met


def test_epochs_to_a_target_count_from_one_and_may_never_come() -> None:
    assert convergence.epochs_to([10.0, 20.0, 30.0], 20.0) == 2
    assert convergence.epochs_to([10.0], 20.0) == math.inf


def test_of_two_graphs_the_worse_counts_and_of_seeds_the_median() -> None:
    def curve(reaches: int, test: float) -> convergence.Curve:
        return convergence.Curve((*[0.0] * (reaches - 1), 90.0), (test,), {0: 3, 1: 1})

    def seed(ratio: float, drop: float) -> dict[convergence.Variant | None, convergence.Curve]:
        stale = curve(round(10 * ratio), 80.0 - drop)
        return {None: curve(10, 80.0), **dict.fromkeys(convergence.VARIANTS, stale)}

    found = {
        "a": {0: seed(1.0, 0.1), 1: seed(1.1, 0.1), 2: seed(9.0, 0.1)},
        "b": {0: seed(1.3, 0.0), 1: seed(1.2, 0.6), 2: seed(1.0, 0.9)},
    }
    made = {each.name: each for each in convergence.figures(found)}
    assert made["epochs_ratio_s0"].value == pytest.approx(1.2)
    assert not made["epochs_ratio_s0"].is_met
    assert made["epochs_ratio_s1"].is_met
    assert made["accuracy_drop_s0"].value == pytest.approx(0.5)
    assert "0: 75.0 %, 1: 25.0 %" in made["epochs_ratio_s0"].details


def test_what_binds_follows_the_rates() -> None:
    prices = load_prices()
    cluster = Cluster(prices.server("c5n.2xlarge"), 8)
    tasks = tasks_of(PAPER["amazon"], cluster, PUBLISHED)
    found, twice, few = (emulated.loads(tasks, cluster, PUBLISHED, n) for n in (90, 180, 5))
    assert max(found, key=found.__getitem__) == "graph operations"
    assert max(few, key=few.__getitem__) == "products of functions"
    assert emulated.longest(few).startswith("products of functions bind")
    assert twice["products of functions"] == pytest.approx(found["products of functions"] / 2)
    assert twice["bytes of a post"] == found["bytes of a post"]
    needed = emulated.servers_needed(found, 8, "bytes of a post")
    assert 1 < needed == math.ceil(8 * found["bytes of a post"] / found["products of functions"])


def test_rows_of_the_paper_have_shapes_clusters_and_modes() -> None:
    prices = load_prices()
    for row in TABLE_4:
        assert value.shape_of(row).model == row.model.lower()
        assert value.cluster_of(row, prices).num_servers == row.cpu.count
    assert [value.mode_of(row) for row in TABLE_4].count("pipe") == 1
    assert value.figure10(prices).is_met


def test_the_race_ends_when_the_target_is_reached() -> None:
    history = [{"epoch": at + 1, "seconds": 2.0 * (at + 1), "val": 0.1 * at} for at in range(5)]
    reached, never = rival.finish(history, 0.3, 1), rival.finish(history, 0.9, 0)
    assert (reached.seconds, reached.epochs, never.seconds) == (8.0, 4, None)
    prices = load_prices()
    assert reached.dollars(prices) == pytest.approx(
        8.0 * (0.17 / 3600 + 2 * 1769 / 1024 * 1.66667e-5), rel=1e-3
    )
    found = {"serverless pipe": reached, "serverless 0": never, "macro": rival.finish(history, 0.2, 0)}
    speed, dollars = rival.figures(found, 0.3, "g", prices)
    assert speed.value == pytest.approx(6 / 8)
    assert 0 < dollars.value < speed.value
