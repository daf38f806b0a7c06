"""``polyhop env --calibrate --out``: figures for plans elsewhere, where no model can be timed on this host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyhop import launch
from polyhop.cli.calibrate import calibrate
from polyhop.plan import Law, Machine, load_machine, save_machine
from polyhop.plan import calibrate as measuring
from polyhop.planner import ANY_MODEL


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    found = load_machine()
    assert found is not None
    found = replace(found, laws={})
    monkeypatch.setenv("POLYHOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "measure_cores", lambda: found)
    monkeypatch.setattr(measuring, "measured_law", lambda *given, **named: Law(flop_s=1e-11, host="host"))
    told = {"link": [1e9, 1e-4], "message_s": 1e-4, "byte_s": 3e-10}
    monkeypatch.setattr(launch, "run", lambda *given, **named: told)
    return found


def test_a_file_for_elsewhere_has_a_law_and_the_cache_times_models(host: Machine, tmp_path: Path) -> None:
    calibrate(lambda text: None, tmp_path / "host.json")
    written, kept = load_machine(tmp_path / "host.json"), load_machine()
    assert written is not None
    assert kept is not None
    assert written.laws[ANY_MODEL].host == "host"
    assert not kept.laws
    save_machine(written, tmp_path / "again.json")
    assert load_machine(tmp_path / "again.json") == written
