from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.graph.block import Block
from polyhop.kernels import aggregate, reference

MakeBlock = Callable[..., Block]

# As in ../test_spmm.py: rounding of sums in another order, relative to the largest value.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.02}
ALL = "edge_weight src_scale dst_scale self_scale"


def _factors(block: Block, dtype: torch.dtype, names: str) -> dict[str, Tensor]:
    sizes = {
        "edge_weight": block.num_edges, "src_scale": block.num_src, "dst_scale": block.num_dst, "self_scale": block.num_dst,
    }  # fmt: skip
    gen = torch.Generator().manual_seed(9)
    made = {
        name: torch.rand(size, generator=gen, dtype=torch.float64).to(dtype) for name, size in sizes.items()
    }
    return {name: made[name].to(block.device) for name in names.split()}


def _both(block: Block, h: Tensor, grad: Tensor, factors: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Value and gradient of the kernel, and of the reference with sums in float64."""
    results = []
    exact = {name: factor.double() for name, factor in factors.items()}
    for run, dtype in (
        (lambda t: aggregate(block, t, **factors), h.dtype),
        (
            lambda t: reference.spmm(
                block.indptr, block.indices, t, dst_start=block.dst_start, rows=block.rows, **exact
            ),
            torch.float64,
        ),
    ):
        leaf = h.to(dtype, copy=True).requires_grad_()
        out = run(leaf)
        out.backward(grad.to(dtype))
        assert leaf.grad is not None
        results.append((out.detach(), leaf.grad))
    return list(zip(*results))


def _check(block: Block, width: int, dtype: torch.dtype, names: str = "") -> None:
    gen = torch.Generator().manual_seed(width)
    num_rows = block.num_src if block.rows is None else int(block.rows.max()) + 3
    h = torch.randn(num_rows, width, generator=gen, dtype=torch.float64).to(block.device, dtype)
    grad = torch.randn(block.num_dst, width, generator=gen, dtype=torch.float64).to(block.device, dtype)
    for ours, exact in _both(block, h, grad, _factors(block, reference.sum_dtype(dtype), names)):
        assert ours.dtype == dtype
        room = TOLERANCE[dtype] * max(1.0, exact.abs().max().item() if exact.numel() else 0)
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=room)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [1, 7, 100, 128, 257])
@pytest.mark.parametrize("names", ["", "edge_weight", ALL])
def test_equals_reference(
    make_block: MakeBlock, device: torch.device, poison: None, dtype: torch.dtype, width: int, names: str
) -> None:
    block = make_block(30, 50, 200, dst_start=13) if width != 128 else make_block(12, 50, 400, dst_start=13)
    _check(block.to(device), width, dtype, names)  # lists of some edges, and of more than one turn's


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_places_beyond_32_bits(
    make_block: MakeBlock,
    device: torch.device,
    poison: None,
    monkeypatch: pytest.MonkeyPatch,
    index: torch.dtype,
) -> None:
    """Large matrices take wider numbers, and give the same sums."""
    from polyhop.kernels.triton import spmm

    block = make_block(20, 45, 150, dst_start=4, dtype=index).to(device)
    h = torch.randn(45, 132, generator=torch.Generator().manual_seed(0)).to(device)
    near = aggregate(block, h)
    monkeypatch.setattr(spmm, "_NEAR", 0)
    assert torch.equal(aggregate(block, h), near)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_of_a_pool(
    make_block: MakeBlock, device: torch.device, poison: None, index: torch.dtype
) -> None:
    block = make_block(20, 45, 150, dst_start=4, dtype=index, pool=30)
    _check(block.to(device), 17, torch.float32, "edge_weight dst_scale self_scale")


@pytest.mark.parametrize(
    ("num_dst", "num_src", "num_edges"), [(0, 5, 0), (4, 5, 0), (0, 0, 0), (40, 41, 3), (1, 1, 30)]
)
@pytest.mark.parametrize("names", ["", ALL])
def test_empty_rows_and_blocks(
    make_block: MakeBlock, device: torch.device, poison: None, num_dst: int, num_src: int, num_edges: int, names: str
) -> None:  # fmt: skip
    _check(make_block(num_dst, num_src, num_edges).to(device), 17, torch.float64, names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_long_lists_are_cut(
    make_block: MakeBlock, device: torch.device, poison: None, dtype: torch.dtype
) -> None:
    """Lists of several pieces, one of a whole number of pieces, both ways; the sums are those of whole lists."""
    block = make_block(3, 4, 3000, hub=True).to(device)
    indptr = torch.tensor(
        [0, 1536, 1537, 1537, 3000], device=device
    )  # three pieces of 512, one edge, none, three pieces
    indices = torch.cat([block.indices, block.indices.new_zeros(0)])
    _check(Block(indptr, indices, 4), 33, dtype, ALL)
    _check(block, 33, dtype, ALL)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("names", ["src_scale", "dst_scale", ALL])
def test_rows_that_many_edges_read(
    make_block: MakeBlock, device: torch.device, poison: None, dtype: torch.dtype, names: str
) -> None:
    """They are scaled before, both ways; own rows are those that were given, and so are rows after it."""
    block = make_block(9, 11, 400, dst_start=2).to(device)
    _check(block, 33, dtype, names)
    h = torch.randn(11, 33, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    before = h.clone()
    aggregate(block, h, **_factors(block, reference.sum_dtype(dtype), names))
    assert torch.equal(h, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_hub_of_a_million_edges() -> None:
    gen = torch.Generator().manual_seed(1)
    degree = torch.randint(0, 9, (50_001,), generator=gen)
    degree[777] = 1_000_003
    indptr = torch.zeros(50_002, dtype=torch.int64)
    indptr[1:] = degree.cumsum(0)
    indices = torch.randint(50_001, (int(indptr[-1]),), generator=gen).to(torch.int32)
    block = Block(indptr, indices, 50_001).to("cuda")
    for dtype in TOLERANCE:
        _check(block, 70, dtype, "edge_weight dst_scale")


def test_same_bits_run_to_run(make_block: MakeBlock, device: torch.device) -> None:
    num = (2000, 3000, 60_000) if device.type == "cuda" else (20, 30, 1500)
    block, results = make_block(*num, hub=True).to(device), []
    h = torch.randn(num[1], 100, generator=torch.Generator().manual_seed(0)).to(device)
    for _ in range(3):
        leaf = h.clone().requires_grad_()
        out = aggregate(block, leaf)
        out.pow(2).sum().backward()
        results.append((out.detach(), leaf.grad))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_lists_of_other_lengths_in_the_same_memory(device: torch.device) -> None:
    """How lists are cut is kept with the tensor, and found anew when it changes."""
    indptr = torch.tensor([0, 600, 601], device=device)
    indices = torch.zeros(601, dtype=torch.int32, device=device)
    h = torch.ones(2, 1, device=device)
    assert aggregate(Block(indptr, indices, 2), h).flatten().tolist() == [600, 1]
    indptr[1] = 1
    assert aggregate(Block(indptr, indices, 2), h).flatten().tolist() == [1, 600]
