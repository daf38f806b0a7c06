"""Statistics in place of a graph: they round-trip, rows between more parts than were measured are foreseen, alike parts
give the forecasts of parts that are there, and a thousand ranks cost no more looks than one.
"""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhop import planner
from polyhop.cluster_planner import plan_cluster, question_of_cluster, scale_cluster, with_law
from polyhop.datasets import load
from polyhop.datasets.synth import generate
from polyhop.errors import ConfigError
from polyhop.forecast import (
    GraphStatistics,
    Inputs,
    Measured,
    Seen,
    Training,
    alike_sight,
    labelled,
    look_at,
    predictions,
    read_statistics,
    write_statistics,
)
from polyhop.forecast.alike import totals_of
from polyhop.forecast.survey import degree_cells, measured, survey
from polyhop.graph import Graph
from polyhop.nn import GAT, GraphSAGE
from polyhop.partition import Partition, partition
from polyhop.plan import Cluster, Law, Limits, Link, Machine, Prediction, save_machine
from polyhop.plan.device import machine_of_device
from polyhop.plan.machine import host_name
from polyhop.planner import ANY_MODEL, PlanOptions, plan_graph, training_of
from polyhop.strategies import halo_cost, split_choice
from polyhop.strategies.pipeline_schedule import Layout
from polyhop.train.config import Config

LAW = Law(2e-11, 2e-11, 1.5e-11, 5e-10, 1e-4, 16e6)
DRAWN = {"num_neighbors": [10, 5], "batch_size": 256}
HOST = Machine(
    "mine", 4, 64e9, 3.2e7, 1e10, 2e10, 1.4e-7, 3e-9, 1e-4, 3e-10, 1e-10, 5e8, 1e9, 3.0, Link(1e9, 1e-4),
    {ANY_MODEL: LAW},
)  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Graph:
    return generate("sbm:?nodes=3000&classes=6&p_in=0.03&p_out=0.001&features=24&seed=3")


@pytest.fixture(scope="module")
def parts(graph: Graph) -> dict[int, Partition]:
    return {each: partition(graph, each, "ldg") for each in (1, 2, 4, 8)}


def model() -> GraphSAGE:
    return GraphSAGE(24, 32, 2, out_channels=6)


def training(graph: Graph, given: dict[str, Any]) -> Training:
    return training_of(model(), graph, Config(**given), Inputs(24), labelled(graph).numel())


def plain(**more: Any) -> GraphStatistics:
    given: dict[str, Any] = {"num_train": 200_000, "halo": {2: 0.2, 4: 0.5, 8: 0.9}, **more}
    return GraphStatistics(1_000_000, 20_000_000, 64, 10, **given)


def a_cluster(**more: Any) -> Cluster:
    given = {
        "cores": 8,
        "ranks": 8,
        "memory_gb": 64,
        "cpu_tflops": 0.5,
        "cpu_memory_gb_s": 400,
        "network_gbit_s": 100,
    }
    return Cluster.from_json({**given, "hosts": 128, "dollars_per_hour": 1.5, **more})


# ---------------------------------------------------------------- the record


def test_round_trip(graph: Graph, parts: dict[int, Partition], tmp_path: Path) -> None:
    for given in ({}, DRAWN):
        made = survey(graph, Inputs(24), parts, training(graph, given), partitioner="ldg")
        write_statistics(made, tmp_path / "s.json")
        read = read_statistics(tmp_path / "s.json")
        assert read.to_json() == made.to_json()
        assert read.replicas(64) == made.replicas(64)
        assert len(made.seen) == 4


