"""Clusters from files: every preset holds, every mistake is told; devices, links and prices follow from what is written."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from polyhop.errors import ConfigError
from polyhop.nn.counts import Counts
from polyhop.plan import Cluster, Law, Link, Machine, read_cluster, save_machine
from polyhop.plan.cluster import PRESETS, presets
from polyhop.plan.device import law_of_device, machine_of_device, measured_device
from polyhop.plan.machine import ANY_MODEL
from polyhop.plan.topology import Topology

PLAIN = {"cores": 8, "memory_gb": 64, "cpu_tflops": 0.5, "cpu_memory_gb_s": 80, "network_gbit_s": 10}
GPUS = {**PLAIN, "gpus": 4, "gpu_tflops": 19.5, "gpu_memory_gb": 40, "gpu_memory_gb_s": 1555}


def test_every_preset_is_whole_dated_and_sourced() -> None:
    assert set(presets()) == set(json.loads(PRESETS.read_text())["presets"])
    for name, about in presets().items():
        made = Cluster.from_json({"extends": name})
        assert made.num_ranks == made.ranks_per_host == (made.gpus or made.cores)
        assert date.fromisoformat(made.date) < date(2027, 1, 1)
        assert made.source
        assert made.dollars(made.num_ranks, 3600) == pytest.approx(about["dollars_per_hour"])
        law = law_of_device(made, made.num_ranks)
        assert min(law.near_s, law.far_s, law.flop_s, law.row_s, law.call_s) > 0


def test_a_file_extends_a_preset(tmp_path: Path) -> None:
    text = "extends: p4d.24xlarge\nhosts: 16\nnetwork_gbit_s: 100\n"
    (tmp_path / "c.yaml").write_text(text)
    (tmp_path / "c.json").write_text(
        json.dumps({"extends": "p4d.24xlarge", "hosts": 16, "network_gbit_s": 100})
    )
    made = read_cluster(tmp_path / "c.yaml")
    assert made == read_cluster(tmp_path / "c.json") == Cluster.from_json(made.to_json())
    assert (made.num_ranks, made.network.bytes_per_s, made.gpu_memory_gb) == (128, 12.5e9, 40)
    assert read_cluster("p4d.24xlarge") == replace(made, hosts=1, network_gbit_s=400)


def test_a_date_that_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("extends: p4d.24xlarge\ndate: 2025-02-30\n")
    with pytest.raises(ConfigError, match="not YAML"):
        read_cluster(str(tmp_path / "c.yaml"))


def test_dates_as_yaml_has_them(tmp_path: Path) -> None:
    for text in ("2025-06-01", "'2025-06-01'"):
        (tmp_path / "c.yaml").write_text(f"extends: p4d.24xlarge\ndate: {text}\n")
        made = read_cluster(tmp_path / "c.yaml")
        assert made.date == "2025-06-01"
        assert json.dumps(made.to_json())


def test_hosts_are_paid_for_whole() -> None:
    made = Cluster.from_json({**GPUS, "hosts": 3, "dollars_per_hour": 6.0})
    assert [made.hosts_of(ranks) for ranks in (1, 4, 5, 12)] == [1, 1, 2, 3]
    assert made.dollars(5, 1800) == pytest.approx(6.0)
    assert replace(made, dollars_per_hour=None).dollars(5, 1800) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({**PLAIN, "netwrk_gbit_s": 1}, "unknown field 'netwrk_gbit_s'. Did you mean 'network_gbit_s'?"),
        ({"extends": "p4.24xlarge"}, "unknown preset 'p4.24xlarge'. Did you mean 'p4d.24xlarge'?"),
        (
            {"cores": 8, "memory_gb": 64},
            "no cpu_tflops, cpu_memory_gb_s, network_gbit_s; give them, or extends",
        ),
        ({**PLAIN, "memory_gb": 0}, "memory_gb is 0; expected a number, more than 0"),
        ({**PLAIN, "network_gbit_s": -1}, "network_gbit_s is -1; expected a number, more than 0"),
        ({**PLAIN, "network_us": -1}, "network_us is -1; expected a number, 0 or more"),
        ({**PLAIN, "cores": 2.5}, "cores is 2.5; expected a whole number, more than 0"),
        ({**PLAIN, "cores": True}, "cores is True; expected a whole number, more than 0"),
        ({**PLAIN, "cpu_tflops": "fast"}, "cpu_tflops is 'fast'; expected a number, more than 0"),
        ({**PLAIN, "dollars_per_hour": -2}, "dollars_per_hour is -2; expected a number, 0 or more"),
        (
            {**PLAIN, "hosts": [{"cores": 4}, {"cores": 8}]},
            "hosts are of one kind here: describe the slowest kind",
        ),
        ({**PLAIN, "gpus": 4}, "hosts with 4 GPUs and no gpu_tflops; give it, or extend a preset"),
        ({**GPUS, "ranks": 2}, "2 ranks on hosts of 4 GPUs; expected a rank for each GPU: leave out ranks"),
        ({**PLAIN, "name": ["a"]}, "name is ['a']; expected text"),
        ({"extends": ["p4d.24xlarge"]}, "extends is ['p4d.24xlarge']; expected the name of a preset"),
        (
            {**PLAIN, "dollars_per_hour": float("inf")},
            "dollars_per_hour is inf; expected a number, 0 or more",
        ),
        ({**PLAIN, "network_gbit_s": float("inf")}, "network_gbit_s is inf; expected a number, more than 0"),
        ({**PLAIN, "network_gbit_s": 10**400}, "expected a number, more than 0"),
        ({"machine": "nowhere.json"}, "nowhere.json: not a file of 'polyhop env --calibrate'"),
    ],
)
def test_mistakes_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        Cluster.from_json(given)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("c.yaml", "a: [1", "is not YAML"),
        ("c.json", "{", "is not JSON"),
        ("c.yaml", "- 1\n", "has no fields; expected 'name: value' lines"),
        ("c.yaml", "hosts: 0\nextends: p4d.24xlarge\n", "hosts is 0; expected a whole number, more than 0"),
    ],
)
def test_mistakes_in_files_name_the_file(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_cluster(tmp_path / name)
    assert told in str(error.value)
    assert name in str(error.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be read .*; expected a file such as .*or a preset: c5n.2xlarge"
    ):
        read_cluster("nowhere.yaml")


def machine() -> Machine:
    return Machine(
        "mine", 6, 32e9, 1e7, 1e10, 2e10, 1e-7, 3e-9, 1e-4, 3e-10, 1e-10, 5e8, 1e9, 4.0, Link(2e9, 3e-4)
    )


def test_figures_of_a_host_stand_in_for_rates(tmp_path: Path) -> None:
    save_machine(machine(), tmp_path / "mine.json")
    (tmp_path / "c.yaml").write_text("machine: mine.json\nhosts: 2\nranks: 3\n")
    made = read_cluster(tmp_path / "c.yaml")
    assert (made.num_ranks, made.cores, made.memory_gb) == (6, 6, 32)
    assert made.inside == machine().link
    with pytest.raises(ConfigError, match="machine has figures of processors, and these hosts have GPUs"):
        Cluster.from_json({**GPUS, "machine": str(tmp_path / "mine.json")})


def test_figures_of_gpus_leave_their_hosts_as_they_are(tmp_path: Path) -> None:
    given = replace(machine().with_law(ANY_MODEL, Law(1e-12)), source="measured once")
    save_machine(given, tmp_path / "gpu.json")
    made = Cluster.from_json({**GPUS, "machine": str(tmp_path / "gpu.json")})
    assert replace(made, machine=None, source="") == Cluster.from_json(GPUS)
    found = measured_device(given, made, 4)
    assert (found.node_s, found.gather_bytes_per_s, found.laws) == (1e-7, 1e10, given.laws)
    assert (found.link, found.cores, found.gpus) == (made.inside, made.cores, made.gpus)


def test_faster_devices_have_faster_laws() -> None:
    work = Counts(((1e9, 1e9),), 1e12, 1e9, 3.0)
    gpu = Cluster.from_json(GPUS)
    faster = replace(gpu, gpu_tflops=39.0, gpu_memory_gb_s=3110)
    assert law_of_device(faster, 4).seconds(work) < law_of_device(gpu, 4).seconds(work)
    cpu = Cluster.from_json(PLAIN)
    assert law_of_device(replace(cpu, cpu_memory_gb_s=160), 8).seconds(work) < law_of_device(cpu, 8).seconds(
        work
    )
    assert law_of_device(cpu, 1).far_s < law_of_device(cpu, 8).far_s, (
        "a rank alone has the host's memory to itself"
    )
    assert machine_of_device(gpu, 4).gather_bytes_per_s <= 1e9 * gpu.pcie_gb_s, "rows come over PCIe"


# ---------------------------------------------------------------- who is near whom


NEAR = Topology(4, Link(100e9, 1e-5), Link(10e9, 1e-4))


def test_ranks_of_one_host_know_no_network() -> None:
    assert NEAR.among(0, 4) == Link(pytest.approx(100e9), 1e-5)
    assert NEAR.among(4, 4) == NEAR.among(0, 4)


def test_hosts_share_their_network() -> None:
    """Of 8 ranks on 2 hosts: of 7 peers 4 are elsewhere, and 4 ranks share 10 GB/s."""
    assert NEAR.among(0, 8) == Link(pytest.approx(10e9 / (4 * 4 / 7)), 1e-4)
    assert NEAR.among(0, 5).bytes_per_s == pytest.approx(10e9), (
        "the four of the full host send a fourth each to the fifth"
    )
    assert NEAR.among(0, 1024).bytes_per_s == pytest.approx(10e9 / (4 * 1020 / 1023))


def test_pairs_inside_and_across() -> None:
    assert NEAR.across([(0, 1), (2, 3)]) == Link(100e9, 1e-5)
    assert NEAR.across([(0, 1), (3, 4)]) == Link(10e9, 1e-4)
    assert NEAR.across([(way, way + 4) for way in range(4)]) == Link(2.5e9, 1e-4)


def test_more_bandwidth_is_never_slower() -> None:
    for faster in (replace(NEAR, inside=Link(200e9, 1e-5)), replace(NEAR, network=Link(20e9, 1e-4))):
        for ranks in (2, 4, 6, 8, 64):
            assert faster.among(0, ranks).bytes_per_s >= NEAR.among(0, ranks).bytes_per_s
    assert isinstance(law_of_device(Cluster.from_json(PLAIN), 8), Law)
