"""docs/clusters.md says what the code does: formulas are those of docstrings, fields and presets are all there are."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from polyhop.plan.cluster import Cluster, presets

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"\(`([a-z_/]+\.py)`[^\n]*\)[^\n]*\n\n```\n(.*?)```", PAGE, re.DOTALL)


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_formulas_are_those_of_the_code() -> None:
    assert {path for path, _ in QUOTED} == {"plan/device.py", "plan/topology.py", "forecast/statistics.py"}
    for path, block in QUOTED:
        said = ast.get_docstring(ast.parse((ROOT / "src" / "polyhop" / path).read_text(encoding="utf-8")))
        assert said is not None
        assert squeezed(block) in squeezed(said), f"docs/clusters.md and {path} differ"


@pytest.mark.parametrize("name", [*(each.name for each in fields(Cluster)), *presets()])
def test_every_field_and_preset_is_told(name: str) -> None:
    assert name in PAGE
