"""Kernels of a mini-batch step compile for a Hopper device, which need not be there: the interpreter takes more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
from polyhop.kernels.triton import gather, sample, segments, spmm, transpose

i64, i32 = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
many = {"BLOCK": 1024, "num_warps": 4}
draws = {"FANOUT": 5, "P": 8, "BLOCK": 32, "num_warps": 2}
sample._begin.warmup(i64, i64, i64, i32, i32, i64, 5, grid=(3,), **many)
sample._draw.warmup(i64, i64, i64, i64, i64, 9, 7, 8, grid=(3,), **draws)
for keep in (None, i64):
    sample._draw_hop.warmup(i64, i32, i64, i64, i64, i32, i32, keep, 1, 7, 8, grid=(3,), **draws)
sample._mark_first.warmup(i32, i32, i64, i64, i32, i32, 1, 9, 9, grid=(3,), **many)
sample._give_rows.warmup(i32, i64, i64, i32, i32, i64, i32, i32, i32, i64, 1, 9, 9, grid=(3,), **many)
sample._set_free.warmup(i64, i64, i32, 4, grid=(3,), **many)
segments._count_pieces.warmup(i64, i64, 9, 512, grid=(3,), **many)
transpose._turn.warmup(i32, i64, i64, i64, i32, i32, 9, 9, 9, 5, grid=(3,), **many)
for dtype, total in ((torch.float32, tl.float32), (torch.float64, tl.float64)):
    x = torch.zeros(64, dtype=dtype)
    for second, bad in ((None, None), (x, None), (x, i64)):
        gather._gather.warmup(
            x, second, i64, None, x, bad, 9, 9, 9, 25, UNIT=4, BLOCK_R=8, BLOCK_F=64, num_warps=1, grid=(3,)
        )
    sums = {"UNIT": 4, "SUM": total, "ADDS": False, "BLOCK_E": 8, "BLOCK_F": 64, "num_warps": 1, "grid": (3,)}
    for rows, means, own in ((i64, x, x), (None, x, None), (None, None, None)):
        spmm._lists.warmup(
            i64, i64, i32, rows, x, 25, None, x, None, None, means, own, x, x, 9, 0, 512, 0, 9, 0, **sums
        )
        spmm._long_lists.warmup(i64, i64, rows, x, 25, None, None, means, own, x, x, 9, 0, 9, 0, **sums)
print("compiled")
"""


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "compiled", run.stderr[-3000:]
