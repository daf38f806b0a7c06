from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyhop.errors import InputError, KernelError
from polyhop.graph.block import Block
from polyhop.kernels import reference, transpose

MakeBlock = Callable[..., Block]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_dst", "num_src", "num_edges"),
    [(5, 7, 20), (50, 3, 400), (4, 900, 11), (1, 1, 9), (0, 3, 0), (3, 0, 0), (0, 0, 0)],
)
def test_equals_reference(
    make_block: MakeBlock, native_only: None, dtype: torch.dtype, num_dst: int, num_src: int, num_edges: int
) -> None:
    block = make_block(num_dst, num_src + num_dst, num_edges, dtype=dtype)
    got = transpose(block.indptr, block.indices, block.num_src)
    expected = reference.transpose(block.indptr, block.indices, block.num_src)
    for ours, theirs in zip(got, expected):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_is_stable_and_keeps_every_edge(make_block: MakeBlock, native_only: None) -> None:
    block = make_block(30, 40, 500)
    t_indptr, t_indices, t_edge = transpose(block.indptr, block.indices, 40)
    dst = torch.repeat_interleave(torch.arange(30), block.drawn)
    for s in range(40):
        mine = slice(int(t_indptr[s]), int(t_indptr[s + 1]))
        at = t_edge[mine].long()
        assert torch.equal(at, (block.indices == s).nonzero()[:, 0])  # ascending: stable
        assert torch.equal(t_indices[mine].long(), dst[at])


@pytest.mark.parametrize("threads", [2, 3, 9])
def test_same_for_any_thread_count(
    make_block: MakeBlock, native_only: None, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    block = make_block(2000, 3000, 200_000, hub=True)  # large enough to be cut among threads
    monkeypatch.setenv("POLYHOP_THREADS", "1")
    one = transpose(block.indptr, block.indices, 3000)
    monkeypatch.setenv("POLYHOP_THREADS", str(threads))
    for ours, theirs in zip(transpose(block.indptr, block.indices, 3000), one):
        assert torch.equal(ours, theirs)


def test_wrong_arguments_are_refused() -> None:
    indptr, indices = torch.tensor([0, 2]), torch.tensor([0, 1])
    with pytest.raises(InputError, match=r"indptr must be int64 \[D \+ 1\], got torch.int32"):
        transpose(indptr.int(), indices, 2)
    with pytest.raises(InputError, match="indices must be int32 or int64"):
        transpose(indptr, indices.float(), 2)
    with pytest.raises(InputError, match=r"from 0 to the 2 indices, got 0 \.\. 3"):
        transpose(torch.tensor([0, 3]), indices, 2)


def test_debug_mode_names_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    with pytest.raises(KernelError, match=r"indices\[1\] = 5, outside 0 \.\. 1"):
        transpose(torch.tensor([0, 2]), torch.tensor([0, 5]), 2)
    with pytest.raises(KernelError, match=r"indptr\[2\] = 1 is below indptr\[1\] = 2"):
        transpose(torch.tensor([0, 2, 1, 2]), torch.tensor([0, 1]), 2)
