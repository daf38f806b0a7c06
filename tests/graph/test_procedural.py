"""Parts of a graph that nobody stores: ranges of ids that draw, know and hold what the stored graph would."""

from __future__ import annotations

import pytest
import torch

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.graph import Part, ProceduralPart, SharedGraph, fingerprint_graph, materialise, procedural_share
from polyhop.graph.procedural import train_ids
from polyhop.kernels import Key, Purpose
from polyhop.kernels.procedural import Virtual, virtual_rows
from polyhop.partition import Partition, share

SMALL = Virtual(4, 1001, 12, num_classes=5, mean_degree=7, num_hot=20)
HUGE = Virtual(4, 1 << 44, 1024)  # an int8 for each node would take 17 TB
KEY = Key(0).at(Purpose.SAMPLE, 0)


def part_of(graph: Virtual, index: int, num_parts: int = 3, num_train: int = 100) -> ProceduralPart:
    return ProceduralPart(graph, num_train, index, num_parts)


def stored_share(graph: Virtual, index: int, num_parts: int = 3, num_train: int = 100) -> SharedGraph:
    owner = part_of(graph, 0, num_parts).bounds[1:]
    owner = torch.searchsorted(owner, torch.arange(graph.num_nodes), right=True).to(torch.int32)
    return share(materialise(graph, num_train), Partition(owner, num_parts), index)


@pytest.mark.parametrize("index", range(3))
def test_a_part_is_that_of_the_stored_graph(index: int) -> None:
    part, shared = part_of(SMALL, index), stored_share(SMALL, index)
    stored = shared.stored("this test")
    assert torch.equal(part.bounds, stored.bounds)
    assert (part.start, part.num_nodes, part.num_parts) == (stored.start, stored.num_nodes, stored.num_parts)
    rows = torch.randperm(part.num_nodes, generator=torch.Generator().manual_seed(1))
    assert stored.x is not None
    assert stored.y is not None
    assert stored.split is not None
    assert torch.equal(part.x.gather(rows), stored.x.gather(rows))
    assert torch.equal(part.x.stored(rows), part.x.gather(rows))
    assert torch.equal(part.y[rows], stored.y[rows])
    assert torch.equal(part.split.train, stored.split.train)
    for got, want in zip(part.facts_of(rows), stored.facts_of(rows), strict=True):
        assert (got is None and want is None) or torch.equal(got, want)
    for fanout, method in ((3, "uniform"), (-1, "uniform"), (4, "labor")):
        got_counts, got, _ = part.drawn(rows, fanout, KEY, method)
        counts, want, _ = stored.drawn(rows, fanout, KEY, method)
        assert torch.equal(got_counts, counts)
        assert torch.equal(got, want)


@pytest.mark.parametrize("count", [0, 1, 7, 100, 999, 1001])
def test_train_nodes_are_the_same_however_the_graph_is_cut(count: int) -> None:
    whole = train_ids(SMALL, count, 0, SMALL.num_nodes)
    assert whole.numel() == count
    assert bool((whole.diff() > 0).all())
    for num_parts in (1, 2, 3, 64):
        parts = [part_of(SMALL, p, num_parts, count) for p in range(num_parts)]
        assert torch.equal(torch.cat([part.split.train + part.start for part in parts]), whole)


def test_train_nodes_are_spread_over_all_ids() -> None:
    whole = train_ids(HUGE, 10_000, 0, HUGE.num_nodes)
    counts = torch.histc(whole.double(), 100, 0, HUGE.num_nodes)
    assert bool(((counts >= 98) & (counts <= 102)).all())
    inside = whole.double() * 10_000 / HUGE.num_nodes % 1  # anywhere in its range
    assert float(inside.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(inside.std()) == pytest.approx(12**-0.5, abs=0.02)


def test_a_part_of_any_size_is_made_and_used() -> None:
    part = part_of(HUGE, 2, num_train=10**6)
    assert part.num_nodes > 5 * 10**12
    rows = torch.tensor([0, part.num_nodes - 1, 1 << 41])
    assert torch.equal(part.x.gather(rows), virtual_rows(HUGE, rows + part.start))
    ids, degrees, _, _ = part.facts_of(rows)
    counts, neighbours, _ = part.drawn(rows, -1, KEY, "uniform")
    assert torch.equal(ids, rows + part.start)
    assert torch.equal(counts, degrees.long())
    assert int(neighbours.max()) > 1 << 42
    assert part.split.train.numel() == pytest.approx(10**6 / 3, abs=2)


def test_what_cannot_be_had_is_refused_with_the_reason() -> None:
    shared = procedural_share(HUGE, 10, 0, 2, name="synth:procedural?nodes=2e13")
    with pytest.raises(UnsupportedError, match=r"evaluation needs the lists .* computed when read"):
        shared.stored("evaluation")
    with pytest.raises(UnsupportedError, match="would take"):
        part_of(HUGE, 0).x.all()
    with pytest.raises(ConfigError, match="not for storing"):
        materialise(HUGE, 10)
    with pytest.raises(ConfigError, match="1,002 train nodes"):
        part_of(SMALL, 0, num_train=1002)


def test_it_says_what_it_is() -> None:
    shared = procedural_share(Virtual(0, 10**9, 256), 1000, 0, 4)
    assert "1,000,000,000 nodes, 1.02 TB of virtual features, computed when read" in shared.facts.note
    assert "says nothing on I/O" in shared.facts.note
    assert (shared.num_nodes, shared.num_edges, shared.num_features) == (10**9, 12 * 10**9, 256)
    other = procedural_share(Virtual(1, 10**9, 256), 1000, 0, 4)
    assert fingerprint_graph(shared) != fingerprint_graph(other)
    assert not isinstance(shared.part, Part)
