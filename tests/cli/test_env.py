"""``polyhop env``: what it says is true of this process, and each fault has its hint."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

import polyhop as package
from polyhop.cli import env


def test_facts(polyhop) -> None:
    facts = polyhop("env", "--json").json
    assert facts["polyhop"] == package.__version__
    assert facts["python"] == platform.python_version()
    assert facts["machine"]["cores"] >= 1
    assert 0 < facts["machine"]["free_gib"] <= facts["machine"]["memory_gib"]
    assert facts["packages"]["torch"]


def test_table_says_which_kernels_and_why(polyhop) -> None:
    shown = polyhop("env")
    assert "kernels" in shown.out
    assert "POLYHOP_KERNELS=" in shown.out


def test_reference_kernels_are_told(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    facts = polyhop("env", "--json").json
    assert facts["kernels"]["cpu"] == "reference"
    assert any("POLYHOP_KERNELS=reference is set" in hint for hint in facts["hints"])
    assert facts["settings"]["POLYHOP_KERNELS"] == "reference"
    assert "hint: the native kernels are not in use" in polyhop("env").out


def test_wrong_setting_is_an_error(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "fast")
    assert polyhop("env").code == 1


def test_missing_library_says_how_to_fix(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyhop.kernels import native

    status = {
        "mode": "auto",
        "cpu": "reference",
        "cuda": "reference",
        "library": "no native library",
        "threads": "999",
    }
    monkeypatch.setattr(native, "status", lambda: status)
    hints = "\n".join(polyhop("env", "--json").json["hints"])
    assert "no native library" in hints
    assert "pip install --force-reinstall" in hints
    assert "999 threads on" in hints


def test_works_without_torch(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    shown = polyhop("env", "--json")
    assert shown.code == 0, shown.err
    assert shown.json["kernels"]["cpu"] == "none"
    assert any("pip install torch" in hint for hint in shown.json["hints"])


def test_slow_instruction_set_is_told(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyhop.kernels import native

    status = {
        "mode": "auto",
        "cpu": "native",
        "cuda": "reference",
        "library": "x.so, instruction set base",
        "threads": "1",
    }
    monkeypatch.setattr(native, "status", lambda: status)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert any("without AVX2" in hint for hint in polyhop("env", "--json").json["hints"])


def test_missing_packages_are_told(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_version", lambda package: None)
    shown = polyhop("env").out
    assert "scipy MISSING" in shown
    assert "pip install scipy" in shown
    assert "pip install 'polyhop[report]'" in shown
    assert "not installed" in shown


def test_data_folder(polyhop, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_DATA", raising=False)
    assert "POLYHOP_DATA is not set" in polyhop("env").out
    monkeypatch.setenv("POLYHOP_DATA", str(tiny_dir))
    assert polyhop("env", "--json").json["data"].endswith("(1 graphs)")
    monkeypatch.setenv("POLYHOP_DATA", "nowhere")
    assert any("is not a folder" in hint for hint in polyhop("env", "--json").json["hints"])
