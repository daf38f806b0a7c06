"""docs/plan.md says what the code does: its blocks of formulas are those of the modules' docstrings, word for word."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"\(`([a-z_/]+\.py)`[^\n]*\)[^\n]*\n\n```\n(.*?)```", PAGE, re.DOTALL)


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_every_kind_of_training_is_there() -> None:
    assert {path for path, _ in QUOTED} == {
        "plan/law.py",
        "strategies/split_choice.py",
        "strategies/macro_plan.py",
        "forecast/memory.py",
        "forecast/whole.py",
        "forecast/stages.py",
        "forecast/servers.py",
    }


@pytest.mark.parametrize(("path", "block"), QUOTED, ids=[path for path, _ in QUOTED])
def test_formulas_are_those_of_the_code(path: str, block: str) -> None:
    said = ast.get_docstring(ast.parse((ROOT / "src" / "polyhop" / path).read_text(encoding="utf-8")))
    assert said is not None
    assert squeezed(block) in squeezed(said), f"docs/plan.md and {path} differ"
