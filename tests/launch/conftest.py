"""Ranks are other processes: what they run must be importable there, and nothing of them may stay behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).parent)
)  # other processes get this path, and find rank_functions by name

from remains import Remains


@pytest.fixture
def remains() -> Iterator[Remains]:
    """What was there before; at the end of the test nothing more may be."""
    seen = Remains()
    yield seen
    seen.check()
