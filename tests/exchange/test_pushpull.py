"""Pushed layers arrive as they were; parts are summed in rank order and gradients reach all who had one; slices join."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import PeerError
from polyhop.exchange.pushpull import Pull, PushWire, gather_slices
from polyhop.sample.part import DrawnLayer


def layer(num_src: int, num_dst: int, *, weighted: bool, seed: int = 0) -> DrawnLayer:
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 5, (num_dst,), generator=rng)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    num_edges = int(indptr[-1])
    indices = torch.randint(0, max(1, num_src), (num_edges,), generator=rng).int()
    weight = torch.rand(num_edges, generator=rng) if weighted else None
    return DrawnLayer(indptr, indices, num_src, weight, is_sampled=True)


def sizes_of(drawn: DrawnLayer) -> tuple[int, int, int]:
    return drawn.num_src, drawn.indptr.numel() - 1, drawn.indices.numel()


@pytest.mark.parametrize("num_nodes", [1, 256, 257, 70_000, 1 << 24, (1 << 24) + 1, 1 << 33])
@pytest.mark.parametrize(
    ("num_src", "num_dst"), [(0, 0), (1, 1), (200, 50), (256, 3), (257, 257), (70_000, 900)]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_layers_arrive_as_they_were(num_nodes: int, num_src: int, num_dst: int, weighted: bool) -> None:
    drawn = layer(num_src, num_dst, weighted=weighted)
    ids = torch.randint(0, num_nodes, (num_src,))
    if num_src:
        ids[0] = num_nodes - 1
    for counted in (torch.uint8, torch.int32):
        wire = PushWire(num_nodes, counted, weighted)
        data = wire.encode(ids, drawn)
        assert data.numel() == wire.num_bytes(*sizes_of(drawn))
        got, back = wire.decode(data, sizes_of(drawn), 1, is_sampled=True)
        assert torch.equal(got, ids)
        assert torch.equal(back.indptr, drawn.indptr)
        assert torch.equal(back.indices, drawn.indices)
        assert back.is_sampled
        assert (back.edge_weight is None) == (drawn.edge_weight is None)
        if drawn.edge_weight is not None and back.edge_weight is not None:
            assert torch.equal(back.edge_weight, drawn.edge_weight)


def test_ids_alone() -> None:
    drawn, wire = layer(200, 50, weighted=False), PushWire(1000, torch.uint8, has_edges=False)
    data = wire.encode(torch.arange(200), drawn)
    assert data.numel() == wire.num_bytes(*sizes_of(drawn)) == 400
    got, back = wire.decode(data, sizes_of(drawn), 1, is_sampled=True)
    assert torch.equal(got, torch.arange(200))
    assert (back.indptr.tolist(), back.indices.numel()) == ([0], 0)


@pytest.mark.parametrize("damage", ["id", "edge", "count"])
def test_damaged_layers_are_told(damage: str) -> None:
    drawn, wire = layer(200, 50, weighted=False), PushWire(900, torch.uint8)
    data = wire.encode(torch.arange(200), drawn)
    place = {"id": slice(0, 2), "edge": slice(400, 401), "count": slice(-1, None)}[damage]
    data[place] = 255
    with pytest.raises(PeerError, match="rank 2 pushed"):
        wire.decode(data, sizes_of(drawn), 2, is_sampled=True)


def pulled(line: Collective, holders: list[int], num_rows: list[int]) -> tuple[Tensor, list[Tensor | None]]:
    """(the sum at this rank, gradients of the weight with which it made each rank's part)."""
    like = torch.empty(0, 3, dtype=torch.float64)
    weights = [
        torch.full((), float(line.rank + 1), dtype=torch.float64, requires_grad=True) for _ in num_rows
    ]
    is_holder = line.rank in holders

    def part(p: int) -> Tensor:
        rows = torch.arange(num_rows[p] * 3, dtype=torch.float64).view(-1, 3) + 10 * p
        return rows * weights[p] if is_holder and num_rows[p] else like

    pull = Pull(line, holders, num_rows, like)
    token = pull.leave([part(p) for p in range(line.num_ranks) if p != line.rank], returns=True)
    z = pull.arrive(token, part(line.rank))
    (z * (line.rank + 2)).sum().backward()
    return z.detach(), [weight.grad for weight in weights]


@pytest.mark.parametrize(
    ("holders", "num_rows"),
    [([0, 1, 2], [2, 1, 4]), ([0, 2], [2, 3, 4]), ([1], [2, 0, 4]), ([0, 1, 2], [0, 0, 2])],
)
def test_parts_are_summed_and_gradients_return(holders: list[int], num_rows: list[int]) -> None:
    found = run_in_threads(3, pulled, holders, num_rows)
    total = sum(k + 1 for k in holders)
    for p, (z, _) in enumerate(found):
        rows = torch.arange(num_rows[p] * 3, dtype=torch.float64).view(-1, 3) + 10 * p
        assert torch.equal(z, rows * total)
        for k, (_, grads) in enumerate(found):
            grad: Any = grads[p]
            if k in holders and num_rows[p]:
                assert float(grad) == float(rows.sum()) * (p + 2)
            else:
                assert grad is None


def gathered(line: Collective, bounds: list[int]) -> list[Tensor]:
    whole = [torch.arange(3.0 * bounds[-1]).view(3, -1), -torch.arange(5.0 * bounds[-1]).view(5, -1)]
    own = [each[:, bounds[line.rank] : bounds[line.rank + 1]] for each in whole]
    return [a - b for a, b in zip(gather_slices(own, bounds, line).wait(), whole, strict=True)]


@pytest.mark.parametrize("bounds", [[0, 2, 5, 7], [0, 0, 1, 1], [0, 4, 4, 6]])
def test_slices_join(bounds: list[int]) -> None:
    for differences in run_in_threads(3, gathered, bounds):
        assert [each.shape for each in differences] == [(3, bounds[-1]), (5, bounds[-1])]
        assert all(not each.any() for each in differences)
