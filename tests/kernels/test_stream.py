from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import ConfigError, InputError
from polyhop.kernels.neighbours import neighbours
from polyhop.kernels.stream import RULES, Stream, stream_parts


def _lists(nodes: int, edges: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    degree = torch.bincount(torch.randint(nodes, (edges,), generator=gen), minlength=nodes)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    return neighbours(indptr, torch.randint(nodes, (edges,), generator=gen).to(torch.int32))


def _start(
    rule: str, nodes: int, parts: int, weight: Tensor | None = None, second: Tensor | None = None
) -> Stream:
    return Stream.apart(nodes, weight, second) if rule == "cluster" else Stream.empty(nodes, parts)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 120),
    st.integers(1, 6),
    st.sampled_from(RULES),
    st.booleans(),
    st.integers(0, 999),
)
def test_equals_reference(nodes: int, edges: int, parts: int, rule: str, heavy: bool, seed: int) -> None:
    indptr, indices = _lists(nodes, edges, seed)
    gen = torch.Generator().manual_seed(seed)
    options = {"rule": rule, "alpha": 0.3, "capacity": 1.1 * nodes / parts + 1, "second_capacity": 2.0}
    if heavy:
        options["weight"] = torch.rand(nodes, generator=gen, dtype=torch.float64)
        options["second"] = torch.randint(2, (nodes,), generator=gen).double()
        options["order"] = torch.randperm(nodes, generator=gen)
        options["edge_weight"] = torch.randint(1, 4, (indices.numel(),), generator=gen).float()
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for mode in ("native", "reference"):
            patch.setenv("POLYHOP_KERNELS", mode)
            state = _start(rule, nodes, parts, options.get("weight"), options.get("second"))
            moved = [stream_parts(state, indptr, indices, **options) for _ in range(3)]
            results.append((moved, state.owner.tolist(), state.load, state.second_load))
    assert results[0][:2] == results[1][:2]
    assert torch.allclose(results[0][2], results[1][2])
    assert torch.allclose(results[0][3], results[1][3])


@pytest.mark.parametrize("rule", RULES)
def test_pieces_of_the_stream_equal_the_whole(native_only: None, rule: str) -> None:
    indptr, indices = _lists(200, 900, 1)
    options = {"rule": rule, "alpha": 0.2, "capacity": 60.0}
    whole, pieces = _start(rule, 200, 4), _start(rule, 200, 4)
    stream_parts(whole, indptr, indices, **options)
    for first in range(0, 200, 64):
        rows = slice(first, min(first + 64, 200) + 1)
        own = indptr[rows] - indptr[first]
        stream_parts(pieces, own, indices[indptr[first] : indptr[rows.stop - 1]], first=first, **options)
    assert torch.equal(whole.owner, pieces.owner)


def test_never_over_capacity_while_there_is_room(native_only: None) -> None:
    indptr, indices = _lists(300, 4000, 2)
    state = Stream.empty(300, 5)
    for _ in range(4):
        stream_parts(state, indptr, indices, rule="fennel", alpha=0.0, capacity=61.0)
    assert int(torch.bincount(state.owner, minlength=5).max()) <= 61


def test_clusters_grow_up_to_the_limit(native_only: None) -> None:
    indptr, indices = _lists(300, 1200, 3)
    train = (torch.arange(300) % 3 == 0).double()
    state = Stream.apart(300, None, train)
    moved = [
        stream_parts(
            state, indptr, indices, rule="cluster", alpha=0, capacity=9, second=train, second_capacity=3
        )
        for _ in range(3)
    ]
    sizes = torch.bincount(state.owner, minlength=300)
    assert moved[0] > moved[2]
    assert 5 < int(sizes.max()) <= 9
    assert torch.equal(state.load, sizes.double())
    second = torch.zeros(300, dtype=torch.float64).index_add_(0, state.owner.long(), train)
    assert torch.equal(state.second_load, second)
    assert second.max() == 3


def test_goes_on_from_given_parts(native_only: None) -> None:
    indptr, indices = _lists(100, 500, 4)
    weight = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = Stream.empty(100, 3)
    for _ in range(2):
        stream_parts(state, indptr, indices, rule="ldg", alpha=0, capacity=30, weight=weight, second=weight)
    again = Stream.of(state.owner, 3, weight, weight)
    assert torch.equal(again.owner, state.owner)
    assert torch.allclose(again.load, state.load)
    assert torch.allclose(again.second_load, state.second_load)
    assert torch.equal(Stream.of(state.owner, 3, None, None).load, torch.bincount(state.owner).double())


def test_wrong_arguments() -> None:
    indptr, indices = _lists(10, 20, 0)
    state = Stream.empty(10, 2)
    with pytest.raises(ConfigError, match="Did you mean 'fennel'"):
        stream_parts(state, indptr, indices, rule="fenel", alpha=0.1, capacity=6)
    with pytest.raises(InputError, match=r"rows 5 \.\. 15 exceed the 10 nodes"):
        stream_parts(state, indptr, indices, rule="ldg", alpha=0.1, capacity=6, first=5)
    with pytest.raises(InputError, match="weight"):
        stream_parts(state, indptr, indices, rule="ldg", alpha=0.1, capacity=6, weight=torch.ones(3))
    with pytest.raises(InputError, match="edge_weight must have shape"):
        stream_parts(state, indptr, indices, rule="ldg", alpha=0.1, capacity=6, edge_weight=torch.ones(3))
    with pytest.raises(InputError, match=r"start from Stream\.apart"):
        stream_parts(state, indptr, indices, rule="cluster", alpha=0.1, capacity=6)
    with pytest.raises(InputError, match="started without it"):
        stream_parts(
            Stream.apart(10), indptr, indices, rule="cluster", alpha=0.1, capacity=6, second=torch.ones(10)
        )
