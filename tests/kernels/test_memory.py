"""Freed memory is kept inside, and only there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polyhop.kernels import kept_memory, native

FAULTS = """
import resource, sys
import torch
from polyhop.kernels import kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 24)  # 64 MiB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with kept_memory() as is_on:
    faults()  # the heap grows to its size
    kept = faults()
print(is_on, kept, faults())
"""


def test_large_blocks_are_reused_inside_and_given_back_after() -> None:
    if not native.serves(op="ph_keep_memory"):
        pytest.skip("needs the native library")
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    is_on, kept, plain = done.stdout.split()
    assert is_on == "True"
    assert int(kept) < 16_384  # less than one block's pages in ten rounds
    assert int(plain) > 10 * int(kept)


def test_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KEEP_MEMORY", "0")
    with kept_memory() as is_on:
        assert not is_on
