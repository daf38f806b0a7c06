"""A graph that is computed: the same bits native and in torch, on any threads, drawn from as stored lists are."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from polyhop.errors import ConfigError, InputError
from polyhop.kernels import Key, Purpose, draw
from polyhop.kernels.procedural import Virtual, virtual_degrees, virtual_draw, virtual_rows

KEY = Key(3).at(Purpose.SAMPLE, 1)
LARGE = 1 << 40


def some_ids(graph: Virtual, count: int = 500) -> Tensor:
    """Ids of both ends and anywhere between."""
    ids = torch.randint(0, graph.num_nodes, (count,), generator=torch.Generator().manual_seed(0))
    ids[:4] = torch.tensor([0, 1, graph.num_nodes - 2, graph.num_nodes - 1])
    return ids


def everything(graph: Virtual, ids: Tensor) -> list[Tensor]:
    draws = [
        virtual_draw(graph, ids, fanout, KEY, method=method)
        for fanout in (1, 5, 64, 65, -1)
        for method in ("uniform", "labor")
    ]
    return [virtual_degrees(graph, ids), virtual_rows(graph, ids), *(each for pair in draws for each in pair)]


@pytest.mark.parametrize(
    "graph",
    [
        Virtual(1, LARGE + 7, 33, num_classes=7, mean_degree=30, num_hot=1 << 31),
        Virtual(2**63 - 1, 10**9, 256),
        Virtual(5, 50, 1, num_classes=50, mean_degree=40, hot_share=0.0, same_share=1.0),
        Virtual(5, 2, 4, num_classes=1, mean_degree=3, num_hot=1, hot_share=1.0, same_share=0.0),
        Virtual(5, 3000, 300, mean_degree=0.4),
    ],
    ids=["wide", "billion", "of-a-class", "two-nodes", "sparse"],
)
def test_native_and_torch_give_the_same_bits_on_any_threads(
    graph: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = some_ids(graph, 300)
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    expected = everything(graph, ids)
    monkeypatch.setenv("POLYHOP_KERNELS", "native")
    for threads in (1, 2, 7):
        monkeypatch.setenv("POLYHOP_THREADS", str(threads))
        for got, want in zip(everything(graph, ids), expected, strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


def test_the_graph_is_what_it_always_was() -> None:
    """Runs refer to a graph by its options alone."""
    graph = Virtual(1, LARGE + 7, 33, num_classes=7, mean_degree=30)
    found = everything(graph, torch.arange(200) * 5_497_558_139)
    bits = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in found)
    assert hashlib.sha256(bits).hexdigest()[:16] == "f4f1cfeff876e407"


@pytest.mark.parametrize("method", ["uniform", "labor"])
def test_draws_are_those_of_stored_lists(method: str) -> None:
    graph = Virtual(0, LARGE, 4, mean_degree=25)
    ids = some_ids(graph, 3000)
    indptr, lists = virtual_draw(graph, ids, -1, KEY)
    for fanout in (1, 3, 10, 24, 64, 100):
        ends, position = draw(indptr, lists, torch.arange(ids.numel()), fanout, KEY, ids=ids, method=method)
        got_ends, got = virtual_draw(graph, ids, fanout, KEY, method=method)
        assert torch.equal(got_ends, ends)
        assert torch.equal(got, lists[position])


def test_no_position_is_drawn_twice_and_few_take_all() -> None:
    graph = Virtual(0, LARGE, 4, mean_degree=12, hot_share=0.0, same_share=0.0)  # so lists repeat no node
    ids = some_ids(graph, 2000)
    begins, lists = virtual_draw(graph, ids, -1, KEY)
    ends, drawn = virtual_draw(graph, ids, 8, KEY)
    degrees = virtual_degrees(graph, ids)
    assert torch.equal(begins.diff(), degrees.long())
    assert torch.equal(ends.diff(), degrees.long().clamp(max=8))
    for i in range(ids.numel()):
        whole, taken = (
            lists[begins[i] : begins[i + 1]].tolist(),
            drawn[ends[i] : ends[i + 1]].tolist(),
        )
        places = [whole.index(node) for node in taken]
        assert places == sorted(set(places))
        assert len(taken) == min(len(whole), 8)


def test_degrees_are_skewed_around_their_mean() -> None:
    graph = Virtual(0, 10**9, 4, mean_degree=12)
    degrees = virtual_degrees(graph, torch.arange(0, 10**9, 4999)).double()
    assert graph.num_edges == 12 * 10**9
    assert float(degrees.mean()) == pytest.approx(12, rel=0.02)
    assert float(degrees.median()) < 10
    assert 300 < float(degrees.max()) <= int(graph.degree_table.max()) < 600
    # A power law of exponent 3: four times as many nodes have half the degree.
    ratio = float((degrees >= 24).double().mean() / (degrees >= 48).double().mean())
    assert ratio == pytest.approx(4, rel=0.15)


def test_neighbours_are_popular_of_the_class_or_anyone_and_never_oneself() -> None:
    graph = Virtual(0, 10**9, 4, num_classes=16, num_hot=1000, hot_share=0.3, same_share=0.4)
    ids = some_ids(graph, 20_000)
    ends, found = virtual_draw(graph, ids, -1, KEY)
    node = torch.repeat_interleave(ids, ends.diff())
    assert bool((found != node).all())
    assert bool(((found >= 0) & (found < graph.num_nodes)).all())
    distinct, counts = torch.unique(found, return_counts=True)
    repeated = counts > 1
    assert int(repeated.sum()) <= 1000 + 100
    assert float(counts[repeated].sum() / found.numel()) == pytest.approx(0.3, abs=0.01)
    assert int(counts.max()) > 5 * float(counts[repeated].double().mean())  # the most popular of the popular
    same = (found % 16 == node % 16).double().mean()
    assert float(same) == pytest.approx(0.4 + 0.6 / 16, abs=0.01)
    spread = torch.histc(distinct.double(), 10, 0, 1e9) / distinct.numel()
    assert bool((spread - 0.1).abs().max() < 0.01)


def test_rows_are_centres_and_unit_noise() -> None:
    graph = Virtual(0, LARGE, 64, num_classes=3, signal=0.5)
    ids = some_ids(graph, 6000)
    rows = virtual_rows(graph, ids)
    noise = rows - graph.centres[ids % 3]
    assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    assert float(noise.std()) == pytest.approx(1, abs=0.01)
    assert float(graph.centres.std()) == pytest.approx(0.5, abs=0.1)
    assert torch.equal(virtual_rows(graph, ids.flip(0)), rows.flip(0))
    near = noise.T @ noise / len(ids)
    assert float((near - torch.eye(64)).abs().max()) < 0.1  # no column knows of another


def test_large_ids_are_not_cut_to_32_bits() -> None:
    graph = Virtual(0, LARGE, 8)
    low, high = torch.arange(1000), torch.arange(1000) + (1 << 32) * 16  # the same class, the same lower half
    assert not torch.equal(virtual_rows(graph, low), virtual_rows(graph, high))
    assert not torch.equal(virtual_degrees(graph, low), virtual_degrees(graph, high))
    assert int(virtual_draw(graph, low, 5, KEY)[1].max()) > 1 << 39


def test_nothing_drawn_of_nothing() -> None:
    graph = Virtual(0, 100, 8)
    none = torch.empty(0, dtype=torch.int64)
    ends, found = virtual_draw(graph, none, 5, KEY)
    assert ends.tolist() == [0]
    assert found.numel() == 0
    assert list(virtual_rows(graph, none).shape) == [0, 8]


@pytest.mark.parametrize("bad", [-1, 100, 1 << 40])
def test_ids_outside_are_named(bad: int) -> None:
    graph, ids = Virtual(0, 100, 8), torch.tensor([5, bad])
    for call in (virtual_degrees, virtual_rows, lambda g, i: virtual_draw(g, i, 3, KEY)):
        with pytest.raises(InputError, match=rf"ids\[1\] = {bad}, outside the 100 nodes"):
            call(graph, ids)


def test_impossible_graphs_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_nodes=1 "):
        Virtual(0, 1, 8)
    with pytest.raises(ConfigError, match="same_share"):
        Virtual(0, 100, 8, hot_share=0.7, same_share=0.4)
    with pytest.raises(ConfigError, match="fanout = 0"):
        virtual_draw(Virtual(0, 100, 8), torch.arange(3), 0, KEY)
    with pytest.raises(ConfigError, match="sampling method"):
        virtual_draw(Virtual(0, 100, 8), torch.arange(3), 3, KEY, method="unifrom")
