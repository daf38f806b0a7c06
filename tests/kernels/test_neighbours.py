from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels.neighbours import neighbours


def _lists(nodes: int, edges: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    degree = torch.bincount(torch.randint(max(nodes, 1), (edges,), generator=gen), minlength=nodes)[:nodes]
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    return indptr, torch.randint(max(nodes, 1), (int(indptr[-1]),), generator=gen).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("nodes", "edges"), [(0, 0), (1, 0), (1, 4), (7, 30), (40, 15), (3000, 20_000)])
def test_equals_sets(native_only: None, nodes: int, edges: int, dtype: torch.dtype) -> None:
    indptr, indices = _lists(nodes, edges, dtype)
    expected: list[set[int]] = [set() for _ in range(nodes)]
    for v in range(nodes):
        for u in indices[indptr[v] : indptr[v + 1]].tolist():
            if u != v:
                expected[v].add(u)
                expected[u].add(v)
    found, lists = neighbours(indptr, indices)
    assert lists.dtype == dtype
    assert [lists[found[v] : found[v + 1]].tolist() for v in range(nodes)] == [sorted(s) for s in expected]


@pytest.mark.parametrize("edges", [0, 25])
def test_equals_reference(monkeypatch: pytest.MonkeyPatch, edges: int) -> None:
    given = _lists(9, edges, torch.int32, seed=4)
    native = neighbours(*given)
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    assert all(torch.equal(a, b) for a, b in zip(native, neighbours(*given)))


def test_same_for_any_thread_count(native_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _lists(5000, 200_000, torch.int32)
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("POLYHOP_THREADS", threads)
        results.append(neighbours(*given))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="indptr must be int64"):
        neighbours(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]))
