"""Importing is cheap: ``import polyhop`` and ``polyhop --help`` load no torch, and importing has no side effects."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "scipy", "matplotlib", "plotly", "pyarrow", "torch_geometric", "safetensors"}
VERBS = ("train", "predict", "data", "plan", "report", "env", "bench")


def loaded_by(code: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after running the code."""
    report = (
        "import sys, json; sys.stderr.write(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(json.loads(run.stderr.splitlines()[-1]))


def test_measure_sees_what_is_loaded() -> None:
    assert "numpy" in loaded_by("import numpy")


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import polyhop") & (HEAVY | {"typer", "rich"}) == set()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)], ids=" ".join
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["polyhop", *{arguments!r}]
from polyhop.cli import main
try:
    main()
except SystemExit as leave:
    assert not leave.code, leave.code
"""
    assert loaded_by(code) & HEAVY == set()


def test_public_names_are_reachable_after_a_bare_import() -> None:
    code = "import polyhop\nfor name in polyhop.__all__:\n    getattr(polyhop, name)"
    assert "torch" in loaded_by(code)


def test_import_leaves_the_environment_alone() -> None:
    code = """
import os, warnings
before = dict(os.environ), list(warnings.filters)
import polyhop, polyhop.cli
assert (dict(os.environ), list(warnings.filters)) == before
"""
    loaded_by(code)
