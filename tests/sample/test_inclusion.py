"""Inclusion probabilities against how often the real sampler meets each node, and against what can be told by hand.

Tolerances: 1500 trials put a frequency within 0.013 of its mean (one standard deviation); single nodes get 0.08, sums over
all nodes 5 %, which leaves room for the stated approximation (readers are taken as independent).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from polyhop.graph import Graph
from polyhop.sample import NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion

TRIALS, PER_NODE, IN_ALL = 1500, 0.08, 0.05


def random_graph(num_nodes: int, degree: float, *, symmetric: bool) -> Graph:
    """Every edge with the same probability; the first twentieth of the nodes is isolated."""
    joined = torch.rand(num_nodes, num_nodes, generator=torch.Generator().manual_seed(0)) < degree / num_nodes
    joined.fill_diagonal_(False)
    if symmetric:
        joined = torch.triu(joined, 1)
        joined = joined | joined.T
    joined[: num_nodes // 20] = False
    joined[:, : num_nodes // 20] = False
    dst, src = joined.nonzero(as_tuple=True)
    return Graph.from_edges(torch.stack([src, dst]), num_nodes=num_nodes)


def path(num_nodes: int) -> Graph:
    """Node v reads from v - 1."""
    nodes = torch.arange(1, num_nodes)
    return Graph.from_edges(torch.stack([nodes - 1, nodes]), num_nodes=num_nodes)


def frequencies(graph: Graph, seeds: Tensor, batch_size: int, fan_outs: Sequence[int]) -> list[Tensor]:
    """How often each node is known after each hop, over mini-batches of random seeds."""
    rng = torch.Generator().manual_seed(1)
    sampler = NeighbourSampler(graph, fan_outs, seed=2)
    seen = [torch.zeros(graph.num_nodes, dtype=torch.float64) for _ in range(len(fan_outs) + 1)]
    for step in range(TRIALS):
        chosen = seeds[torch.randperm(seeds.numel(), generator=rng)[:batch_size]]
        batch = sampler.sample(chosen, 0, step)
        seen[0][chosen] += 1
        for counts, block in zip(seen[1:], reversed(batch.blocks), strict=True):
            counts[batch.input_ids[: block.num_src]] += 1
    return [counts / TRIALS for counts in seen]


def predicted(
    graph: Graph, seeds: Tensor, batch_size: int, fan_outs: Sequence[int], *, is_symmetric: bool = False
) -> list[Tensor]:
    start = torch.zeros(graph.num_nodes, 1, dtype=torch.float64)
    start[seeds] = batch_size / seeds.numel()
    return [hop[:, 0] for hop in inclusion(full_block(graph), start, fan_outs, is_symmetric=is_symmetric)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for hop, (p, frequency) in enumerate(zip(found, expected, strict=True)):
        assert float((p - frequency).abs().max()) <= PER_NODE, hop
        assert float(p.sum()) == pytest.approx(float(frequency.sum()), rel=IN_ALL), hop


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_dense_graph(symmetric: bool) -> None:
    graph, seeds = random_graph(60, 30, symmetric=symmetric), torch.arange(0, 60, 2)
    expected = frequencies(graph, seeds, 3, [5, 4, 3])
    assert float(expected[1].sum()) < 0.5 * float(expected[3].sum())  # neither nothing nor everything
    assert_close(predicted(graph, seeds, 3, [5, 4, 3]), expected)


def test_a_sparse_directed_graph() -> None:
    graph, seeds = random_graph(200, 4, symmetric=False), torch.arange(0, 200, 2)
    assert_close(predicted(graph, seeds, 5, [3, 2, 2]), frequencies(graph, seeds, 5, [3, 2, 2]))


def test_a_sparse_symmetric_graph_needs_to_be_called_so() -> None:
    """A node that was reached through v draws v in vain; taken for new, that makes a quarter too many."""
    graph, seeds = random_graph(200, 4, symmetric=True), torch.arange(0, 200, 2)
    expected = frequencies(graph, seeds, 5, [3, 2, 2])
    better = predicted(graph, seeds, 5, [3, 2, 2], is_symmetric=True)
    assert_close(better, expected)
    plain = predicted(graph, seeds, 5, [3, 2, 2])
    assert float(plain[-1].sum()) > 1.15 * float(expected[-1].sum())
    for hop in (2, 3):
        errors = [float((p[hop] - expected[hop]).abs().mean()) for p in (better, plain)]
        assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("fanout", [1, 3, -1])
def test_one_hop_from_certain_seeds_is_exact(fanout: int) -> None:
    """Seeds draw independently: v is missed if each of its readers misses it."""
    graph, seeds = random_graph(80, 8, symmetric=False), torch.arange(10, 30)
    found = predicted(graph, seeds, 20, [fanout])[1]
    for v in range(80):
        missed = 0.0 if v in seeds else 1.0
        for w in seeds.tolist():
            sources = graph.indices[graph.indptr[w] : graph.indptr[w + 1]]
            if v in sources:
                missed *= 1 - (1.0 if fanout < 0 else min(1.0, fanout / sources.numel()))
        assert float(found[v]) == pytest.approx(1 - missed, abs=1e-12)


def test_a_path_is_exact() -> None:
    found = predicted(path(6), torch.tensor([5]), 1, [1, 1, 1])
    assert [p.nonzero()[:, 0].tolist() for p in found] == [[5], [4, 5], [3, 4, 5], [2, 3, 4, 5]]
    assert found[-1].tolist() == pytest.approx([0, 0, 1, 1, 1, 1])
    half = predicted(path(6), torch.tensor([5, 0]), 1, [1, 1, 1])
    assert half[-1].tolist() == pytest.approx([0.5, 0, 0.5, 0.5, 0.5, 0.5])


def test_a_node_known_for_long_draws_again_in_every_hop() -> None:
    """A seed of in-degree 4 with fan-outs 1, 1: by hop 2 it has drawn a given neighbour with 1 - (3/4)^2."""
    graph = Graph.from_edges(torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), num_nodes=5)
    found = predicted(graph, torch.tensor([0]), 1, [1, 1])
    assert found[1][1:].tolist() == pytest.approx([0.25] * 4)
    assert found[2][1:].tolist() == pytest.approx([1 - 0.75**2] * 4)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("fan_outs", [[3, 2, 2], [-1, 2, -1], [1, 1, 1, 1]], ids=str)
def test_probabilities_grow_with_hops_and_isolated_nodes_stay(
    fan_outs: list[int], is_symmetric: bool
) -> None:
    graph, seeds = random_graph(100, 5, symmetric=True), torch.arange(0, 100, 3)
    found = predicted(graph, seeds, 4, fan_outs, is_symmetric=is_symmetric)
    assert len(found) == len(fan_outs) + 1
    for before, after in pairwise(found):
        assert bool((after >= before).all())
        assert 0 <= float(after.min()) <= float(after.max()) <= 1
        torch.testing.assert_close(after[:5], found[0][:5], rtol=0, atol=1e-15)  # isolated


def test_larger_fan_outs_reach_more() -> None:
    graph, seeds = random_graph(100, 8, symmetric=False), torch.arange(0, 100, 3)
    last = [predicted(graph, seeds, 4, [fanout, fanout])[-1] for fanout in (1, 2, 5, -1)]
    for smaller, larger in pairwise(last):
        assert bool((larger >= smaller - 1e-12).all())
        assert float(larger.sum()) > float(smaller.sum())


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_certain_seeds_that_take_everything_reach_what_can_be_reached(is_symmetric: bool) -> None:
    graph = random_graph(60, 3, symmetric=True)
    seeds = torch.tensor([10, 20])
    reached = torch.zeros(60, dtype=torch.bool)
    reached[seeds] = True
    found = predicted(graph, seeds, 2, [-1, -1, -1], is_symmetric=is_symmetric)
    for p in found:
        assert torch.equal(p, reached.double())
        reader = graph.destinations[reached[graph.indices.long()]]  # symmetric: who is read reads back
        reached[reader] = True
    everyone = predicted(graph, torch.arange(60), 60, [2, -1], is_symmetric=is_symmetric)
    assert torch.equal(everyone[-1], torch.ones(60, dtype=torch.float64))


def test_several_sets_of_seeds_at_once_do_not_mix() -> None:
    graph = random_graph(80, 6, symmetric=True)
    start = torch.zeros(80, 3, dtype=torch.float64)
    start[:20, 0], start[30:40, 1] = 0.3, 1.0
    both = inclusion(full_block(graph), start, [3, -1], is_symmetric=True)
    for column in range(3):
        alone = inclusion(full_block(graph), start[:, column : column + 1], [3, -1], is_symmetric=True)
        for a, b in zip(both, alone, strict=True):
            assert torch.equal(a[:, column], b[:, 0])
    assert float(both[-1][:, 2].abs().max()) == 0


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_edges_too_many_to_turn_round(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    graph = random_graph(80, 6, symmetric=False)
    given = graph, torch.arange(10, 50), 10, [3, -1, 2]
    expected = predicted(*given)
    monkeypatch.setattr("polyhop.sample.inclusion._MOST_TURNED", 0)
    monkeypatch.setattr("polyhop.sample.inclusion._PIECE", piece)
    for mine, theirs in zip(predicted(*given), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    bare = Graph.from_edges(torch.zeros(2, 0, dtype=torch.int64), num_nodes=3)
    assert torch.equal(predicted(bare, torch.arange(2), 1, [2])[-1], torch.tensor([0.5, 0.5, 0.0]).double())