def test_a_file_of_sizes_alone(tmp_path: Path) -> None:
    sizes = {"num_nodes": 1000, "num_edges": 30_000, "num_features": 8, "num_classes": 3, "num_train": 100}
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"version": 1, **sizes}))
    assert read_statistics(file).to_json() == GraphStatistics(**sizes).to_json()
    file.write_text(json.dumps({"version": 1, **sizes, "halo": {"2": 0.25}}))
    assert read_statistics(file).replicas(2) == 0.25


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"num_part": 4}, "unknown field 'num_part'"),
        ({"row_length": -4}, "row_length is -4; expected a number, 0 or more"),
        ({"num_nodes": None}, "num_nodes is None; expected a whole number, 1 or more"),
        ({"halo": {"two": 0.2}}, "is not a file of 'polyhop plan NAME --statistics-out FILE'"),
        ({"seen": [4]}, "is not a file of 'polyhop plan NAME --statistics-out FILE'"),
        ({"version": 7}, "has version 7, this is 1: make it again"),
    ],
)
def test_mistakes_in_files_name_the_file(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    (tmp_path / "s.json").write_text(json.dumps({**plain().to_json(), **more}))
    with pytest.raises(ConfigError) as error:
        read_statistics(tmp_path / "s.json")
    assert told in str(error.value)
    assert str(error.value).count("s.json") == 1


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s.json"
    write_statistics(plain(), file)
    before = file.read_bytes()
    write = Path.write_text

    def half(path: Path, text: str, **named: Any) -> int:
        write(path, text[: len(text) // 2], **named)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(ConfigError, match=r"s\.json cannot be written \(No space left on device\)"):
        write_statistics(plain(num_train=7), file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file], "nothing half-written stays"


def test_a_device_stays_one() -> None:
    write_statistics(plain(), Path(os.devnull))
    assert Path(os.devnull).is_char_device()


def test_sizes_alone_are_enough() -> None:
    made = GraphStatistics(1000, 30_000, 8, 3, 100)
    assert float(made.cells[:, 0].sum()) == pytest.approx(1000)
    for side in (1, 2):
        assert float((made.cells[:, 0] * made.cells[:, side]).sum()) == pytest.approx(30_000)
    assert made.spread(16) == 1.0, "as if nodes lay at random"
    assert made.replicas(2) < 1
    assert made.replicas(64) <= 30


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"num_nodes": 0}, "num_nodes is 0; expected a whole number, 1 or more"),
        ({"num_train": 2_000_000}, "num_train is 2000000; expected 0 to 1,000,000, the nodes"),
        ({"exponent": 0.5}, "exponent is 0.5; expected more than 1"),
        ({"halo": {4: 3.5}}, "halo of 4 parts is 3.5; expected 2 parts or more and 0 to 3 rows a node"),
        ({"halo": {1: 0.0}}, "halo of 1 parts is 0.0"),
        ({"num_nodes": "many"}, "num_nodes is 'many'; expected a whole number, 1 or more"),
        ({"num_classes": 2.5}, "num_classes is 2.5; expected a whole number, 1 or more"),
        ({"halo": {2: Measured(0.2, "half")}}, "cut of 2 parts is 'half'; expected a number, 0 to 1"),
        ({"halo": {2: Measured(0.2, 0.3, math.nan)}}, "sums of 2 parts is nan; expected a number, 0 or more"),
        ({"halo": {2: "few"}}, "halo of 2 parts is 'few'; expected a number, 0 or more"),
        ({"degrees": [[0, 0, 0]]}, "degrees have no nodes or no edges; expected both, or no degrees"),
        ({"degrees": [[1, "x", 2]]}, "degrees have 'x'; expected a number, 0 or more"),
        ({"degrees": [[1, 2]]}, "degrees have [1, 2]; expected [nodes, in-degree, out-degree]"),
        ({"row_dtype": "floaty"}, "row_dtype is 'floaty'; expected a dtype of torch, such as float32"),
        ({"row_dtype": "nn"}, "row_dtype is 'nn'; expected a dtype of torch, such as float32"),
        ({"row_dtype": 4}, "row_dtype is 4; expected a dtype of torch, such as float32"),
        ({"row_length": -4}, "row_length is -4; expected a number, 0 or more"),
        ({"seen": [Seen("full graph", 0, {})]}, "num_parts of seen is 0; expected a whole number, 1 or more"),
        (
            {"seen": [Seen("full graph", 2, {"rows 0": "x"})]},
            "rows 0 of seen is 'x'; expected a number, 0 or more",
        ),
        ({"is_computed": "no"}, "is_computed is 'no'; expected true or false"),
    ],
)
def test_mistakes_are_told(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        replace(plain(), **more)
    assert told in str(error.value)


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1}', '{"version": 7}', "[1]"])
def test_no_statistics(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError, match=r"s\.json"):
        read_statistics(tmp_path / "s.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_statistics(plain(), tmp_path / "none" / "s.json")


def test_cells_keep_nodes_and_edges(graph: Graph) -> None:
    cells = torch.tensor(degree_cells(graph))
    assert float(cells[:, 0].sum()) == graph.num_nodes
    assert float((cells[:, 0] * cells[:, 2]).sum()) == pytest.approx(graph.num_edges)


# ---------------------------------------------------------------- rows between parts


def test_measured_is_kept_and_random_parts_are_foreseen(graph: Graph) -> None:
    found = {each: measured(graph, partition(graph, each, "hash")) for each in (2, 4, 8, 16, 32)}
    some = {each: found[each] for each in (2, 4, 8)}
    made = GraphStatistics(
        graph.num_nodes, graph.num_edges, 24, 6, 10, degrees=degree_cells(graph), halo=some
    )
    for each in some:
        assert made.replicas(each) == found[each].replicas
    for each in (16, 32):
        assert made.replicas(each) == pytest.approx(found[each].replicas, rel=0.02)
        assert made.cut(each) == pytest.approx(found[each].cut, rel=0.02)


def check_extrapolation(graph: Graph, method: str) -> None:
    found = {each: measured(graph, partition(graph, each, method)) for each in (2, 4, 8, 16, 32)}
    made = GraphStatistics(
        graph.num_nodes, graph.num_edges, 24, 6, 10, degrees=degree_cells(graph),
        halo={each: found[each] for each in (2, 4, 8, 16)},
    )  # fmt: skip
    assert made.replicas(32) == pytest.approx(found[32].replicas, rel=0.15)


def test_more_parts_than_were_measured() -> None:
    check_extrapolation(generate("synth:products?scale=0.01"), "fennel")


def test_more_parts_than_were_measured_of_a_real_graph() -> None:
    check_extrapolation(load("debian-packages", features="none"), "metis")


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["coauthor-physics", "amazon-computers"])
def test_more_parts_than_were_measured_of_others(data_dir: Path, name: str) -> None:
    check_extrapolation(load(name, data_dir=data_dir, features="none"), "metis")


