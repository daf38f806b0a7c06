"""``polyhop train synth:procedural?...``: a terabyte that is nowhere, said so, in the memory given; refusals say why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAME = "synth:procedural?nodes=1e9&features=256"
TRAIN = [
    "--strategy",
    "macro",
    "--fanout",
    "10,5",
    "--hidden",
    "16",
    "--progress",
    "plain",
    "--run-dir",
    "run",
]

# Runs the command and prints the peak memory of the largest process under it.
MEASURED = """
import resource, subprocess, sys
code = subprocess.run([sys.executable, "-m", "polyhop", *sys.argv[1:]]).returncode
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(code)
"""


def measured(folder: Path, *arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    return int(last.removeprefix("peak ")), done.stdout + done.stderr


@pytest.mark.slow
def test_a_terabyte_in_the_memory_given(tmp_path: Path) -> None:
    """10^9 nodes, 1.02 TB, four ranks, 20 windows: under 700 MB a rank, of which 256 MB were given and torch takes 300."""
    name = f"{NAME}&train=20000"
    given = ["--workers", 4, "--memory", "256MB", "--batch-size", 1000, "--epochs", 2, "--lr", 0.01]
    peak, said = measured(tmp_path, "train", name, *given, "--macro", 2, *TRAIN)
    assert peak < 700e6
    assert "procedural: 1,000,000,000 nodes, 1.02 TB of virtual features, computed when read" in said
    assert "says nothing on I/O" in said
    assert "evaluation is skipped: there are no labelled validation or test nodes" in said
    assert "polyhop predict" not in said
    first, last = (
        json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )
    assert last < 0.7 * first
    # More than fits is lowered, not tried; and k changes nothing.
    _, said = measured(tmp_path, "train", name, *given, "--macro", 40, *TRAIN[:-1], "wide")
    assert "mini-batches, not 20: more would not fit the memory given" in said
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("run", "wide")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", NAME, *TRAIN], "cannot be loaded whole"),
        (
            ["train", NAME, "--workers", 2, "--parts", "parts", *TRAIN],
            "--parts parts: .* nothing to keep in a folder",
        ),
        (
            ["train", NAME, "--workers", 2, "--partitioner", "metis", *TRAIN],
            "--partitioner metis: .*no edges to cut",
        ),
        (
            ["train", NAME, "--workers", 2, *TRAIN[:2], *TRAIN[4:]],
            "ranks train on mini-batches: give --fanout",
        ),
        (["partition", NAME, "--parts", 2, "--out", "parts"], "cannot be loaded whole"),
        (["data", NAME], "cannot be loaded whole"),
        (["data", f"{NAME}&node=3"], "option 'node'"),
    ],
    ids=["alone", "parts", "metis", "full-graph", "partition", "data", "option"],
)
def test_what_cannot_be_done_is_said(
    polyhop: Callable[..., Any], arguments: list[object], reason: str
) -> None:
    shown = polyhop(*arguments)
    assert shown.code == 1
    assert re.search(reason, shown.err), shown.err
    assert not Path("run").exists()


def test_a_run_of_it_cannot_predict(polyhop: Callable[..., Any]) -> None:
    from polyhop.cli.recipe import Recipe

    with Recipe(NAME, num_features=256, num_classes=16).kept_in(Path("run")):
        pass
    shown = polyhop("predict", "run")
    assert shown.code == 1
    assert "cannot be loaded whole" in shown.err


def test_it_is_listed(polyhop: Callable[..., Any]) -> None:
    assert "synth:procedural" in polyhop("data", "--json").json["generators"]
