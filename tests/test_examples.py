"""The programs in examples/ and the Python of the README run, and do what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_main(name: str, *arguments: object) -> float:
    return runpy.run_path(str(ROOT / "examples" / name))["main"](*arguments)


def test_own_graph(tmp_path: Path) -> None:
    assert run_main("own_graph.py", str(tmp_path / "run")) > 0.9  # features alone give about 0.6
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_pyg_model() -> None:
    pytest.importorskip("torch_geometric")
    assert run_main("pyg_model.py") < 1e-4  # float32, sums in another order


def test_several_ranks() -> None:
    """As a program: its ranks are processes that must find its function by name."""
    done = subprocess.run(
        [sys.executable, "examples/several_ranks.py"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"test accuracy ([\d.]+) on two ranks, ([\d.]+) in one process", done.stdout)
    assert found is not None, done.stdout
    assert abs(float(found[1]) - float(found[2])) <= 0.011  # a node or two may tip over by rounding
    assert "rank 1 of 2" in done.stdout


def test_every_example_is_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "examples").glob("*.py") if path.name not in here] == []


def test_python_of_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed, except on a small graph and for one epoch."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    small = program.replace('"debian-packages"', '"synth:arxiv?scale=0.01"').replace(
        "max_epochs=10", "max_epochs=1"
    )
    assert small != program
    names: dict[str, object] = {}
    exec(small, names)
    assert "test accuracy" in capsys.readouterr().out
    assert tuple(names["predictions"].shape) == (names["graph"].num_nodes, names["graph"].num_classes)  # type: ignore[attr-defined]


def test_links_of_the_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