def test_rows_grow_with_parts_and_never_beyond_random() -> None:
    made, free = plain(), plain(halo={})
    rows = [made.replicas(1 << power) for power in range(12)]
    assert rows == sorted(rows)
    assert all(made.replicas(1 << power) <= free.replicas(1 << power) + 1e-9 for power in range(1, 12))
    assert made.cut(1) == 0.0
    assert replace(made, halo={4: Measured(0.5, 0.2)}).cut(4) == pytest.approx(0.2)


# ---------------------------------------------------------------- parts that are alike


@pytest.mark.parametrize("given", [{}, DRAWN], ids=["full graph", "mini-batches"])
def test_totals_are_those_that_were_seen(
    graph: Graph, parts: dict[int, Partition], given: dict[str, Any]
) -> None:
    asked = training(graph, given)
    made = survey(graph, Inputs(24), parts, asked)
    for each in (2, 4, 8):
        real, alike = totals_of(look_at(graph, parts[each], asked)), totals_of(alike_sight(made, asked, each))
        for name, value in real.items():
            if name != "busiest":
                assert alike[name] == pytest.approx(value, rel=1e-6, abs=1e-6), (each, name)


def test_totals_of_parts_that_nobody_looked_at(graph: Graph, parts: dict[int, Partition]) -> None:
    """Seen with 1, 2 and 4 parts, asked of 8."""
    asked = training(graph, DRAWN)
    made = survey(graph, Inputs(24), {each: parts[each] for each in (1, 2, 4)}, asked)
    real, alike = totals_of(look_at(graph, parts[8], asked)), totals_of(alike_sight(made, asked, 8))
    for name in ("own 2", "shared 2", "own edges 1", "shared edges 1"):
        assert alike[name] == pytest.approx(real[name], rel=0.15), name


