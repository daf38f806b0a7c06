from __future__ import annotations

import pytest
import torch

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
