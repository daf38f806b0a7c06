"""The picture of a pipeline's epoch takes spans of that epoch alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.pipeline import picture  # noqa: E402


@pytest.mark.parametrize("epoch", [0, 1])
def test_pictures_need_the_epoch(tmp_path: Path, epoch: int) -> None:
    lines = [
        {"kind": "start", "rank": 0, "origin": 5.0},
        {"kind": "span", "name": "compute", "at": 1.0, "seconds": 2.0, "step": 0},
        {"kind": "span", "name": "forward", "at": 1.5, "seconds": 0.5, "chunk": 3, "layer": 0},
        {"kind": "span", "name": "forward", "at": 3.5, "seconds": 0.5, "chunk": 3, "layer": 0},
    ]
    (tmp_path / "trace-0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if epoch:
        with pytest.raises(SystemExit, match="no epoch 1"):
            picture.lanes_of(tmp_path, epoch)
    else:
        ((name, spans),) = picture.lanes_of(tmp_path, epoch)
        assert name == "rank 0"
        assert [span["at"] for span in spans] == [6.0, 6.5]