@pytest.mark.parametrize("given", [{}, DRAWN], ids=["full graph", "mini-batches"])
def test_one_host_with_this_hosts_figures_gives_the_plain_plan(
    graph: Graph, parts: dict[int, Partition], given: dict[str, Any], tmp_path: Path
) -> None:
    """Parts of one graph differ; the slowest sets the pace of a plan of parts that are there, and the mean part, whose links
    are the busiest's, that of parts that are alike. Here their edges differ by a seventh.
    """
    save_machine(HOST, tmp_path / "mine.json")
    config = Config(strategy="auto", **given)
    plain_plan = plan_graph(
        model(), graph, config, parts[4], PlanOptions(machine=HOST, link=HOST.link), inputs=Inputs(24)
    )
    made = survey(graph, Inputs(24), parts, training(graph, given))
    cluster = Cluster.from_json({"machine": str(tmp_path / "mine.json"), "ranks": 4})
    plan = plan_cluster(model(), made, config, cluster, 4, PlanOptions())
    there = {each.prediction.name: each.prediction for each in plain_plan.ranked}
    alike = {each.prediction.name: each.prediction for each in plan.ranked}
    assert set(there) == set(alike)
    for name, one in there.items():
        assert alike[name].epoch_s == pytest.approx(one.epoch_s, rel=0.2), name
        assert alike[name].memory.most == pytest.approx(one.memory.most, rel=0.1), name


