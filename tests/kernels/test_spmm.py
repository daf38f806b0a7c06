from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import InputError, KernelError
from polyhop.graph.block import Block
from polyhop.kernels import aggregate, native, reference, spmm

MakeBlock = Callable[..., Block]

# float64: sums of at most some hundred products of size 1. float32: the same sums, 2^-24 per step, in another order than
# torch's. bfloat16: sums are in float32 on both sides, so only the last rounding (2^-9 of values up to about 10) may differ.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.07}
WIDTHS = [1, 3, 7, 17, 100, 128, 130, 257]


def _factors(block: Block, dtype: torch.dtype, names: str) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(9)
    sizes = {
        "edge_weight": block.num_edges, "src_scale": block.num_src, "dst_scale": block.num_dst, "self_scale": block.num_dst,
    }  # fmt: skip
    return {
        name: torch.rand(size, generator=gen, dtype=torch.float64).to(dtype)
        for name, size in sizes.items()
        if name in names
    }


def _check_spmm(block: Block, width: int, dtype: torch.dtype, names: str = "") -> None:
    """Value and gradient equal the reference's."""
    gen = torch.Generator().manual_seed(width)
    num_rows = block.num_src if block.rows is None else int(block.rows.max()) + 3
    h = torch.randn(num_rows, width, generator=gen, dtype=torch.float64).to(dtype)
    grad = torch.randn(block.num_dst, width, generator=gen, dtype=torch.float64).to(dtype)
    factors: dict[str, Any] = _factors(block, reference.sum_dtype(dtype), names)
    results = []
    for run in (
        lambda t: aggregate(block, t, **factors),
        lambda t: reference.spmm(
            block.indptr, block.indices, t, dst_start=block.dst_start, rows=block.rows, **factors
        ),
    ):
        leaf = h.clone().requires_grad_()
        out = run(leaf)
        out.backward(grad)
        results.append((out.detach(), leaf.grad))
    for ours, theirs in zip(*results):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "names", ["", "edge_weight", "src_scale dst_scale", "edge_weight src_scale dst_scale self_scale"]
)
def test_equals_reference(
    make_block: MakeBlock, native_only: None, dtype: torch.dtype, width: int, names: str
) -> None:
    _check_spmm(make_block(30, 50, 200, dst_start=13), width, dtype, names)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [3, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rows_of_a_pool(
    make_block: MakeBlock, native_only: None, index: torch.dtype, width: int, dtype: torch.dtype
) -> None:
    block = make_block(20, 45, 150, dst_start=4, dtype=index, pool=30)  # several sources share a pool row
    _check_spmm(block, width, dtype, "edge_weight dst_scale self_scale")


@pytest.mark.parametrize(
    ("num_dst", "num_src", "num_edges"), [(0, 5, 0), (4, 5, 0), (0, 0, 0), (40, 41, 3), (1, 1, 30)]
)
@pytest.mark.parametrize("names", ["", "edge_weight src_scale dst_scale self_scale"])
def test_empty_rows_and_blocks(
    make_block: MakeBlock, native_only: None, num_dst: int, num_src: int, num_edges: int, names: str
) -> None:
    _check_spmm(make_block(num_dst, num_src, num_edges), 17, torch.float64, names)


def test_no_columns(make_block: MakeBlock, native_only: None) -> None:
    assert aggregate(make_block(3, 5, 9), torch.empty(5, 0)).shape == (3, 0)


@settings(max_examples=60, deadline=None)
@given(
    num_dst=st.integers(0, 30), extra=st.integers(0, 30), num_edges=st.integers(0, 200), width=st.integers(1, 300),
    seed=st.integers(0, 1000), is_wide=st.booleans(), shift=st.integers(0, 30),
)  # fmt: skip
def test_any_shape_equals_reference(
    make_block: MakeBlock,
    num_dst: int,
    extra: int,
    num_edges: int,
    width: int,
    seed: int,
    is_wide: bool,
    shift: int,
) -> None:
    block = make_block(
        num_dst, num_dst + extra, num_edges if num_dst else 0, dst_start=min(shift, extra), seed=seed,
        dtype=torch.int64 if is_wide else torch.int32,
    )  # fmt: skip
    _check_spmm(block, width, torch.float64, "src_scale self_scale")


def test_mean_of_neighbours_by_hand(native_only: None) -> None:
    block = Block(torch.tensor([0, 2, 2, 3]), torch.tensor([1, 3, 2], dtype=torch.int32), 4)
    h = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    mean = aggregate(block, h, dst_scale=1 / block.drawn.clamp(min=1))
    assert mean.tolist() == [[5.0], [0.0], [4.0]]


def test_gradcheck(make_block: MakeBlock, native_only: None) -> None:
    block = make_block(6, 9, 25, dst_start=2)
    factors: dict[str, Any] = _factors(block, torch.float64, "edge_weight src_scale dst_scale self_scale")
    h = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: aggregate(block, t, **factors), (h,))


