"""What an epoch of the device's code holds at most, to the byte: something that is kept longer shows here.

What the sums below leave out must not be there: rows of a layer that are kept longer add 4 * HIDDEN bytes a node.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu.held import HIDDEN, held_at_most, per_node_and_edge  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts allocations in host memory")

FEATURES, CLASSES = 100, 47

INPUTS = 4 * FEATURES + 8  # x, y
EDGES = 8 + 8  # indptr, and how lists are cut: of edges that go both ways once
FIRST_SUMS, LOGITS, ROWS, SIGNS = 4 * FEATURES, 4 * CLASSES, 4 * HIDDEN, HIDDEN // 8


def test_the_record_counts_what_is_alive() -> None:
    def work() -> None:
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        third = torch.empty(500)
        del second, third

    held = held_at_most(work)
    assert held.num_bytes == 4 * 3000
    assert [size for size, _ in held.names] == [8000, 4000]


def test_gcn() -> None:
    """Where the last layer goes back: its gradient, the input's and the input's rows; before it, sums and signs."""
    per_node, per_edge, *_ = per_node_and_edge("gcn", FEATURES, CLASSES)
    scales = 4 + 4  # of a node as a source, and of its own row
    assert per_edge == 4
    assert per_node == INPUTS + EDGES + scales + FIRST_SUMS + LOGITS + 3 * ROWS + 2 * SIGNS


def test_sage() -> None:
    """The same, and the rows of the layer before it, which its own weights read; both gradients of the logits."""
    per_node, per_edge, *_ = per_node_and_edge("sage", FEATURES, CLASSES)
    assert per_edge == 4
    assert per_node == INPUTS + EDGES + 4 + FIRST_SUMS + 2 * LOGITS + 4 * ROWS + 2 * SIGNS
