"""Rows of windows, predicted: against the formula, against simulated pools, and against mini-batches really drawn.

Tolerances: the histogram costs 0.1 %; simulated windows have a spread of a few percent, of which many are averaged, so 4 %;
really drawn mini-batches get the tenth that is promised.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Graph
from polyhop.sample import NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.reuse import Reuse, expected_rows, reuse_of_ranks

KS = [1, 2, 3, 8, 32, 100]


def probabilities(kind: str, num_nodes: int = 4000, seed: int = 0) -> Tensor:
    u = torch.rand(num_nodes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return {
        "skewed": torch.exp(-9 * u),
        "wide": 0.9 * u**4,
        "flat": torch.full_like(u, 0.05),
        "certain": (u < 0.3).double(),
        "mixed": torch.where(u < 0.2, torch.ones_like(u), 1e-4 * u),
    }[kind]


@pytest.mark.parametrize("kind", ["skewed", "wide", "flat", "certain", "mixed"])
def test_the_formula(kind: str) -> None:
    p = probabilities(kind)
    distinct, new = expected_rows(p, KS)
    for k, found, fresh in zip(KS, distinct.tolist(), new.tolist(), strict=True):
        missed = (1 - p) ** k
        assert found == pytest.approx(float((1 - missed).sum()), rel=1e-3)
        assert fresh == pytest.approx(float(((1 - missed) * missed).sum()), rel=2e-3, abs=1e-6)


@given(st.lists(st.floats(0, 1), max_size=50), st.floats(0.5, 1000), st.floats(0, 1000))
@settings(max_examples=100, deadline=None)
def test_bounds(values: list[float], num_batches: float, after: float) -> None:
    reuse = Reuse.of(torch.tensor(values, dtype=torch.float64))
    distinct, fresh = reuse.distinct(num_batches), reuse.fresh(num_batches, after)
    assert 0 <= fresh <= distinct + 1e-9
    assert distinct <= reuse.num_rows + 1e-9 <= len(values) + 1e-8
    assert fresh == pytest.approx(reuse.distinct(after + num_batches) - reuse.distinct(after), abs=1e-6)
    if 0 < distinct < reuse.num_rows - 1e-3:
        assert reuse.distinct(reuse.horizon(distinct)) == pytest.approx(distinct, rel=1e-6)


def test_a_pool_for_everything_never_forgets() -> None:
    reuse = Reuse.of(probabilities("flat"))
    assert reuse.horizon(4000) == math.inf
    assert reuse.fresh(3, math.inf) == 0


def test_nothing_is_likely() -> None:
    reuse = Reuse.of(torch.zeros(5, dtype=torch.float64))
    assert (reuse.num_rows, reuse.distinct(3), reuse.fresh(3, 1), reuse.horizon(0)) == (0, 0, 0, math.inf)
    assert expected_rows(torch.empty(0, dtype=torch.float64), [1, 2])[0].tolist() == [0, 0]


@pytest.mark.parametrize("kept", [0, 1, 500, 4000, 9000])
def test_the_most_likely_rows_may_be_kept_elsewhere(kept: int) -> None:
    p = probabilities("skewed").sort(descending=True).values
    reuse = Reuse.of(p).without(kept)
    assert reuse.num_rows == max(0, 4000 - kept)
    for k in (1, 10):
        assert reuse.distinct(k) == pytest.approx(float((1 - (1 - p[kept:]) ** k).sum()), rel=5e-3)


def simulated_pool(p: Tensor, k: int, pool_rows: int, num_windows: int) -> float:
    """New rows of a window, the mean after the pool is full: least recently used rows make room, ties at random."""
    rng = torch.Generator().manual_seed(1)
    last = torch.full_like(p, -math.inf)  # window of last use; -inf = not held
    fetched, counted = 0, 0
    for window in range(num_windows):
        needed = (torch.rand(k, p.numel(), dtype=torch.float64, generator=rng) < p).any(0)
        is_full = int((last > -math.inf).sum()) == pool_rows
        if is_full and window > num_windows // 3:
            fetched += int((needed & torch.isinf(last)).sum())
            counted += 1
        last[needed] = window + 0.5 * torch.rand(int(needed.sum()), dtype=torch.float64, generator=rng)
        last[torch.argsort(last, descending=True)[pool_rows:]] = -math.inf
    return fetched / counted


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("kind", ["skewed", "wide", "flat"])
def test_a_pool_of_recent_rows(kind: str, k: int, share: float) -> None:
    p = probabilities(kind)
    pool_rows = min(int(share * Reuse.of(p).distinct(2 * k)), 2800)  # a larger one is hardly ever full
    new = float(expected_rows(p, [k], pool_rows=pool_rows)[1])
    expected = simulated_pool(p, k, pool_rows, 120)
    assert new == pytest.approx(expected, rel=0.04, abs=3)


def test_more_memory_means_fewer_new_rows() -> None:
    p = probabilities("skewed")
    found = [float(expected_rows(p, [4], pool_rows=rows)[1]) for rows in (1000, 1500, 2000, 3000, 4000)]
    assert all(more > less for more, less in pairwise(found))


def power_law(num_nodes: int, num_communities: int) -> tuple[Graph, Tensor]:
    """Symmetric, communities of nodes with very different degrees, a sixth of the edges between them."""
    rng = torch.Generator().manual_seed(0)
    community = torch.randint(0, num_communities, (num_nodes,), generator=rng)
    weight = (1 - torch.rand(num_nodes, generator=rng, dtype=torch.float64)).pow(-1 / 1.4).clamp(max=200)
    ends = []
    for _ in range(2):
        ends.append(torch.multinomial(weight, 30 * num_nodes, replacement=True, generator=rng))
    a, b = ends
    is_inside = community[a] == community[b]
    is_kept = (is_inside | (torch.rand(a.numel(), generator=rng) < 0.2 / num_communities)) & (a != b)
    a, b = a[is_kept], b[is_kept]
    code = torch.unique(torch.cat([a * num_nodes + b, b * num_nodes + a]))
    edges = torch.stack([code % num_nodes, code // num_nodes])
    return Graph.from_edges(edges, num_nodes=num_nodes), community


@pytest.mark.parametrize("fan_outs", [[10, 5, 3], [5, 10]], ids=str)
def test_windows_really_drawn(fan_outs: list[int]) -> None:
    """Rows that rank 0 does not own, of every window of an epoch, and those that the window before did not have."""
    graph, community = power_law(8192, 8)
    owner, train = community % 4, torch.arange(0, 8192, 8)
    steps = 32
    batch_size = train.numel() // steps
    loader = NeighborLoader(graph, fan_outs, train, batch_size, seed=1, gather=False)
    sampler = NeighbourSampler(graph, fan_outs, seed=1)
    needed = []
    for epoch in range(2):
        for step, seeds in enumerate(loader.order(epoch).split(batch_size)):
            is_input = torch.zeros(8192, dtype=torch.bool)
            is_input[sampler.sample(seeds[owner[seeds] == 0], epoch, step).input_ids] = True
            needed.append(is_input & (owner != 0))
    start = torch.zeros(8192, 1, dtype=torch.float64)
    start[train[owner[train] == 0]] = 1 / steps
    likely = inclusion(full_block(graph), start, fan_outs, is_symmetric=True)[-1][owner != 0, 0]
    ks = [1, 2, 4, 8, 16, 32]
    distinct, new = expected_rows(likely, ks)
    for at, k in enumerate(ks):
        windows = torch.stack(needed).view(-1, k, 8192).any(1)
        rows = float(windows.sum()) / windows.shape[0]
        assert float(distinct[at]) == pytest.approx(rows, rel=0.1), k
        if k <= 8:  # larger windows leave few new rows, and few of them to average
            lacking = float((windows[1:] & ~windows[:-1]).sum()) / (windows.shape[0] - 1)
            assert float(new[at]) == pytest.approx(lacking, rel=0.1), k


def reuse_on(line: Collective, likely: Tensor, has_own: bool) -> list[tuple[float, float]]:
    own = likely.chunk(line.num_ranks)[line.rank]
    found = reuse_of_ranks(own, line, has_own=has_own)
    return [(each.distinct(1), each.distinct(7)) for each in found]


@pytest.mark.parametrize("has_own", [False, True])
def test_ranks_add_up_what_owners_know(has_own: bool) -> None:
    likely = torch.stack([probabilities("skewed", 600, seed) for seed in range(3)], dim=1)
    results = run_in_threads(3, reuse_on, likely, has_own)
    assert results[0] == results[1] == results[2]
    for rank, found in enumerate(results[0]):
        remote = likely[:, rank].clone()
        if not has_own:
            remote.chunk(3)[rank].zero_()
        for value, m in zip(found, (1, 7), strict=True):
            assert value == pytest.approx(float((1 - (1 - remote) ** m).sum()), rel=1e-3)
