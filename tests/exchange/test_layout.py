"""How rows lie and which ones each layer brings: against the whole graph, by brute force, on small random graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.exchange import lay_out, layer_edges
from polyhop.exchange.crossing import Crossing, Messages
from polyhop.graph import Block, Graph, HaloBlock, Part, Sizes
from polyhop.partition import Partition, cut
from polyhop.sample import full_block

WIDTH = 3
Edges = list[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A directed graph, who owns what, and the nodes that the loss reads."""

    num_nodes: int
    edges: Edges  # (source, destination), each once
    owner: list[int]
    num_ranks: int
    train: list[int]

    def graph(self, weighted: bool = False) -> Graph:
        pairs = torch.tensor(self.edges, dtype=torch.int64).reshape(-1, 2).T
        weight = 0.5 + torch.arange(pairs.shape[1]).remainder(7) / 4 if weighted else None
        return Graph.from_edges(pairs, num_nodes=self.num_nodes, edge_weight=weight)

    def parts(self, weighted: bool = False) -> list[Part]:
        shared = Partition(torch.tensor(self.owner, dtype=torch.int32), self.num_ranks)
        return [cut(self.graph(weighted), shared, rank) for rank in range(self.num_ranks)]

    def needed(self, num_layers: int) -> list[set[int]]:
        """Destinations that each layer, input layer first, must compute for the train nodes."""
        found = [set(self.train)]
        for _ in range(num_layers - 1):
            found.append(found[-1] | {src for src, dst in self.edges if dst in found[-1]})
        return found[::-1]

    def halo(self, needed: set[int], rank: int) -> set[int]:
        """Nodes of other ranks that this rank's destinations among ``needed`` read."""
        own = {node for node, at in enumerate(self.owner) if at == rank}
        return {src for src, dst in self.edges if dst in needed & own and src not in own}


@st.composite
def cases(draw: Any) -> Case:
    n = draw(st.integers(1, 12))
    nodes = st.integers(0, n - 1)
    edges = draw(st.lists(st.tuples(nodes, nodes), max_size=30, unique=True))
    num_ranks = draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, num_ranks - 1), min_size=n, max_size=n))
    train = draw(st.lists(nodes, min_size=1, max_size=3, unique=True))
    return Case(n, edges, owner, num_ranks, sorted(train))


def user_edges(block: Block) -> list[tuple[int, int, float]]:
    """(source, destination, weight) by the user's ids, sorted."""
    assert block.src_ids is not None
    dst = torch.repeat_interleave(block.dst_ids(), block.drawn)
    weight = torch.ones(block.num_edges) if block.edge_weight is None else block.edge_weight
    sources = block.src_ids[block.indices.long()]
    return sorted(zip(sources.tolist(), dst.tolist(), weight.tolist(), strict=True))


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans())
def test_rows_are_ordered_and_edges_are_kept(case: Case, weighted: bool) -> None:
    for rank, part in enumerate(case.parts(weighted)):
        layout = lay_out(part)
        n, own = part.num_nodes, {node for node, at in enumerate(case.owner) if at == rank}
        assert layout.num_own == n == len(own)
        assert sorted(layout.order.tolist()) == list(range(n))
        assert torch.equal(layout.order[layout.place], torch.arange(n))
        ids = part.user_ids[layout.order]
        assert layout.block.src_ids is not None
        assert torch.equal(layout.block.src_ids[:n], ids)
        is_marginal = [
            any(dst == node and src not in own for src, dst in case.edges) for node in ids.tolist()
        ]
        assert is_marginal == sorted(is_marginal), "central first"
        assert layout.num_central == n - sum(is_marginal)
        assert layout.marginal_share == pytest.approx(sum(is_marginal) / n if n else 0.0)
        assert user_edges(layout.block) == user_edges(part.block())


def brought(
    line: Collective, case: Case, num_layers: int, reads: bool
) -> list[tuple[set[int], set[tuple[int, int]]]]:
    """Of each layer: the user's ids of the halo's rows, and (own row, reader) of what is lent."""
    part = case.parts()[line.rank]
    layout = lay_out(part)
    own = part.user_ids[layout.order]
    read = torch.isin(own, torch.tensor(case.train)) if reads else None
    found = []
    for layer in layer_edges(layout, part, line, read, [False] * num_layers):
        assert layer.lists.num_halo == layer.halo.numel()
        assert layer.block.num_src == layout.num_own + layer.halo.numel()
        assert layer.lists.wanted[line.rank] == layer.lists.lent[line.rank].numel() == 0
        halo = part.src_ids[part.num_nodes :][layer.halo]
        owners = [case.owner[node] for node in halo.tolist()]
        assert owners == sorted(owners), "the halo is in rank order"
        assert [owners.count(q) for q in range(line.num_ranks)] == list(layer.lists.wanted)
        lent = {(node, reader) for reader, ids in enumerate(layer.lists.lent) for node in own[ids].tolist()}
        found.append((set(halo.tolist()), lent))
    return found


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(1, 3))
def test_what_is_not_brought_is_not_read(case: Case, num_layers: int) -> None:
    """Exactly the sources elsewhere of destinations from which the train nodes can still be reached."""
    found = run_in_threads(case.num_ranks, brought, case, num_layers, True)
    for at, needed in enumerate(case.needed(num_layers)):
        halos = [case.halo(needed, rank) for rank in range(case.num_ranks)]
        assert [each[at][0] for each in found] == halos, at
        lent = set().union(*(each[at][1] for each in found))
        assert lent == {(node, rank) for rank, halo in enumerate(halos) for node in halo}


