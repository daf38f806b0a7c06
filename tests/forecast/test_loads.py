"""Input rows that cross to GPUs: every row once, less what is kept there; the likeliest are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyhop.cluster_planner import question_of_cluster
from polyhop.forecast import GraphStatistics, Question
from polyhop.forecast.batches import of_variant
from polyhop.forecast.loads import Kept, crossing, drawn, of_peers, served
from polyhop.nn import GraphSAGE
from polyhop.plan import Cluster
from polyhop.planner import PlanOptions
from polyhop.strategies.work import Variant
from polyhop.train.config import Config

STATISTICS = GraphStatistics(1_000_000, 20_000_000, 128, 40, 100_000)
ROW = 4.0 * 128


def asked() -> Question:
    cluster = Cluster.from_json({"extends": "p3.8xlarge"})
    config = Config("auto", num_neighbors=[10, 10], batch_size=1024)
    return question_of_cluster(GraphSAGE(128, 64, 2, 40), STATISTICS, config, cluster, 4, PlanOptions())


def crossed(strategy: str, kept: Kept) -> float:
    sight = asked().sight
    assert sight.flows is not None
    assert sight.inputs is not None
    return crossing(sight.flows, sight.inputs, Variant(strategy, 2), kept, ROW)


def test_without_room_every_row_crosses_once() -> None:
    flows = asked().sight.flows
    assert flows is not None
    rows = float(flows.own[-1].rows[0].sum())
    assert crossed("data", Kept()) == pytest.approx(rows * ROW)
    assert crossed("pushpull", Kept()) == pytest.approx(rows * ROW)  # of four times as many rows a quarter
    assert crossed("split", Kept()) == pytest.approx(float(flows.shared[-1, 0]) * ROW)
    assert crossed("split", Kept()) < crossed("data", Kept())


def asked_of_peers(strategy: str, kept: Kept) -> float:
    sight = asked().sight
    assert sight.flows is not None
    assert sight.inputs is not None
    return of_peers(sight.flows, sight.inputs, Variant(strategy, 2), kept, ROW)


def test_peers_serve_their_share_of_what_is_kept() -> None:
    """Four ranks that keep everything between them: three quarters of what a rank reads lie with others."""
    quarter = STATISTICS.num_nodes / 4 * ROW
    every_row = crossed("data", Kept())
    assert asked_of_peers("data", Kept(quarter, is_shared=True)) == pytest.approx(0.75 * every_row)
    half_kept = Kept(quarter / 2, is_shared=True)
    served_by_all = every_row - crossed("data", half_kept)
    assert asked_of_peers("data", half_kept) == pytest.approx(0.75 * served_by_all)


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        ("data", Kept(STATISTICS.num_nodes / 4 * ROW)),  # each for itself
        ("data", Kept(1.01 * STATISTICS.num_nodes * ROW, is_shared=True)),  # every rank has room for all
        ("split", Kept(STATISTICS.num_nodes / 4 * ROW, is_shared=True)),  # reads rows of its own nodes only
        ("pushpull", Kept(STATISTICS.num_nodes / 4 * ROW, is_shared=True)),
    ],
)
def test_peers_are_not_asked(strategy: str, kept: Kept) -> None:
    assert asked_of_peers(strategy, kept) == 0


def test_what_peers_serve_takes_its_time() -> None:
    question, variant = asked(), Variant("data", 0)
    question = replace(question, training=replace(question.training, prefetch=0))  # nothing hides it
    quarter = STATISTICS.num_nodes / 4 * ROW
    free, fast, slow = (
        of_variant(question, variant, Kept(quarter, is_shared=True, peer_bytes_per_s=rate)).epoch_s
        for rate in (float("inf"), 75e9, 7.5e9)
    )
    assert free < fast < slow
    assert slow - free == pytest.approx(10 * (fast - free))


def test_loading_hides_behind_drawing() -> None:
    question, variant = asked(), Variant("split", 2)
    question = replace(question, machine=replace(question.machine, edge_s=1e-8))
    one_by_one, beside = (of_variant(question, variant, Kept(is_beside=it)) for it in (False, True))
    assert beside.epoch_s < one_by_one.epoch_s
    slow = replace(question, machine=replace(question.machine, edge_s=1e-3))  # drawing hides all of it
    hidden = of_variant(slow, variant, Kept(is_beside=True)).epoch_s
    nothing_crosses = of_variant(slow, variant, Kept(1e15, is_beside=True)).epoch_s
    assert hidden == pytest.approx(nothing_crosses)


def test_what_fits_does_not_cross() -> None:
    quarter = STATISTICS.num_nodes / 4 * ROW
    for strategy, kept in (
        ("split", Kept(quarter)),
        ("pushpull", Kept(quarter)),
        ("data", Kept(quarter, is_shared=True)),
    ):
        assert crossed(strategy, kept) == pytest.approx(0.0, abs=1.0)  # bytes
    assert 0 < crossed("data", Kept(quarter)) < 0.75 * crossed("data", Kept())


def test_the_likeliest_are_kept() -> None:
    likely, nodes = torch.tensor([0.1, 0.5]), torch.tensor([100.0, 10.0])
    assert served(likely, nodes, 10) == pytest.approx(5 / 15)
    assert served(likely, nodes, 20) == pytest.approx(6 / 15)
    assert served(likely, nodes, 1e9) == 1


def test_gpus_that_draw_ask_nobody() -> None:
    flows = asked().sight.flows
    assert flows is not None
    assert drawn(flows, Variant("data")) == pytest.approx(float(flows.own_edges[:, 0].sum()))
    assert drawn(flows, Variant("split", 2)) < drawn(flows, Variant("data"))


def test_the_busiest_part_sets_the_pace() -> None:
    question, variant = asked(), Variant("split", 2)
    even, uneven = (of_variant(question, variant, Kept(), times) for times in (1.0, 1.5))
    assert even.epoch_s < uneven.epoch_s < 1.5 * even.epoch_s  # calls and rounds are as many
