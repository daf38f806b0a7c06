from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.errors import InputError, KernelError
from polyhop.graph.block import Block
from polyhop.kernels import attention, native, reference
from polyhop.kernels.keys import Key, Purpose

MakeBlock = Callable[..., Block]
KEY = Key(seed=1).at(Purpose.ATTENTION_DROPOUT)

# Relative to the largest value, at least 1. float64: some hundred rounded steps. float32: our exp is within 2 units of the
# last place, and score gradients are small differences of products over up to 130 channels, summed in another order.
# bfloat16: inputs, output and gradients are rounded to 2^-9, and those products are taken with the rounded output.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 6e-2}
SHAPES = [(1, 1), (3, 7), (8, 32), (4, 64), (2, 16), (8, 8), (9, 5), (1, 47), (17, 3), (1, 130), (2, 128)]


def _inputs(
    block: Block, heads: int, channels: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(heads * 100 + channels)
    num_rows = block.num_src if block.rows is None else int(block.rows.max()) + 2
    sizes = [
        (num_rows, heads, channels),
        (num_rows, heads),
        (block.num_dst, heads),
        (block.num_dst, heads, channels),
    ]
    x, a_src, a_dst, grad = (
        torch.randn(*size, generator=gen, dtype=torch.float64).to(dtype) for size in sizes
    )
    return x, 2 * a_src, 2 * a_dst, grad


def _run(op: Callable[..., Tensor], block: Block, given: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """The output and the three gradients."""
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    out = op(block, *leaves, **options)
    out.backward(given[3])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _check_attention(block: Block, heads: int, channels: int, dtype: torch.dtype, **options: Any) -> None:
    given = _inputs(block, heads, channels, dtype)
    for ours, theirs in zip(
        _run(attention, block, given, **options),
        _run(reference.attention, block, given, **options),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        room = TOLERANCE[dtype] * max(1.0, theirs.abs().max().item() if theirs.numel() else 0)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=room)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "channels"), SHAPES)
@pytest.mark.parametrize("self_loop", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_equals_reference(
    make_block: MakeBlock,
    native_only: None,
    dtype: torch.dtype,
    heads: int,
    channels: int,
    self_loop: bool,
    dropout_p: float,
) -> None:
    block = make_block(20, 30, 110, dst_start=7, has_ids=True)  # repeated edges, stored loops, empty rows
    _check_attention(block, heads, channels, dtype, self_loop=self_loop, dropout_p=dropout_p, dropout_key=KEY)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("self_loop", [False, True])
@pytest.mark.parametrize(
    ("num_dst", "num_src", "num_edges"),
    [(0, 4, 0), (3, 4, 0), (0, 0, 0), (1, 1, 7), (50, 60, 4), (5, 6, 300)],
)
def test_empty_rows_and_blocks(
    make_block: MakeBlock,
    native_only: None,
    index: torch.dtype,
    self_loop: bool,
    num_dst: int,
    num_src: int,
    num_edges: int,
) -> None:
    _check_attention(
        make_block(num_dst, num_src, num_edges, dtype=index), 2, 5, torch.float64, self_loop=self_loop
    )


def test_weights_by_hand(native_only: None) -> None:
    block = Block(torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 1], dtype=torch.int32), 3)
    x, zero = torch.tensor([1.0, 2.0, 4.0]).reshape(3, 1, 1), torch.zeros(3, 1)
    assert attention(block, x, zero, zero, self_loop=False).flatten().tolist() == [3.0, 2.0, 0.0]
    # own rows join; destination 1's stored loop is not counted twice
    assert attention(block, x, zero, zero, self_loop=True).flatten().tolist() == pytest.approx(
        [7 / 3, 2.0, 4.0]
    )


def test_huge_scores_stay_finite(native_only: None, make_block: MakeBlock) -> None:
    block = make_block(5, 9, 40)
    x, a_src, a_dst, _ = _inputs(block, 2, 3, torch.float32)
    out = attention(block, x, 1e4 * a_src, 1e4 * a_dst, self_loop=True)
    expected = reference.attention(block, x, 1e4 * a_src, 1e4 * a_dst, self_loop=True)
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_nan_is_not_hidden(monkeypatch: pytest.MonkeyPatch, make_block: MakeBlock, mode: str) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    block = Block(torch.tensor([0, 3, 4]), torch.tensor([0, 1, 2, 2], dtype=torch.int32), 3)
    a_src = torch.tensor([[0.0], [torch.nan], [0.0]])
    out = attention(block, torch.ones(3, 1, 2), a_src, torch.zeros(2, 1), self_loop=False)
    assert out[0].isnan().all()
    assert out[1].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("self_loop", [False, True])