def test_all_rows_are_brought_where_all_are_read() -> None:
    """A ring of eight, each node reading the one before it, with a train node on one side of the cut."""
    case = Case(8, [(node, (node + 1) % 8) for node in range(8)], [0, 0, 0, 0, 1, 1, 1, 1], 2, [1])
    for reads, sizes in ((False, [2, 2]), (True, [1, 0])):
        first, second = run_in_threads(2, brought, case, 2, reads)
        assert [len(one[0]) + len(other[0]) for one, other in zip(first, second, strict=True)] == sizes


def make_layers(kind: str, num_layers: int) -> list[Any]:
    """Layers with weights that depend on nothing but their place."""
    made: dict[str, Any] = {
        "gcn": lambda: nn.GCNConv(WIDTH, WIDTH),
        "gcn-plain": lambda: nn.GCNConv(WIDTH, WIDTH, add_self_loops=False),
        "sage": lambda: nn.SAGEConv(WIDTH, WIDTH),
        "gat": lambda: nn.GATConv(WIDTH, WIDTH, heads=1),
        "gin": lambda: nn.GINConv(torch.nn.Linear(WIDTH, WIDTH)),
    }
    layers = []
    for at in range(num_layers):
        layer = made[kind]().double()
        with torch.no_grad():
            for number, weight in enumerate(layer.parameters()):
                flat = torch.arange(weight.numel(), dtype=torch.float64)
                weight.copy_((0.7 * torch.sin(1 + flat + 3 * number + 5 * at)).view_as(weight))
        layers.append(layer)
    return layers


def inputs(case: Case) -> Tensor:
    return torch.sin(1.0 + torch.arange(case.num_nodes * WIDTH, dtype=torch.float64)).view(-1, WIDTH)


def over_parts(
    line: Collective,
    case: Case,
    kind: str,
    num_layers: int,
    is_first_plain: bool,
    weighted: bool,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    """(the user's ids of the own train nodes, their rows after all layers)."""
    part = case.parts(weighted)[line.rank]
    layout = lay_out(part)
    own = part.user_ids[layout.order]
    read = torch.isin(own, torch.tensor(case.train))
    h = inputs(case)[own]
    sizes = Sizes(case.num_nodes, case.num_nodes, len(case.edges))
    has_sums = [with_sums and not (at == 0 and is_first_plain) for at in range(num_layers)]
    edges = layer_edges(layout, part, line, read, has_sums)
    for at, (conv, layer) in enumerate(zip(make_layers(kind, num_layers), edges, strict=True)):
        if at == 0 and is_first_plain:
            halo = part.src_ids[part.num_nodes :][layer.halo]
            h = conv(torch.cat([h, inputs(case)[halo]]), layer.block)
        else:
            channel = Crossing(Messages(layer.lists), line)
            sums = None if layer.sums is None else layer.sums.to_device(h.device, h.dtype)
            h = conv(h, HaloBlock.of(layer.block, layout.num_central, channel, sizes, sums=sums))
    return own[read], h[read].detach()


def assert_as_whole(
    case: Case,
    kind: str,
    num_layers: int,
    is_first_plain: bool,
    weighted: bool = False,
    with_sums: bool = False,
) -> None:
    h, block = inputs(case), full_block(case.graph(weighted))
    for conv in make_layers(kind, num_layers):
        h = conv(h, block)
    given = (kind, num_layers, is_first_plain, weighted, with_sums)
    parts = run_in_threads(case.num_ranks, over_parts, case, *given)
    ids = torch.cat([each[0] for each in parts])
    assert sorted(ids.tolist()) == case.train
    assert torch.allclose(torch.cat([each[1] for each in parts]), h[ids].detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["gcn", "gcn-plain", "sage", "gat", "gin"])
@settings(max_examples=25, deadline=None)
@given(
    case=cases(),
    num_layers=st.integers(1, 3),
    is_first_plain=st.booleans(),
    weighted=st.booleans(),
    with_sums=st.booleans(),
)
def test_layers_over_parts_give_the_rows_of_the_whole(
    kind: str, case: Case, num_layers: int, is_first_plain: bool, weighted: bool, with_sums: bool
) -> None:
    weighted, with_sums = weighted and kind.startswith("gcn"), with_sums and kind != "gat"
    assert_as_whole(case, kind, num_layers, is_first_plain, weighted, with_sums)


@pytest.mark.parametrize("is_first_plain", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_train_nodes_far_from_the_cut(num_layers: int, is_first_plain: bool) -> None:
    """Nothing is brought, edges of rows that nothing reads are gone, and degrees are still those of the whole graph."""
    ring = [(node, (node + 1) % 8) for node in range(8)] + [((node + 1) % 8, node) for node in range(8)]
    case = Case(8, sorted(ring), [0, 0, 0, 0, 1, 1, 1, 1], 2, [1])
    for kind in ("gcn", "gcn-plain"):
        assert_as_whole(case, kind, num_layers, is_first_plain)
