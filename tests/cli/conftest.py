"""Run the command line in this process, as a shell would see it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polyhop.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Polyhop = Callable[..., Outcome]


@pytest.fixture
def polyhop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Polyhop:
    """``polyhop("train", "tiny", ...)`` in an empty working directory -> exit code and both outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYHOP_TRACEBACK", raising=False)

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["polyhop", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    return call


@pytest.fixture
def small(tiny_dir: Path) -> list[str]:
    """Arguments of a run that takes a moment."""
    return ["tiny", "--data-dir", str(tiny_dir), "--hidden", "16", "--epochs", "4", "--progress", "none"]