@pytest.mark.parametrize("stored", ["mine.json", "here"])
def test_a_model_is_timed_once_for_a_plan_and_its_curves(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a plan says where: the figures may be of another host."""
    monkeypatch.setenv("POLYHOP_CACHE", str(tmp_path))
    host = replace(HOST, laws={})
    save_machine(host)
    save_machine(host, tmp_path / "mine.json")
    timed: list[str] = []

    def time_it(model: Any, *given: Any, **named: Any) -> Law:
        timed.append(type(model).__name__)
        return replace(LAW, host=host_name())

    monkeypatch.setattr(planner, "measured_law", time_it)
    name = stored if stored == "here" else str(tmp_path / stored)
    cluster = Cluster.from_json({"machine": name, "ranks": 4, "hosts": 256})
    net, config = GraphSAGE(64, 64, 2, out_channels=10), Config(strategy="auto")
    options = with_law(net, plain(), config, cluster, PlanOptions())
    made = plan_cluster(net, plain(), config, cluster, 8, options)
    scale_cluster(net, plain(), config, cluster, options, made.chosen, (1, 2, 8))
    assert timed == ["GraphSAGE"]
    assert dict(made.assumed)["computing"] == "as timed on this host"
    curves = scale_cluster(net, plain(), config, cluster, PlanOptions(), made.chosen, (1, 2, 8))
    assert curves
    assert len(timed) == (1 if stored == "here" else 2), "of this host it is kept"


def test_a_law_of_another_host_is_told_to_be(tmp_path: Path) -> None:
    elsewhere = replace(LAW, host="elsewhere")
    save_machine(replace(HOST, laws={ANY_MODEL: elsewhere}), tmp_path / "mine.json")
    cluster = Cluster.from_json({"machine": str(tmp_path / "mine.json"), "ranks": 4})
    config = Config(strategy="auto")
    made = plan_cluster(GraphSAGE(64, 64, 2, 10), plain(), config, cluster, 4, PlanOptions())
    assert dict(made.assumed)["computing"] == "as timed on elsewhere with another model"


# ---------------------------------------------------------------- how forecasts follow the cluster


def times(
    statistics: GraphStatistics, cluster: Cluster, ranks: int, given: dict[str, Any]
) -> dict[str, Prediction]:
    plan = plan_cluster(
        GraphSAGE(64, 64, 2, out_channels=10), statistics, Config(**given), cluster, ranks, PlanOptions()
    )
    return {each.prediction.name: each.prediction for each in plan.ranked}


LARGE = {"num_neighbors": [10, 5], "batch_size": 8192, "strategy": "auto"}
WAYS = [{"strategy": "auto"}, LARGE]


@pytest.mark.parametrize("given", WAYS, ids=["full graph", "mini-batches"])
def test_more_bandwidth_is_never_slower(given: dict[str, Any]) -> None:
    slow = times(plain(), a_cluster(network_gbit_s=10), 32, given)
    fast = times(plain(), a_cluster(network_gbit_s=400), 32, given)
    near = times(plain(), a_cluster(network_gbit_s=10, inside_gb_s=500), 32, given)
    for name in set(slow) & set(fast):
        assert fast[name].epoch_s <= slow[name].epoch_s * (1 + 1e-9), name
        assert near[name].epoch_s <= slow[name].epoch_s * (1 + 1e-9), name
    assert fast["halo" if not given.get("num_neighbors") else "data"].epoch_s < min(
        slow[name].epoch_s for name in ("halo", "data") if name in slow
    )


def test_links_without_end_leave_computing_alone() -> None:
    """And one turn in which hands pass gradients on, which takes no link."""
    free = a_cluster(network_gbit_s=1e9, network_us=0, inside_gb_s=1e9, inside_us=0)
    idle = replace(machine_of_device(free, 32), message_s=0.0, byte_s=0.0)
    question = question_of_cluster(
        GraphSAGE(64, 64, 2, out_channels=10),
        plain(),
        Config(strategy="auto"),
        free,
        32,
        PlanOptions(machine=idle),
    )
    found = [each for each in predictions(question) if each.strategy == "halo" and each.is_exact]
    assert found
    for one in found:
        assert one.parts["wait"] == pytest.approx(question.slowed * question.exchange_s, rel=1e-3), one.name
        assert one.epoch_s == pytest.approx(one.parts["compute"] + one.parts["wait"]), one.name


def test_a_given_link_is_every_link() -> None:
    """Also between stages of a pipeline, and those of one host."""
    given, net = Link(125_000.0, 3e-4), GraphSAGE(64, 64, 2, out_channels=10)
    config, options = Config(strategy="auto"), PlanOptions(link=given)
    question = question_of_cluster(net, plain(), config, a_cluster(ranks=4), 8, options)
    assert question.link == given
    assert question.boundary(Layout(2, 4), 0) == question.inside_stage(Layout(2, 4)) == given
    plan = plan_cluster(net, plain(), config, a_cluster(ranks=4), 8, options)
    for each in plan.ranked:
        one = each.prediction
        if one.strategy != "serverless":  # tasks stay on their hosts
            assert one.sent_bytes / given.bytes_per_s < 2.5 * one.epoch_s, one.name  # both ways at once
    assert dict(plan.assumed)["network"] == "0.001 Gbit/s and 300 us for every rank, as given (--link)"


@pytest.mark.parametrize(
    ("given", "computed"),
    [(WAYS[0], False), (LARGE, False), (LARGE, True)],
    ids=["full graph", "mini-batches", "computed rows"],
)
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_gpus_have_the_margin_and_the_items_of_other_plans(
    num_ranks: int, given: dict[str, Any], *, computed: bool
) -> None:
    cluster = Cluster.from_json({"extends": "p4d.24xlarge"})
    made = plain(is_computed=computed)
    config, net = Config(**given), GraphSAGE(64, 64, 2, out_channels=10)
    plan = plan_cluster(net, made, config, cluster, num_ranks, PlanOptions())
    process = machine_of_device(cluster, num_ranks).process_bytes
    for each in plan.ranked:
        memory, name = each.prediction.memory, each.prediction.name
        assert sum(memory.items.values()) == pytest.approx(memory.training), name
        assert min(memory.items.values()) >= 0, name
        assert memory.needed - memory.most == pytest.approx(0.4 * (memory.most - process)), name
        assert memory.host == (0 if computed or "batch_size" not in given else 256e6 / num_ranks), name
    most = plan.chosen.memory.most
    tight = plan_cluster(net, made, config, cluster, num_ranks, PlanOptions(Limits(memory_bytes=1.05 * most)))
    name = plan.chosen.name
    again = next(each for each in tight.ranked if each.prediction.name == name)
    assert not again.fits, "the margin is asked for"


def test_dollars_are_those_of_whole_hosts() -> None:
    found = times(plain(), a_cluster(), 12, {"strategy": "auto"})
    one = found["halo"]
    assert one.dollars == pytest.approx(2 * 1.5 * one.epoch_s / 3600)
    assert times(plain(), a_cluster(dollars_per_hour=None), 12, {"strategy": "auto"})["halo"].dollars is None


@pytest.mark.parametrize("given", WAYS, ids=["full graph", "mini-batches"])
def test_speed_ups_are_not_more_than_linear(given: dict[str, Any]) -> None:
    """Where no part fits a cache that the whole does not, every rank has memory bandwidth of its own, all nodes train, and
    nothing is summed once that one process sums every epoch (attention is not).
    """
    graph, net = plain(num_train=1_000_000), GAT(64, 16, 2, out_channels=10, heads=4)
    cluster, config = a_cluster(cpu_cache_mb=1e-6), Config(**given)
    chosen = plan_cluster(net, graph, config, cluster, 8, PlanOptions()).chosen
    curves = scale_cluster(net, graph, config, cluster, PlanOptions(), chosen, (1, 2, 8, 64, 512))
    assert sum(curve.is_chosen for curve in curves) == 1
    assert curves[0].is_chosen
    for curve in curves:
        assert curve.points[0].speed_up == 1.0
        for point in curve.points:
            # Windows read a row once that one process reads for every mini-batch.
            assert point.efficiency <= (1.2 if curve.strategy == "macro" else 1.05), (curve.strategy, point)
            assert point.speed_up == pytest.approx(curve.points[0].seconds / point.seconds)


@pytest.mark.parametrize("given", WAYS, ids=["full graph", "mini-batches"])
def test_a_thousand_ranks_are_looked_at_once(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: dict[int, list[int]] = {8: [], 1024: []}
    for ranks, looked in looks.items():
        for module, name in ((split_choice, "work_of"), (halo_cost, "estimate"), (halo_cost, "expected")):
            made = getattr(module, name)

            def seen(*args: Any, made: Any = made, looked: list[int] = looked, **named: Any) -> Any:
                looked.append(int(args[-1]))
                return made(*args, **named)

            monkeypatch.setattr(module, name, seen)
        question = question_of_cluster(
            GraphSAGE(64, 64, 2, out_channels=10), plain(), Config(**given), a_cluster(), ranks, PlanOptions()
        )
        assert list(predictions(question))
        monkeypatch.undo()
    assert set(looks[8]) == set(looks[1024]) == {0}
    assert len(looks[8]) == len(looks[1024]) > 0


def test_limits_of_a_cluster_get_the_nearest_plan_and_what_would_have_to_change() -> None:
    small = a_cluster(memory_gb=8)
    for limits, told in (
        (Limits(), "devices of"),
        (Limits(dollars=1e-6, num_epochs=10), "give --budget"),
        (Limits(seconds=1e-6, num_epochs=10), "fewer epochs"),
    ):
        cluster = small if limits == Limits() else a_cluster()
        plan = plan_cluster(
            GraphSAGE(64, 64, 2, out_channels=10), plain(), Config(strategy="auto"), cluster, 8,
            PlanOptions(limits),
        )  # fmt: skip
        assert not plan.fits
        assert any(told in line for line in plan.advice), plan.advice


def test_assumptions_come_first_and_say_what_was_measured() -> None:
    plan = plan_cluster(
        GraphSAGE(64, 64, 2, out_channels=10),
        plain(),
        Config(strategy="auto"),
        a_cluster(),
        64,
        PlanOptions(),
    )
    told = dict(plan.assumed)
    assert next(iter(plan.assumed))[0] == "cluster"
    assert "8 of 128" in told["cluster"]
    assert "2, 4, 8 parts" in told["parts of it"]
    assert "$1.5 an hour" in told["prices"]
    assert told["start"].startswith("parts: from a folder (--parts); ")
    assert len(told) == len(plan.assumed), "everything has a name of its own"
    net, config = GraphSAGE(64, 64, 2, out_channels=10), Config(strategy="auto")
    alone = plan_cluster(net, plain(), config, a_cluster(), 1, PlanOptions())
    assert "start" not in dict(alone.assumed)