def test_gradcheck(make_block: MakeBlock, native_only: None, self_loop: bool) -> None:
    block = make_block(5, 8, 20, dst_start=2)
    x, a_src, a_dst, _ = (t.requires_grad_() for t in _inputs(block, 3, 4, torch.float64))

    def run(x: Tensor, a_src: Tensor, a_dst: Tensor) -> Tensor:
        return attention(block, x, a_src, a_dst, self_loop=self_loop, dropout_p=0.3, dropout_key=KEY)

    assert torch.autograd.gradcheck(run, (x, a_src, a_dst))


def test_rows_of_a_pool(make_block: MakeBlock, native_only: None) -> None:
    block = make_block(10, 20, 60, dst_start=3, pool=12)
    plain = Block(block.indptr, block.indices, 20, dst_start=3)
    given = _inputs(block, 2, 3, torch.float64)
    got = _run(attention, block, given, self_loop=True)
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    out = reference.attention(plain, leaves[0][block.rows], leaves[1][block.rows], leaves[2], self_loop=True)
    out.backward(given[3])
    for ours, theirs in zip(got, [out.detach(), *(leaf.grad for leaf in leaves)]):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_mask_depends_on_the_two_ids_only(make_block: MakeBlock, native_only: None) -> None:
    """The same edge drops the same heads in another block, at another position."""
    heads, ids = 9, torch.tensor([70, 80, 90])
    one = Block(torch.tensor([0, 1]), torch.tensor([1]), 2, src_ids=ids[:2])  # 80 -> 70
    two = Block(
        torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), 3, src_ids=ids[[1, 0, 2]], dst_start=0
    )  # 80 -> 70 is last
    options: dict[str, Any] = {"self_loop": False, "dropout_p": 0.5, "dropout_key": KEY}
    ones = torch.ones(3, heads, 1)
    zero = torch.zeros(3, heads)
    first = attention(one, ones[:2], zero[:2], zero[:1], **options)[0]
    moved = Block(two.indptr, torch.tensor([2, 1, 0]), 3, src_ids=two.src_ids)
    assert torch.equal(first, attention(moved, ones, zero, zero[:2], **options)[1])
    assert set(first.flatten().tolist()) == {0.0, 2.0}


def test_dropping_everything(make_block: MakeBlock) -> None:
    block = make_block(4, 6, 12)
    given = _inputs(block, 2, 3, torch.float32)
    for result in _run(attention, block, given, self_loop=True, dropout_p=1.0):
        assert not result.any()


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_same_bits_for_any_thread_count(
    make_block: MakeBlock, native_only: None, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    block = make_block(1500, 2000, 60_000, hub=True)
    given, results = _inputs(block, 3, 8, torch.float32), []
    for count in (1, threads):
        monkeypatch.setenv("POLYHOP_THREADS", str(count))
        results.append(_run(attention, block, given, self_loop=True, dropout_p=0.2, dropout_key=KEY))
    for one, many in zip(*results):
        assert torch.equal(one, many)


def test_a_wrong_kernel_would_fail(
    make_block: MakeBlock, native_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks above can fail: a kernel with a slightly wrong slope is caught."""
    block, right = make_block(20, 30, 110), native.call

    def sloppy(op: str, *args: Any) -> int:
        return right(op, *(a * 1.001 if isinstance(a, float) else a for a in args))

    _check_attention(block, 3, 7, torch.float32, self_loop=True)
    monkeypatch.setattr(native, "call", sloppy)
    with pytest.raises(AssertionError):
        _check_attention(block, 3, 7, torch.float32, self_loop=True)


def test_wrong_arguments(make_block: MakeBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(3, 5, 9)
    x, a_src, a_dst, _ = _inputs(block, 2, 3, torch.float32)
    with pytest.raises(InputError, match=r"x must be float \[5, H, C\], got torch.float32 \[5, 6\]"):
        attention(block, x.flatten(1), a_src, a_dst, self_loop=False)
    with pytest.raises(InputError, match=r"a_src must be float \[5, 2\], got torch.float32 \[3, 2\]"):
        attention(block, x, a_dst, a_dst, self_loop=False)
    with pytest.raises(InputError, match=r"a_dst must be float \[3, 2\], got torch.float32 \[3, 1\]"):
        attention(block, x, a_src, a_dst[:, :1], self_loop=False)
    with pytest.raises(InputError, match=r"dropout_p must be in 0 \.\. 1, got 1.5"):
        attention(block, x, a_src, a_dst, self_loop=False, dropout_p=1.5)
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    block.indices[2] = -1
    with pytest.raises(KernelError, match=r"attention: indices\[2\] = -1, outside 0 \.\. 4"):
        attention(block, x, a_src, a_dst, self_loop=False)
