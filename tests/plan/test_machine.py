"""Figures of a host: measured, kept, found again, and never those of another host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from polyhop.comm import run_in_threads
from polyhop.errors import ConfigError
from polyhop.nn import GCN
from polyhop.plan import Law, load_machine, machine_file, save_machine
from polyhop.plan.calibrate import measure_cores, measure_messages, measured_law
from polyhop.plan.machine import host_name


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYHOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_host_is_measured_kept_and_found_again(cache: Path) -> None:
    assert load_machine() is None
    before = torch.get_num_threads()
    found = measure_cores()
    assert torch.get_num_threads() == before
    figures = [
        found.gather_bytes_per_s,
        found.stream_bytes_per_s,
        found.node_s,
        found.edge_s,
        found.quantise_s,
    ]
    assert all(0 < each < 1e13 for each in figures)
    assert 1e6 < found.gather_bytes_per_s < 1e12
    assert found.thread_gain >= 1
    assert found.cache_bytes >= 1e5
    found = found.with_law("a model", Law(1e-11, 2e-10, 3e-11))
    assert save_machine(found) == machine_file() == cache / "machine.json"
    assert load_machine() == found
    assert [path.name for path in cache.iterdir()] == ["machine.json"], "nothing half-written stays"


def test_figures_of_another_host_do_not_count(cache: Path) -> None:
    save_machine(measure_cores())
    about = json.loads(machine_file().read_text())
    about["measured_on"]["processor"] = "another"
    about["machine"]["link"]["busy_s"] = 1e-3  # measured once, of no use
    machine_file().write_text(json.dumps(about))
    assert load_machine() is None
    assert load_machine(machine_file()) is not None, "unless they are asked for by name"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"machine": {"name": "x"}}'])
def test_a_damaged_file(cache: Path, text: str) -> None:
    cache.mkdir()
    machine_file().write_text(text)
    assert load_machine() is None
    with pytest.raises(ConfigError, match=r"machine\.json: not a file of 'polyhop env --calibrate'"):
        load_machine(machine_file())


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYHOP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="set POLYHOP_CACHE"):
        save_machine(measure_cores())


def test_messages_are_the_same_figures_on_all_ranks() -> None:
    found = run_in_threads(3, measure_messages)
    assert found[0] == found[1] == found[2]
    link, message_s, byte_s = found[0]
    assert link.bytes_per_s > 0
    assert link.latency_s > 0
    assert message_s > 0
    assert byte_s > 0
    assert run_in_threads(1, measure_messages)[0][1:] == (0.0, 0.0)


def test_a_law_of_one_rank_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    law = measured_law(GCN(4, 4, 1, out_channels=2), 4)
    assert torch.get_num_threads() == before
    assert law.cache_bytes < 1e12
    assert law.host == host_name()
