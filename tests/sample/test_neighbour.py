"""NeighbourSampler: blocks that chain, carry what layers need, and are a pure function of (seed, epoch, step)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from polyhop.errors import ConfigError, InputError
from polyhop.graph import Block, Graph
from polyhop.sample import MiniBatch, NeighbourSampler

MakeGraph = Callable[..., Graph]


def assert_same_block(a: Block, b: Block) -> None:
    assert (a.num_src, a.dst_start, a.is_sampled) == (b.num_src, b.dst_start, b.is_sampled)
    for name in ("indptr", "indices", "src_ids", "edge_weight", "in_degree", "in_weight", "loop_weight"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name


def assert_same(a: MiniBatch, b: MiniBatch) -> None:
    assert a.step == b.step
    assert torch.equal(a.seeds, b.seeds)
    assert len(a.blocks) == len(b.blocks)
    for x, y in zip(a.blocks, b.blocks):
        assert_same_block(x, y)


def test_blocks_chain_from_input_to_seeds(make_graph: MakeGraph) -> None:
    graph = make_graph(300)
    seeds = torch.arange(20, 60)
    batch = NeighbourSampler(graph, [4, 3, -1]).sample(seeds, epoch=2, step=5)
    assert batch.step == 5
    assert len(batch.blocks) == 3
    assert torch.equal(batch.blocks[-1].dst_ids(), seeds)
    assert torch.equal(batch.input_ids, batch.blocks[0].src_ids)
    for inner, outer in zip(batch.blocks, batch.blocks[1:]):
        assert torch.equal(inner.dst_ids(), outer.src_ids)
        assert inner.num_dst == outer.num_src
    assert [block.is_sampled for block in batch.blocks] == [False, True, True]
    assert int(batch.blocks[-1].drawn.max()) == 4
    assert batch.num_edges == sum(int(block.indptr[-1]) for block in batch.blocks)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_and_edges_carry_their_graph_values(make_graph: MakeGraph, weighted: bool) -> None:
    graph = make_graph(300, weighted=weighted)
    assert graph.loop_weight is not None, "the graph of this test has loops"
    batch = NeighbourSampler(graph, [5, 5], seed=1).sample(torch.arange(0, 300, 3), 0, 0)
    weight = {}
    if weighted:
        assert graph.edge_weight is not None
        edges = zip(graph.edge_index[0].tolist(), graph.edge_index[1].tolist())
        weight = dict(zip(edges, graph.edge_weight.tolist(), strict=True))
    for block in batch.blocks:
        ids = block.src_ids
        assert ids is not None
        assert torch.equal(block.in_degree, graph.in_degree[ids])
        assert torch.equal(block.loop_weight, graph.loop_weight[ids])
        assert (block.in_weight is None) == (not weighted)
        assert (block.edge_weight is None) == (not weighted)
        if weighted:
            assert torch.equal(block.in_weight, graph.in_weight[ids])
            dst = torch.repeat_interleave(block.dst_ids(), block.drawn).tolist()
            src = ids[block.indices.long()].tolist()
            assert block.edge_weight.tolist() == [weight[edge] for edge in zip(src, dst)]


def test_a_graph_without_loops_has_no_loop_weight() -> None:
    graph = Graph(torch.tensor([0, 1, 2]), torch.tensor([1, 0]))
    assert NeighbourSampler(graph, [1]).sample(torch.tensor([0]), 0, 0).blocks[0].loop_weight is None


def test_draws_are_a_function_of_seed_epoch_and_step(make_graph: MakeGraph) -> None:
    graph = make_graph(400)
    seeds = torch.arange(100, 300)

    def sources(seed: int, epoch: int, step: int) -> list[int]:
        batch = NeighbourSampler(graph, [2, 2], seed=seed).sample(seeds, epoch, step)
        return batch.input_ids.tolist()

    assert sources(0, 0, 0) == sources(0, 0, 0)
    different = [sources(0, 0, 0), sources(1, 0, 0), sources(0, 1, 0), sources(0, 0, 1)]
    assert len({tuple(ids) for ids in different}) == 4


def test_a_node_draws_the_same_in_any_company(make_graph: MakeGraph) -> None:
    """The neighbours of a node do not depend on the other seeds, nor on its place among them."""
    graph = make_graph(400)
    sampler = NeighbourSampler(graph, [3])

    def drawn(seeds: torch.Tensor) -> dict[int, list[int]]:
        (block,) = sampler.sample(seeds, 0, 7).blocks
        assert block.src_ids is not None
        rows = block.src_ids[block.indices.long()].split(block.drawn.tolist())
        return {int(node): row.tolist() for node, row in zip(seeds, rows)}

    together = drawn(torch.arange(400))
    alone = {node: drawn(torch.tensor([node]))[node] for node in range(0, 400, 7)}
    assert alone == {node: together[node] for node in alone}
    assert drawn(torch.arange(400).flip(0)) == together


@pytest.mark.parametrize("method", ["uniform", "labor"])
def test_threads_and_order_do_not_matter(make_graph: MakeGraph, method: str) -> None:
    graph = make_graph(400, weighted=True)
    parts = torch.randperm(400, generator=torch.Generator().manual_seed(0)).split(13)
    alone = NeighbourSampler(graph, [5, 5], method=method)
    expected = [alone.sample(part, 3, step) for step, part in enumerate(parts)]
    shared = NeighbourSampler(graph, [5, 5], method=method)
    with ThreadPoolExecutor(4) as pool:
        futures = {
            step: pool.submit(shared.sample, parts[step], 3, step) for step in reversed(range(len(parts)))
        }
        for step, future in futures.items():
            assert_same(future.result(), expected[step])


def test_bad_arguments(make_graph: MakeGraph) -> None:
    graph = make_graph(50)
    for fanouts in ([], [0], [3, -2], [1.5]):
        with pytest.raises(ConfigError, match="num_neighbors"):
            NeighbourSampler(graph, fanouts)
    with pytest.raises(ConfigError, match="Did you mean 'labor'"):
        NeighbourSampler(graph, [3], method="labour")
    sampler = NeighbourSampler(graph, [3])
    with pytest.raises(InputError, match=r"seeds\[1\] = 50"):
        sampler.sample(torch.tensor([0, 50]), 0, 0)
    with pytest.raises(InputError, match="must be distinct"):
        sampler.sample(torch.tensor([4, 4]), 0, 0)
    assert sampler.sample(torch.tensor([0, 4]), 0, 0).seeds.tolist() == [0, 4]


def test_empty_seeds_give_empty_blocks(make_graph: MakeGraph) -> None:
    batch = NeighbourSampler(make_graph(50, weighted=True), [3, 3]).sample(
        torch.empty(0, dtype=torch.int64), 0, 0
    )
    assert batch.num_edges == 0
    assert batch.input_ids.numel() == 0
