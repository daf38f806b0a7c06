"""``polyhop bench``: forwards to the checkout's benchmarks, and says where they are when there is no checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyhop.cli import bench

ROOT = Path(__file__).resolve().parents[2]


def test_forwards_everything(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def run(command: list[str], **options: object) -> SimpleNamespace:
        seen.update(command=command, **options)
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bench, "_checkout", lambda: ROOT)
    assert polyhop("bench", "kernels", "--json", "r.json", "--quick").code == 7
    assert seen["command"] == [sys.executable, "-m", "benchmarks", "kernels", "--json", "r.json", "--quick"]
    assert seen["cwd"] == ROOT


def test_outside_a_checkout(polyhop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    shown = polyhop("bench", "kernels")
    assert shown.code == 1
    assert "part of the source checkout" in shown.err


def test_finds_the_checkout_it_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").touch()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert bench._checkout() == tmp_path
