"""Bench ``gpu``, section ``ranks``, on a processor and a tiny graph: bytes, phases and what is foreseen from them hold."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.__main__ import BENCHES  # noqa: E402
from benchmarks.gpu import foreseen, ranks  # noqa: E402
from benchmarks.gpu.foreseen import Device, Foreseer, Measured, cluster_of, played, rates_file  # noqa: E402
from benchmarks.gpu.turns import DeviceTurns  # noqa: E402
from benchmarks.gpu.virtual import SEED, measure  # noqa: E402

from polyhop.comm import Collective, run_in_threads  # noqa: E402
from polyhop.exchange import bucket_sizes  # noqa: E402
from polyhop.graph import Graph  # noqa: E402
from polyhop.partition import Partition, partition  # noqa: E402
from polyhop.plan import Cluster, read_cluster, save_machine  # noqa: E402
from polyhop.plan.device import law_of_device  # noqa: E402
from polyhop.plan.probe import Probe  # noqa: E402
from polyhop.planner import PlanOptions  # noqa: E402
from polyhop.sample import NeighborLoader, NeighbourSampler  # noqa: E402
from polyhop.sample.wire import Wire  # noqa: E402
from polyhop.strategies.split_cost import account, asked  # noqa: E402
from polyhop.train.config import Config  # noqa: E402

TINY = ranks.Size(
    "products?scale=0.0005", 12, 16, (3, 2, 2), 32, 8, 8, (Probe(64, 4), Probe(256, 6), Probe(600, 20)), 3
)
WAYS = {each.name: each for each in ranks.ways(TINY)}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    kept = str(tmp_path_factory.mktemp("graph"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.gettempdir", lambda: kept)
        return ranks.made_graph(TINY)


@pytest.fixture(scope="module")
def parts(graph: Graph) -> dict[int, Partition]:
    return {num: partition(graph, num, ranks.METHOD, seed=0) for num in ranks.FORESEEN}


@pytest.fixture(scope="module")
def seen(graph: Graph, parts: dict[int, Partition]) -> dict[str, Measured]:
    shares = ranks.shares_of(graph, parts[4])
    return {
        name: Measured(way, measure(shares, way, device="cpu", rows_on="cpu")) for name, way in WAYS.items()
    }


@pytest.fixture(scope="module")
def foreseer(graph: Graph, parts: dict[int, Partition]) -> Foreseer:
    return Foreseer(graph, parts, Device("cpu", TINY.probes), TINY.fan_outs, TINY.batch_size)


def test_it_is_listed() -> None:
    assert "ranks" in BENCHES["gpu"]


def test_a_clock_stands_while_its_rank_waits() -> None:
    turns, at_work = DeviceTurns(3, "cpu"), list[int]()

    def work(line: Collective) -> float:
        with turns.taken(line.rank):
            line.barrier()
            began = turns.now(line.rank)
            if line.rank == 0:
                at_work.append(threading.get_ident())
                time.sleep(0.2)
                assert len(at_work) == 1, "somebody else had the turn too"
            line.barrier()
            at_work.append(threading.get_ident())
            return turns.now(line.rank) - began

    slow, *others = run_in_threads(3, work, turns=turns)
    assert slow > 0.2
    assert max(others) < 0.2


@pytest.mark.parametrize("name", WAYS)
def test_phases_are_the_step(seen: dict[str, Measured], name: str) -> None:
    measured = seen[name]
    for one in measured.ranks:
        assert sum(one.phases.values()) == pytest.approx(one.step_s, rel=0.5)
        assert all(value >= 0 for value in one.phases.values())
    began, ended = (
        min(one.wall[0] for one in measured.ranks),
        max(one.wall[1] for one in measured.ranks),
    )
    steps = len(measured.ranks[0].costs)
    assert steps * sum(one.step_s for one in measured.ranks) < 1.5 * (ended - began), "clocks ran at once"
    assert (measured.most("sample") > 0) == (name == "split")
    assert (measured.most("quantise") > 0) == (name == "halo_adaptive")


def test_bytes_of_split_equal_the_account(
    seen: dict[str, Measured], graph: Graph, parts: dict[int, Partition]
) -> None:
    found, wire = seen["split"].ranks, Wire(graph.num_nodes)
    assert graph.split is not None
    sizes = bucket_sizes(list(WAYS["split"].make(graph).parameters()))
    fan_outs, size = list(TINY.fan_outs), TINY.batch_size
    loader = NeighborLoader(graph, fan_outs, graph.split.train, size, seed=SEED)
    sampler = NeighbourSampler(graph, fan_outs, seed=SEED)
    for step, key in enumerate(found[0].keys):
        seeds = loader.order(key.epoch)[key.step * size : (key.step + 1) * size]
        batch = sampler.sample(seeds, key.epoch, key.step)
        crossing = asked(batch, parts[4].new_ids, parts[4].bounds)
        for rank, one in enumerate(found):
            columns, returns = one.columns, [False, True, True]
            expected = account(crossing, columns, wire, sizes, rank, 4, returns=returns)
            assert dict(one.costs[step].bytes) == dict(expected.bytes), (step, rank)


def test_bytes_of_the_full_graph_are_foreseen(seen: dict[str, Measured], foreseer: Foreseer) -> None:
    assert foreseer.rates(seen["halo"]).bytes_off == 1.0
    assert foreseer.rates(seen["halo_adaptive"]).bytes_off == pytest.approx(1, abs=0.25)
    for rank, one in enumerate(seen["pipeline"].ranks):
        staged = one.staged
        assert staged is not None
        boundaries = [at for at in (rank - 1, rank) if 0 <= at < 3]
        rows = sum(staged.chunk_rows)
        assert one.costs[-1].bytes["hidden"] == rows * sum(staged.row_bytes[at] for at in boundaries)


@pytest.mark.parametrize("name", WAYS)
def test_epochs_follow_phases_and_links(
    seen: dict[str, Measured], foreseer: Foreseer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On as many GPUs as were measured, over links that take no time, an epoch is what was measured."""
    measured = seen[name]
    way, like = measured.way, ranks.layers_like(measured.way, TINY)
    rates = foreseer.rates(measured, like)
    for num_ranks in ranks.FORESEEN:
        fast, slow = (foreseer.by_formula(way, rates, num_ranks, link).epoch_s for link in ("nvlink", "pcie"))
        assert 0 < fast <= slow
        assert foreseer.of_devices(way, num_ranks, "pcie").epoch_s > 0
    if way.strategy == "pipeline":
        assert played(measured, "pcie") >= played(measured, "nvlink") >= measured.ranks[0].step_s
    crawling = replace(cluster_of("pcie"), inside_gb_s=1e-4)
    monkeypatch.setattr(foreseen, "cluster_of", lambda link: crawling)
    assert foreseer.by_formula(way, rates, 8, "pcie").epoch_s > 2 * slow
    if way.strategy == "halo":
        took = sum(measured.most(phase) for phase in ("compute", "quantise"))
        assert foreseer.rates(measured).off["compute"] > 0
        monkeypatch.setattr(
            foreseen, "cluster_of", lambda link: replace(crawling, inside_gb_s=1e9, inside_us=0.0)
        )
        assert foreseer.by_formula(way, rates, 4, "nvlink").epoch_s == pytest.approx(took, rel=0.2, abs=2e-3)


