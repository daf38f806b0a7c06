"""What every kernel test needs: odd blocks, and the promise that the native code (not its fallback) is under test."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyhop.graph.block import Block


@pytest.fixture
def native_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that the native library cannot serve fail instead of falling back."""
    monkeypatch.setenv("POLYHOP_KERNELS", "native")


def _random_block(
    num_dst: int,
    num_src: int,
    num_edges: int,
    *,
    dst_start: int = 0,
    dtype: torch.dtype = torch.int32,
    seed: int = 0,
    has_ids: bool = False,
    pool: int = 0,
    hub: bool = False,
) -> Block:
    """A block with repeated edges and, when edges are few, empty rows; ``hub`` gives half the edges to one destination."""
    gen = torch.Generator().manual_seed(seed)
    dst = torch.randint(max(num_dst, 1), (num_edges,), generator=gen)
    if hub:
        dst[: num_edges // 2] = num_dst // 2
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    if num_edges:
        indptr[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    return Block(
        indptr,
        torch.randint(max(num_src, 1), (num_edges,), generator=gen).to(dtype),
        num_src,
        dst_start=dst_start,
        src_ids=torch.randint(1 << 40, (num_src,), generator=gen) if has_ids else None,
        rows=torch.randint(pool, (num_src,), generator=gen) if pool else None,
    )


@pytest.fixture(scope="session")
def make_block() -> Callable[..., Block]:
    return _random_block
