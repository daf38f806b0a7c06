"""Aggregated rows: stored wide, split without a copy, refused where they do not fit together."""

from __future__ import annotations

import pytest
import torch

from polyhop.errors import GraphError
from polyhop.graph.aggregated import AggregatedRows, FixedAggregate


def aggregate(has_own: bool) -> FixedAggregate:
    return FixedAggregate("mean", has_own, lambda block, x: x)


def test_stored_rows_split_into_what_was_stored() -> None:
    own, z = torch.randn(5, 3), torch.randn(5, 3)
    stored = aggregate(True).stored(own, z)
    assert list(stored.shape) == [5, aggregate(True).width(3)] == [5, 6]
    rows = aggregate(True).split(stored)
    assert rows.own is not None
    assert torch.equal(rows.own, own)
    assert torch.equal(rows.z, z)
    assert rows.z.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    assert (rows.shape, rows.dtype, rows.device) == ((5, 3), torch.float32, z.device)


def test_sums_alone_have_no_own_rows() -> None:
    own, z = torch.randn(5, 3), torch.randn(5, 3)
    stored = aggregate(False).stored(own, z)
    assert list(stored.shape) == [5, aggregate(False).width(3)] == [5, 3]
    rows = aggregate(False).split(stored)
    assert rows.own is None
    assert torch.equal(rows.z, z)


@pytest.mark.parametrize(("z", "own"), [((5,), None), ((5, 3), (5, 4)), ((5, 3), (4, 3))])
def test_shapes_must_agree(z: tuple[int, ...], own: tuple[int, ...] | None) -> None:
    with pytest.raises(GraphError, match="aggregated rows: expected z"):
        AggregatedRows(torch.zeros(z), None if own is None else torch.zeros(own))
