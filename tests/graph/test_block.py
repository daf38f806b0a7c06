"""Block: shapes, ids, pools, transposition."""

from __future__ import annotations

import pytest
import torch

from polyhop.errors import GraphError
from polyhop.graph import Block


def block(**changes: object) -> Block:
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([3, 1, 0], dtype=torch.int32)
    given: dict[str, object] = {"indptr": indptr, "indices": indices, "num_src": 4, "dst_start": 1}
    return Block(**{**given, **changes})  # type: ignore[arg-type]


def test_counts() -> None:
    made = block()
    assert (made.num_dst, made.num_edges, made.drawn.tolist()) == (2, 3, [2, 1])
    assert made.device.type == "cpu"


def test_destinations_are_source_rows() -> None:
    h = torch.arange(4.0)[:, None]
    assert block().dst_rows(h).tolist() == [[1], [2]]
    assert block().dst_ids().tolist() == [1, 2]
    named = block(src_ids=torch.tensor([40, 41, 42, 43]))
    assert named.dst_ids().tolist() == [41, 42]
    pooled = block(rows=torch.tensor([9, 8, 7, 6]))
    assert pooled.dst_rows(torch.arange(10.0)[:, None]).tolist() == [[8], [7]]


def test_transposed_is_built_once_and_right() -> None:
    made = block()
    t = made.transposed()
    assert t.indptr.tolist() == [0, 1, 2, 2, 3]
    assert t.indices.tolist() == [1, 0, 0]
    assert t.edge.tolist() == [2, 1, 0]
    assert made.transposed() is t


def test_to_moves_every_tensor() -> None:
    made = block(src_ids=torch.arange(4), edge_weight=torch.ones(3))
    made.transposed()
    moved = made.to("cpu")
    assert moved.edge_weight is not None
    assert torch.equal(moved.indices, made.indices)
    assert moved.num_src == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": torch.tensor([0, 2, 3]).int()}, "block indptr: expected int64"),
        ({"indptr": torch.tensor([[0, 3]])}, "block indptr"),
        ({"indices": torch.ones(3)}, "block indices: expected int32 or int64"),
        ({"dst_start": 3}, r"destinations 3..5 exceed its 4 source rows"),
        ({"dst_start": -1}, "exceed"),
    ],
)
def test_wrong_arrays(changes: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        block(**changes)
