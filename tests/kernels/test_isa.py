"""Every instruction set and every thread count gives the same bits, in value and gradient."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from polyhop.kernels import native

# Prints the instruction set in use and one digest per kernel.
PROGRAM = """
import hashlib, torch
from polyhop.graph.block import Block
from polyhop.kernels import *
from polyhop.kernels import native, procedural, varint
from polyhop.kernels.variates import sample_key

gen = torch.Generator().manual_seed(0)

def digest(name, *tensors):
    bits = b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    print(name, hashlib.sha256(bits).hexdigest())

def rand(*size, dtype):
    return torch.randn(*size, generator=gen, dtype=torch.float64).to(dtype)

num_dst, num_src, num_edges = 700, 900, 12000
dst = torch.randint(num_dst, (num_edges,), generator=gen)
dst[:4000] = 3  # a hub
indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
indptr[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
indices = torch.randint(num_src, (num_edges,), generator=gen)
print(native.library().ph_isa().decode())
digest("transpose", *transpose(indptr, indices, num_src))
digest("random", random_u32(5, torch.arange(1001)))
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    for width in (1, 7, 33, 128, 257):
        block = Block(indptr, indices.int(), num_src, dst_start=100)
        h = rand(num_src, width, dtype=dtype).requires_grad_()
        weight, own = torch.rand(num_edges, generator=gen), torch.rand(num_dst, generator=gen)
        out = aggregate(block, h, edge_weight=weight, self_scale=own)
        out.backward(rand(num_dst, width, dtype=dtype))
        digest(f"spmm {dtype} {width}", out, h.grad)
        rows, pool = torch.randint(400, (num_src,), generator=gen), rand(400, width, dtype=dtype)
        whole = spmm(indptr, indices.int(), pool, num_src=num_src, rows=rows, edge_weight=weight)
        out = spmm(indptr, indices.int(), pool[:150], second=pool[150:], num_src=num_src, rows=rows, edge_weight=weight)
        assert torch.equal(out, whole)
        digest(f"spmm of two places {dtype} {width}", out, gather_rows(pool[:150], rows, second=pool[150:]))
        leaf = rand(num_src, width, dtype=dtype).requires_grad_()
        out = dropout(leaf, None, 0.4, 99, relu=width % 2 == 1)
        out.backward(rand(num_src, width, dtype=dtype))
        digest(f"dropout {dtype} {width}", out, leaf.grad)
        bits = torch.tensor([1, 2, 4, 8, 16, 32], dtype=torch.uint8)[torch.randint(6, (num_src,), generator=gen)]
        message = quantise_rows(leaf, bits, 31)
        digest(f"quantise {dtype} {width}", message, dequantise_rows(message, bits, width, dtype=dtype))
        ids = torch.randint(num_src, (2000,), generator=gen)
        digest(f"gather {dtype} {width}", gather_rows(leaf, ids))
        digest(f"scatter {dtype} {width}", scatter_add_rows(h.detach().clone(), ids, rand(2000, width, dtype=dtype)))
    for heads, channels in ((1, 7), (8, 32), (3, 40), (2, 128), (4, 16), (8, 8)):
        sizes = (num_src, heads, channels), (num_src, heads), (num_dst, heads)
        given = [rand(*size, dtype=dtype).requires_grad_() for size in sizes]
        out = attention(block, *given, self_loop=True, dropout_p=0.3, dropout_key=8)
        out.backward(rand(num_dst, heads, channels, dtype=dtype))
        digest(f"attention {dtype} {heads}x{channels}", out, *(t.grad for t in given))
rows, ids = torch.randint(num_dst, (9000,), generator=gen), torch.randint(1 << 62, (num_src,), generator=gen)
for fanout in (5, 12, 70, -1):
    for method in ("uniform", "labor"):
        got = draw(indptr, indices, rows, fanout, 77, ids=ids[:num_dst], source_ids=ids, method=method)
        digest(f"draw {method} {fanout}", *got)
    turning = sample_key(Key(5, 0, 3), 0, 8)
    got = draw(indptr, indices, rows, fanout, turning, ids=ids[:num_dst], source_ids=ids, method="labor")
    digest(f"draw labor between {fanout}", *got)
table = Relabel()
digest("relabel", table.add(ids[indices]), table.ids(), table.find(ids))
data = varint.encode(ids.sort().values)
digest("varint", data, varint.decode(data, num_src), varint.encode(indptr))
graph = procedural.Virtual(3, 1 << 40, 131)
ids = torch.randint(1 << 40, (700,), generator=gen)
digest("virtual rows", procedural.virtual_rows(graph, ids))
for method in ("uniform", "labor"):
    digest(f"virtual draw {method}", *procedural.virtual_draw(graph, ids, 9, 77, method=method))
"""


def _digests(isa: str, threads: int) -> list[str]:
    """First the instruction set that ran, then a line per kernel."""
    wish = {"POLYHOP_ISA": isa, "POLYHOP_THREADS": str(threads), "POLYHOP_KERNELS": "native"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **wish},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def base() -> list[str]:
    return _digests("base", 1)


@pytest.mark.parametrize(
    ("isa", "threads"), [("base", 3), ("avx2", 1), ("avx2", 2), ("avx512", 1), ("avx512", 5)]
)
def test_same_bits(base: list[str], isa: str, threads: int) -> None:
    got = _digests(isa, threads)
    if got[0] != isa:
        pytest.skip(f"this processor has no {isa} (best: {got[0]})")
    assert base[0] == "base"
    assert len(got) == len(base) > 60
    assert [f"{ours} instead of {theirs}" for ours, theirs in zip(got[1:], base[1:]) if ours != theirs] == []


def test_the_best_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library().ph_isa().decode() in ("base", "avx2", "avx512")
    assert native.status()["cpu"] == "native"
