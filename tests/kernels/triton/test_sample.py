from __future__ import annotations

import pytest
import torch

from polyhop.errors import InputError
from polyhop.kernels import Sampler, draw
from polyhop.kernels.sample import sample_reference

KEYS = [(1 << 63) + 5, 77, 1 << 40]


def _graph(num_nodes: int, num_edges: int, *, hub: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(num_edges)
    dst = torch.randint(num_nodes, (num_edges,), generator=gen)
    dst[:hub] = 3
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
    return indptr, torch.randint(num_nodes, (num_edges,), generator=gen).to(torch.int32)


@pytest.mark.parametrize("fanouts", [[1], [5, 3], [15, 10, 5], [-1, 4], [40, 2]], ids=str)
@pytest.mark.parametrize("method", ["uniform", "labor"])
def test_mini_batches_of_the_host(device: torch.device, fanouts: list[int], method: str) -> None:
    indptr, indices = _graph(300, 6000, hub=400)
    seeds = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:20]
    keys = KEYS[: len(fanouts)]
    sampler = Sampler(indptr.to(device), indices.to(device), keep_edges=True)
    for turn in range(2):  # the table is free again
        ours = sampler.sample(seeds.to(device), fanouts, keys, method=method)
        theirs = sample_reference(indptr, indices, seeds, fanouts, keys, method=method, keep_edges=True)
        assert torch.equal(ours.src_ids.cpu(), theirs.src_ids), turn
        assert torch.equal(ours.in_degree.cpu(), theirs.in_degree)
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert a.num_src == b.num_src
            for one, other in ((a.indptr, b.indptr), (a.indices, b.indices), (a.edge, b.edge)):
                assert one is not None
                assert other is not None
                assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("fanouts", [[3, 2], [6, 1, 2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_mini_batch_waits_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, fanouts: list[int], dtype: torch.dtype
) -> None:
    """How many edges and rows all hops have comes to the host together, at the end; also where nothing is drawn."""
    plain, waits = torch.Tensor.tolist, 0

    def counted(tensor: torch.Tensor) -> object:
        nonlocal waits
        waits += 1
        return plain(tensor)

    indptr, indices = _graph(50, 200)
    indptr = torch.cat([indptr, indptr[-1:].expand(20)])  # nodes without in-edges
    sampler, keys = Sampler(indptr.to(device), indices.to(device, dtype)), KEYS[: len(fanouts)]
    for seeds in ([60], [3, 69, 0], list(range(70))):
        given = torch.tensor(seeds)
        theirs = sample_reference(indptr, indices, given, fanouts, keys)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", counted)
            for name in ("item", "nonzero", "__int__", "__bool__", "cpu", "unique"):
                patch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits"))
            waits = 0
            ours = sampler.sample(given.to(device), fanouts, keys, are_checked=True)
            assert waits == 1
        assert torch.equal(ours.src_ids.cpu(), theirs.src_ids)
        assert torch.equal(ours.in_degree.cpu(), theirs.in_degree)
        assert all(
            torch.equal(a.indices.cpu(), b.indices) for a, b in zip(ours.layers, theirs.layers, strict=True)
        )


def test_draws_of_the_host_also_from_long_lists(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    indptr, indices = _graph(40, 71_000, hub=70_000)  # a list beyond 2^16 takes 64-bit draws
    rows = torch.tensor([3, 0, 3, 39])
    ids = torch.randint(1 << 40, (40,), generator=torch.Generator().manual_seed(2))
    ours = draw(indptr.to(device), indices.to(device), rows.to(device), 7, KEYS[0], ids=ids.to(device))
    monkeypatch.setenv("POLYHOP_KERNELS", "native")
    for one, other in zip(ours, draw(indptr, indices, rows, 7, KEYS[0], ids=ids), strict=True):
        assert torch.equal(one.cpu(), other)


def test_wrong_seeds_are_named(device: torch.device) -> None:
    indptr, indices = _graph(30, 90)
    sampler = Sampler(indptr.to(device), indices.to(device))
    with pytest.raises(InputError, match=r"seeds\[1\] = 30"):
        sampler.sample(torch.tensor([0, 30], device=device), [2], [1])
    with pytest.raises(InputError, match=r"seeds\[2\] = 4 appears before"):
        sampler.sample(torch.tensor([4, 1, 4], device=device), [2], [1])