def test_what_was_measured_is_what_a_cluster_does(
    seen: dict[str, Measured], foreseer: Foreseer, tmp_path: Path
) -> None:
    from polyhop.cluster_planner import question_of_cluster
    from polyhop.forecast import GraphStatistics

    way = WAYS["halo"]
    training, rates = foreseer.training(way), foreseer.rates(seen["halo"])
    save_machine(rates_file([(training, rates)]), tmp_path / "rates.json")
    (tmp_path / "c.yaml").write_text("extends: p5.48xlarge\nmachine: rates.json\n")
    cluster = read_cluster(tmp_path / "c.yaml")
    plain = Cluster.from_json({"extends": "p5.48xlarge"})
    assert replace(cluster, machine=None, source="") == replace(plain, source="")
    statistics = GraphStatistics(10_000, 100_000, TINY.features, 47, 1000)

    def law_of(one: Cluster) -> object:
        config = Config(strategy="halo")
        return question_of_cluster(training.model, statistics, config, one, 4, PlanOptions()).law

    assert law_of(cluster) == rates.law
    assert law_of(plain) == law_of_device(plain, 4)


def test_all_figures_are_there(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "made_graph", lambda size: graph)
    monkeypatch.setattr(ranks, "ways", lambda size: [WAYS["halo"]])
    monkeypatch.setenv("POLYHOP_GPU_RATES", str(tmp_path / "rates.json"))
    found = {figure.name: figure for figure in ranks.figures(TINY, "cpu")}
    named = [f"foreseen_halo_{num}_{link}_s" for num in (4, 8) for link in ("nvlink", "pcie")]
    assert {"ranks_halo_step_s", "ranks_halo_compute_s", "ranks_halo_sent_bytes", *named} <= set(found)
    assert found["ranks_failed"].value == 0
    assert math.isfinite(found["foreseen_over_plan"].value)
    assert all("foreseen, not run" in found[name].details for name in named)
    assert (tmp_path / "rates.json").exists()
    assert "from device laws" in capsys.readouterr().out
