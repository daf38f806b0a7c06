"""What the interpreter accepts and the compiler does not: every kernel compiles for a CUDA device, and how well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.compiled import is_possible

pytestmark = pytest.mark.xdist_group("compiled")  # one listing serves them all

ROOT = Path(__file__).resolve().parents[3]
KERNELS = {
    "_lists", "_long_lists", "_forward", "_join", "_facts", "_backward", "_add", "_dropout", "_relu_backward", "_gather",
    "_encode", "_decode", "_count", "_draw", "_place", "_count_pieces", "_begin", "_draw_hop", "_mark_first", "_give_rows",
    "_set_free", "_turn",
}  # fmt: skip

# In a process of its own: whether Triton interprets is read when kernels are defined.
LIST = """
import json, sys
from dataclasses import asdict
from benchmarks.gpu.compiled import listing
rows = [{key: value for key, value in asdict(row).items() if key != "code"} for row in listing(is_quick=True)]
json.dump(rows, sys.stdout)
"""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    if not is_possible():
        pytest.skip("no Triton that compiles for CUDA")
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        capture_output=True,
        text=True,
        env={**plain, "PYTHONPATH": path},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kernel_compiles(rows: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in rows} == KERNELS
    for dtype in ("float32", "bfloat16"):
        for name in (
            "spmm",
            "attention",
            "attention backward",
            "dropout",
            "gather",
            "quantise",
            "dequantise",
        ):
            assert any(row["case"].startswith(name) and dtype in row["case"] for row in rows), (name, dtype)


def test_nothing_is_spilt(rows: list[dict[str, Any]]) -> None:
    """But for four values of a draw of 15, whose sort holds 16 places of a row at once."""
    spilt = {row["case"]: row["stack_bytes"] for row in rows if row["stack_bytes"]}
    assert spilt.pop("mini-batch of 15, 10, 5", 0) <= 16
    assert spilt == {}


def test_threads_of_plain_rows_meet_nowhere(rows: list[dict[str, Any]]) -> None:
    """Rows of whole groups of columns: what a thread needs it knows, without a barrier or shared memory."""
    plain = [
        row for row in rows if row["kernel"] in ("_lists", "_encode", "_decode", "_dropout", "_relu_backward", "_forward")
        and " 47" not in row["case"] and "mixed" not in row["case"]
    ]  # fmt: skip
    assert len(plain) >= 10
    assert {row["case"]: (row["barriers"], row["through_shared"]) for row in plain} == {
        row["case"]: (0, 0) for row in plain
    }
