"""The halo comes rank by rank: what is held at a time obeys the bound, and sums are those of all rows at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.exchange.crossing import Lists, Messages
from polyhop.exchange.quantised import QuantisedMessages
from polyhop.exchange.sequential import Held, SequentialCrossing
from polyhop.graph import Block, HaloBlock, Sizes
from polyhop.kernels.keys import Key
from polyhop.nn import GCNConv, SAGEConv

COLUMNS = 6
SEEDING = threading.Lock()


@dataclass
class Part:
    """n own rows, all marginal from ``central`` on; every rank lends other numbers of rows to every other."""

    block: Block
    lists: Lists
    num_central: int


def part_of(rank: int, num_ranks: int) -> Part:
    n, central = 12, 4
    lent = [
        torch.arange(0 if q == rank else 3 + (rank + 2 * q) % 5, dtype=torch.int64) for q in range(num_ranks)
    ]
    wanted = [0 if q == rank else 3 + (q + 2 * rank) % 5 for q in range(num_ranks)]
    halo = sum(wanted)
    lists = Lists(n, lent, wanted)
    edges = [[i, (i + 1) % n] for i in range(central)]
    for i in range(central, n):
        edges.append(sorted({i, (i * 5) % n} | {n + (i * 7 + k * 3) % halo for k in range(4) if halo}))
    indptr = torch.tensor([0, *(len(each) for each in edges)]).cumsum(0)
    indices = torch.tensor([j for each in edges for j in each], dtype=torch.int32)
    generator = torch.Generator().manual_seed(rank)
    weight = torch.rand(indices.numel(), generator=generator, dtype=torch.float64)
    degree = torch.randint(1, 9, (n + halo,), generator=generator, dtype=torch.int32)
    block = Block(
        indptr, indices, n + halo, edge_weight=weight, in_degree=degree, in_weight=degree.double(),
        src_ids=torch.arange(n + halo),
    )  # fmt: skip
    return Part(block, lists, central)


def through(line: Collective, depth: int, overlaps: bool, bits: int, kind: str) -> dict[str, Any]:
    part = part_of(line.rank, line.num_ranks)
    n = part.lists.num_own
    messages = Messages(part.lists)
    if bits < 32:
        ids = torch.arange(part.block.num_src)
        messages = QuantisedMessages(part.lists, bits, (ids[:n], ids[n:]))
    channel = SequentialCrossing(messages, line.fork(), overlaps=overlaps, depth=depth)
    sizes = Sizes(100, 100, 1 << 40)
    block = HaloBlock.of(part.block, part.num_central, channel, sizes, wanted=part.lists.wanted)
    layer = layer_of(kind)
    rows = rows_of(line.rank, n).requires_grad_()
    channel.begin_step(Key(1))
    out = layer(rows, block)
    (out * (1 + line.rank)).square().sum().backward()
    channel.end_step()
    gc.collect()
    return {
        "out": out.detach(), "grad": rows.grad, "halo": channel.halo_held, "lent": channel.lent_held,
        "weights": [p.grad for p in layer.parameters()],
    }  # fmt: skip


def layer_of(kind: str) -> Any:
    make: dict[str, Callable[..., Any]] = {"gcn": GCNConv, "sage": SAGEConv}
    with SEEDING:  # ranks are threads, and torch's generator is one
        torch.manual_seed(0)
        return make[kind](COLUMNS, COLUMNS).double()


def rows_of(rank: int, n: int) -> Tensor:
    return torch.randn(
        n, COLUMNS, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64
    ).contiguous()


def at_once(num_ranks: int, kind: str) -> list[dict[str, Any]]:
    """The same with all halo rows there, and gradients that find their way by autograd."""
    parts = [part_of(rank, num_ranks) for rank in range(num_ranks)]
    rows = [rows_of(rank, part.lists.num_own).requires_grad_() for rank, part in enumerate(parts)]
    found, total = [], torch.zeros((), dtype=torch.float64)
    for rank, part in enumerate(parts):
        halo = [rows[q][parts[q].lists.lent[rank]] for q in range(num_ranks)]
        layer = layer_of(kind)
        out = layer(torch.cat([rows[rank], *halo]), part.block)
        total = total + (out * (1 + rank)).square().sum()
        found.append({"out": out.detach(), "layer": layer})
    total.backward()  # type: ignore[no-untyped-call]
    return [
        {"out": each["out"], "grad": rows[rank].grad, "weights": [p.grad for p in each["layer"].parameters()]}
        for rank, each in enumerate(found)
    ]


@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("depth", "overlaps"), [(0, True), (1, True), (1, False), (2, True)])
def test_sums_are_those_of_all_rows_at_once(kind: str, num_ranks: int, depth: int, overlaps: bool) -> None:
    expected = at_once(num_ranks, kind)
    found = run_in_threads(num_ranks, through, depth, overlaps, 32, kind)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one["out"], other["out"], atol=1e-12)
        assert torch.allclose(one["grad"], other["grad"], atol=1e-11)
        for a, b in zip(one["weights"], other["weights"], strict=True):
            assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("bits", [32, 2, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (16, 8))])
def test_what_is_held_obeys_the_bound(num_ranks: int, depth: int, bits: int) -> None:
    """(1 + depth) max_j s_j D values, of rows that come and of rows that leave; codes of few bits beside them."""
    for rank, found in enumerate(run_in_threads(num_ranks, through, depth, True, bits, "gcn")):
        lists = part_of(rank, num_ranks).lists
        row = COLUMNS * 8
        most = max(lists.wanted), max(ids.numel() for ids in lists.lent)
        for held, largest in zip((found["halo"], found["lent"]), most, strict=True):
            assert held.now == 0
            assert 0 < held.peak <= (1 + depth) * largest * row + (0 if bits == 32 else largest * row // 4)
            if bits == 32:
                assert held.peak >= largest * row
        if bits == 32 and num_ranks == 5 and depth < 2:
            assert found["halo"].peak < sum(lists.wanted) * row


def test_held_counts_until_a_tensor_is_gone() -> None:
    held, kept = Held(), torch.zeros(10)
    held.watch(kept)
    other = torch.zeros(5)
    held.watch(other)
    view = other[:2]
    assert held.now == held.peak == 60
    del other
    gc.collect()
    assert held.now in (40, 60)  # a view may keep it
    del view, kept
    gc.collect()
    assert (held.now, held.peak) == (0, 60)
