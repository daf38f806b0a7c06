"""Owners that draw for whoever asks give the mini-batch of one process; own rows need no message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, PeerError
from polyhop.graph import Graph
from polyhop.partition import Partition, cut
from polyhop.sample import NeighbourSampler
from polyhop.sample.part import Drawn, PartSampler
from polyhop.sample.wire import Wire

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]


def sampler_of(
    graph: Graph, owner: Tensor, line: Collective, fan_outs: list[int], options: Any
) -> PartSampler:
    part = cut(graph, Partition(owner, line.num_ranks), line.rank)
    wire = Wire(graph.num_nodes, part.edge_weight is not None, options.get("plain", False))
    return PartSampler(part, fan_outs, wire, seed=8, method=options.get("method", "uniform"))


def sample(
    line: Collective, graph: Graph, owner: Tensor, fan_outs: list[int], seeds: Tensor, options: dict[str, Any]
) -> tuple[Drawn, Drawn, Cost]:
    """Two steps of this rank's share of the seeds (the user's ids), in the user's ids; what both cost."""
    shared = Partition(owner, line.num_ranks)
    sampler = sampler_of(graph, owner, line, fan_outs, options)
    own = shared.new_ids[seeds[owner[seeds] == line.rank]]
    drawn = [sampler.sample(line, own, 4, step) for step in (0, 1)]
    first, second = (Drawn(shared.user_ids[each.ids], each.layers) for each in drawn)
    return first, second, line.traffic.now()


def assert_drawn(
    got: Drawn, graph: Graph, fan_outs: list[int], seeds: Tensor, step: int, method: str
) -> None:
    expected = NeighbourSampler(graph, fan_outs, seed=8, method=method).sample(seeds, 4, step)
    assert torch.equal(got.ids, expected.input_ids)
    assert len(got.layers) == len(fan_outs)
    for mine, whole in zip(got.layers, expected.blocks, strict=True):
        assert (mine.num_src, mine.is_sampled) == (whole.num_src, whole.is_sampled)
        assert torch.equal(mine.indptr, whole.indptr)
        assert torch.equal(mine.indices, whole.indices)
        assert mine.indices.dtype == torch.int32
        assert (mine.edge_weight is None) == (whole.edge_weight is None)
        if mine.edge_weight is not None and whole.edge_weight is not None:
            assert torch.equal(mine.edge_weight, whole.edge_weight)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fan_outs", [[3], [3, 2], [-1, 2, -1], [300, 300]], ids=str)
def test_the_draws_of_one_process(
    make_graph: MakeGraph, fan_outs: list[int], weighted: bool, method: str, plain: bool
) -> None:
    graph = make_graph(120, weighted=weighted)
    owner = (torch.arange(120) * 7 % 3).int()
    seeds = torch.randperm(120, generator=torch.Generator().manual_seed(0))[:20]
    options = {"method": method, "plain": plain}
    for rank, (*steps, _) in enumerate(run_in_threads(3, sample, graph, owner, fan_outs, seeds, options)):
        for step, got in enumerate(steps):
            assert_drawn(got, graph, fan_outs, seeds[owner[seeds] == rank], step, method)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_parts_and_seeds(make_graph: MakeGraph, data: st.DataObject) -> None:
    graph = make_graph(40, weighted=data.draw(st.booleans()))
    owner = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=40, max_size=40))).int()
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, 39), unique=True, max_size=12)), dtype=torch.int64)
    options = {"method": data.draw(st.sampled_from(["uniform", "labor"])), "plain": data.draw(st.booleans())}
    for rank, (*steps, _) in enumerate(run_in_threads(3, sample, graph, owner, [2, 2], seeds, options)):
        for step, got in enumerate(steps):
            assert_drawn(got, graph, [2, 2], seeds[owner[seeds] == rank], step, options["method"])


def test_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph = make_graph(120, weighted=True)
    owner = (torch.arange(120) % 2 + 1).int()  # rank 0 has nothing and still answers
    seeds = torch.arange(0, 120, 5)
    for rank, (*steps, _) in enumerate(ranks(3, sample, graph, owner, [4, 3, 2], seeds, {})):
        for step, got in enumerate(steps):
            assert_drawn(got, graph, [4, 3, 2], seeds[owner[seeds] == rank], step, "uniform")


def test_the_first_hop_needs_no_message(make_graph: MakeGraph) -> None:
    graph, owner = make_graph(60), (torch.arange(60) % 3).int()
    for *_, cost in run_in_threads(3, sample, graph, owner, [5], torch.arange(30), {}):
        assert cost.total_messages == 0


def test_one_request_and_one_reply_per_peer_and_hop(make_graph: MakeGraph) -> None:
    graph, owner = make_graph(120), (torch.arange(120) % 3).int()
    for *_, cost in run_in_threads(3, sample, graph, owner, [5, 4, 3], torch.arange(20, 60), {}):
        assert cost.messages["ids"] == 2 * 2 * (2 * 2)  # steps x hops x (request and reply) x peers


def test_a_part_alone_asks_nobody(make_graph: MakeGraph) -> None:
    graph, seeds = make_graph(60), torch.arange(10, 40)
    found = run_in_threads(1, sample, graph, torch.zeros(60, dtype=torch.int32), [3, 3], seeds, {})
    assert_drawn(found[0][0], graph, [3, 3], seeds, 0, "uniform")
    assert found[0][2].total_messages == 0


def cut_off(line: Collective, graph: Graph, owner: Tensor) -> None:
    sampler = sampler_of(graph, owner, line, [3, 3], {})
    if line.rank == 1:
        sampler.wire = _Short(graph.num_nodes)
    own = Partition(owner, line.num_ranks).nodes_of(line.rank)[:4]
    sampler.sample(line, Partition(owner, line.num_ranks).new_ids[own], 0, 0)


class _Short(Wire):
    """Sends replies that lack their last byte."""

    def reply(self, lists: Any, fanout: int) -> Tensor:
        return super().reply(lists, fanout)[:-1]


def test_a_broken_reply_names_the_rank_that_sent_it(make_graph: MakeGraph) -> None:
    with pytest.raises(PeerError, match=r"rank 1 sent .* bytes of neighbours"):
        run_in_threads(2, cut_off, make_graph(60), (torch.arange(60) % 2).int())


def test_unknown_method(make_graph: MakeGraph) -> None:
    part = cut(make_graph(20), Partition(torch.zeros(20, dtype=torch.int32), 1), 0)
    with pytest.raises(ConfigError, match="Did you mean 'labor'"):
        PartSampler(part, [2], Wire(20), method="labour")