def test_factors_that_learn_get_their_gradient(make_block: MakeBlock) -> None:
    block = make_block(6, 9, 25)
    weight = torch.rand(25, dtype=torch.float64, requires_grad=True)
    h = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t, w: aggregate(block, t, edge_weight=w), (h, weight))


def test_without_a_given_transpose(make_block: MakeBlock, native_only: None) -> None:
    block, grads = make_block(6, 9, 25), []
    for transposed in (None, block.transposed):
        h = torch.ones(9, 4, requires_grad=True)
        spmm(block.indptr, block.indices, h, num_src=9, transposed=transposed).pow(2).sum().backward()
        grads.append(h.grad)
    assert grads[0] is not None
    assert torch.equal(grads[0], grads[1])


def test_takes_rows_that_are_not_contiguous(make_block: MakeBlock, native_only: None) -> None:
    block, h = make_block(6, 9, 25), torch.randn(4, 9).t()
    assert torch.equal(aggregate(block, h), aggregate(block, h.contiguous()))


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_same_bits_for_any_thread_count(
    make_block: MakeBlock, native_only: None, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    block = make_block(2000, 3000, 60_000, hub=True)
    results = []
    for count in (1, threads):
        monkeypatch.setenv("POLYHOP_THREADS", str(count))
        h = torch.randn(3000, 100, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = aggregate(block, h, src_scale=torch.linspace(0, 1, 3000))
        out.pow(2).sum().backward()
        results.append((out.detach(), h.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def _two_places(whole: Tensor, cut: int) -> Any:
    return SimpleNamespace(first=whole[:cut].clone(), second=whole[cut:].clone())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("names", ["", "edge_weight src_scale dst_scale self_scale"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_two_places_give_the_bits_of_one(
    make_block: MakeBlock, native_only: None, dtype: torch.dtype, width: int, names: str, index: torch.dtype
) -> None:
    block = make_block(20, 45, 150, dst_start=4, dtype=index, pool=30)
    assert block.rows is not None
    h = torch.randn(30, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64).to(dtype)
    factors: dict[str, Any] = _factors(block, reference.sum_dtype(dtype), names)
    expected = aggregate(block, h, **factors)
    together = aggregate(replace(block, rows=None), h[block.rows], **factors)
    assert torch.equal(expected, together)
    for cut in (0, 1, 13, 29, 30):
        assert torch.equal(aggregate(block, _two_places(h, cut), **factors), expected)


@pytest.mark.parametrize(
    ("num_dst", "num_src", "num_edges"), [(0, 5, 0), (4, 5, 0), (0, 0, 0), (40, 41, 3), (1, 1, 30)]
)
@pytest.mark.parametrize("names", ["", "edge_weight src_scale dst_scale self_scale"])
def test_two_places_of_empty_rows_and_blocks(
    make_block: MakeBlock, native_only: None, num_dst: int, num_src: int, num_edges: int, names: str
) -> None:
    block, h = make_block(num_dst, num_src, num_edges), torch.randn(num_src, 17)
    factors: dict[str, Any] = _factors(block, torch.float32, names)
    got = aggregate(
        block, _two_places(h, num_src // 2), **factors
    )  # no pool: the S rows themselves lie apart
    assert torch.equal(got, aggregate(block, h, **factors))
    assert aggregate(block, _two_places(h[:, :0], num_src // 2), **factors).shape == (num_dst, 0)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 5])
def test_two_places_for_any_thread_count(
    make_block: MakeBlock, native_only: None, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    block, h = make_block(2000, 3000, 60_000, hub=True, pool=500), torch.randn(500, 100)
    expected = aggregate(block, h, src_scale=torch.linspace(0, 1, 3000))
    monkeypatch.setenv("POLYHOP_THREADS", str(threads))
    assert torch.equal(aggregate(block, _two_places(h, 200), src_scale=torch.linspace(0, 1, 3000)), expected)


@pytest.mark.parametrize("has_pool", [True, False])
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float16])
def test_two_places_on_plain_torch(
    make_block: MakeBlock, monkeypatch: pytest.MonkeyPatch, has_pool: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    block = make_block(20, 45, 150, dst_start=4, pool=30 if has_pool else 0)
    h = torch.randn(30 if has_pool else 45, 5).to(dtype)
    factors: dict[str, Any] = _factors(block, reference.sum_dtype(dtype), "src_scale self_scale")
    expected = aggregate(block, h, **factors)
    for cut in (0, 13, h.shape[0]):
        assert torch.equal(aggregate(block, _two_places(h, cut), **factors), expected)


def test_two_places_get_no_gradient_but_factors_do(make_block: MakeBlock) -> None:
    block, h = make_block(6, 9, 25, pool=12), torch.randn(12, 5, dtype=torch.float64)
    weight = torch.rand(25, dtype=torch.float64, requires_grad=True)
    both = _two_places(h, 7)
    assert torch.autograd.gradcheck(lambda w: aggregate(block, both, edge_weight=w), (weight,))
    both.first.requires_grad_()
    with pytest.raises(InputError, match="spmm: rows in two places get no gradient; give one matrix"):
        aggregate(block, both)
    with torch.no_grad():
        aggregate(block, both)


def test_two_places_that_do_not_fit(make_block: MakeBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    block, h = make_block(3, 5, 9), torch.ones(4, 2)
    given: dict[str, Any] = {"indptr": block.indptr, "indices": block.indices, "num_src": 5}
    with pytest.raises(InputError, match="h must have num_src = 5 rows, got 8"):
        spmm(h=h, second=h, **given)
    with pytest.raises(
        InputError, match=r"second must be torch.float32 with the 2 columns of h, got .*\[1, 3\]"
    ):
        spmm(h=h, second=torch.ones(1, 3), **given)
    with pytest.raises(InputError, match="h on cpu, second on meta"):
        spmm(h=h, second=torch.ones(1, 2, device="meta"), **given)
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    spmm(h=h, second=h, rows=torch.tensor([0, 1, 2, 7, 3]), **given)
    with pytest.raises(KernelError, match=r"spmm: rows\[3\] = 8, outside 0 \.\. 7"):
        spmm(h=h, second=h, rows=torch.tensor([0, 1, 2, 8, 3]), **given)


@pytest.mark.parametrize(("position", "name"), [(9, "edge_weight"), (12, "dst_scale"), (13, "self_scale")])
def test_a_wrong_kernel_would_fail(
    make_block: MakeBlock, native_only: None, monkeypatch: pytest.MonkeyPatch, position: int, name: str
) -> None:
    """The checks above can fail: a kernel that forgets one factor is caught."""
    block, right = make_block(30, 50, 200, dst_start=13), native.call

    def forgetful(op: str, *args: Any) -> int:
        return right(op, *args[:position], None, *args[position + 1 :])

    _check_spmm(block, 17, torch.float32, name)
    monkeypatch.setattr(native, "call", forgetful)
    with pytest.raises(AssertionError):
        _check_spmm(block, 17, torch.float32, name)


def test_wrong_arguments(make_block: MakeBlock) -> None:
    block, h = make_block(3, 5, 9), torch.ones(5, 2)
    with pytest.raises(InputError, match=r"h must be a float matrix, got torch.int64 \[5, 2\]"):
        aggregate(block, h.long())
    with pytest.raises(InputError, match="h must have num_src = 5 rows, got 4"):
        aggregate(block, h[:4])
    with pytest.raises(InputError, match=r"edge_weight must have shape \[9\], got \[5\]"):
        aggregate(block, h, edge_weight=torch.ones(5))
    with pytest.raises(InputError, match=r"dst_scale must have shape \[3\], got \[3, 1\]"):
        aggregate(block, h, dst_scale=torch.ones(3, 1))
    with pytest.raises(InputError, match=r"rows must be int64, got torch\.int32"):
        spmm(block.indptr, block.indices, h, num_src=5, rows=torch.zeros(5, dtype=torch.int32))
    with pytest.raises(InputError, match=r"destinations 3 \.\. 6 exceed the 5 source rows"):
        spmm(block.indptr, block.indices, h, num_src=5, dst_start=3, self_scale=torch.ones(3))
    with pytest.raises(InputError, match="all tensors must be on one device"):
        spmm(block.indptr, block.indices, h.to("meta"), num_src=5)


def test_debug_mode_names_the_position(make_block: MakeBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    block = make_block(3, 5, 9)
    block.indices[4] = 5
    with pytest.raises(KernelError, match=r"spmm: indices\[4\] = 5, outside 0 \.\. 4"):
        aggregate(block, torch.ones(5, 2))
    block.indices[4] = 0
    with pytest.raises(KernelError, match=r"spmm: rows\[3\] = 7, outside 0 \.\. 6"):
        spmm(block.indptr, block.indices, torch.ones(7, 2), num_src=5, rows=torch.tensor([0, 1, 2, 7, 3]))
    aggregate(block, torch.ones(5, 2))
