from __future__ import annotations

import pytest
import torch

from polyhop.graph import Block
from polyhop.kernels import reference, transpose


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_dst", "num_src", "num_edges"), [(5, 9, 40), (1, 1, 1), (40, 1500, 30), (7, 7, 0), (0, 3, 0)]
)
def test_equals_reference(
    device: torch.device, poison: None, dtype: torch.dtype, num_dst: int, num_src: int, num_edges: int
) -> None:
    gen = torch.Generator().manual_seed(num_edges)
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    if num_edges:
        dst = torch.randint(num_dst, (num_edges,), generator=gen)
        indptr[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    indices = torch.randint(num_src, (num_edges,), generator=gen).to(dtype)
    ours = transpose(indptr.to(device), indices.to(device), num_src)
    for one, other in zip(ours, reference.transpose(indptr, indices, num_src), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


def test_edges_that_go_both_ways_are_kept_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Block(torch.tensor([0, 1, 3, 4]), torch.tensor([1, 0, 2, 1], dtype=torch.int32), num_src=3)
    one_way = Block(torch.tensor([0, 2, 3]), torch.tensor([1, 3, 0], dtype=torch.int32), num_src=4)
    there = both.to(device)
    t, turned = there.transposed(), one_way.to(device).transposed()
    assert t.indptr is there.indptr
    assert t.indices is there.indices
    assert t.edge.tolist() == [1, 0, 3, 2]
    assert t.edge is t.edge
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    of_host = Block(one_way.indptr, one_way.indices, num_src=4).transposed()
    for ours, theirs in zip(
        (turned.indptr, turned.indices, turned.edge),
        (of_host.indptr, of_host.indices, of_host.edge),
        strict=True,
    ):
        assert ours.tolist() == theirs.tolist()
    plain = Block(both.indptr, both.indices, num_src=3)
    assert plain.transposed().indices is not plain.indices
    assert plain.transposed().edge.tolist() == [1, 0, 3, 2]
