"""Draws of rows under given ids: a part, a permuted graph and the sampler of the whole graph pick the same edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import ConfigError, InputError, KernelError
from polyhop.kernels import Key, Purpose, Sampler, draw
from polyhop.kernels.sample import sample_reference

KEY = Key(3).at(Purpose.SAMPLE, 1)
HUBS = (65_536, 65_537, 70_000)  # on both sides of the change from 32-bit to 64-bit draws


def lists(num_nodes: int = 1200, dtype: torch.dtype = torch.int32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """In-edge lists with degrees 0 to 90, some beyond any fan-out here, and the hubs."""
    rng = np.random.default_rng(seed)
    degree = rng.integers(0, 91, num_nodes)
    degree[::50] = rng.integers(200, 800, degree[::50].size)
    degree[: len(HUBS)] = HUBS
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.from_numpy(degree).cumsum(0)
    return indptr, torch.from_numpy(rng.integers(0, num_nodes, int(indptr[-1]))).to(dtype)


def permuted(indptr: Tensor, indices: Tensor, new_of: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The graph with node v renamed new_of[v]: (indptr, indices, old id of each row, old position of each edge)."""
    old_of = torch.empty_like(new_of)
    old_of[new_of] = torch.arange(new_of.numel())
    degree = indptr.diff()[old_of]
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    old_edge = torch.cat([torch.arange(int(indptr[v]), int(indptr[v + 1])) for v in old_of.tolist()])
    return ends, new_of[indices[old_edge].long()].to(indices.dtype), old_of, old_edge


def sampled(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanout: int, method: str
) -> tuple[Tensor, Tensor]:
    (layer,) = Sampler(indptr, indices, keep_edges=True).sample(seeds, [fanout], [KEY], method=method).layers
    assert layer.edge is not None
    return layer.indptr, layer.edge


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    for left, right in zip(a, b):
        assert left.dtype == right.dtype == torch.int64
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize("mode", ["native", "reference"])
def test_a_permuted_graph_draws_as_the_original(
    mode: str, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node v sampled in the original = row new_of[v] drawn under id v, for every fan-out from 1 to 70 and for all."""
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    indptr, indices = lists(dtype=dtype)
    gen = torch.Generator().manual_seed(0)
    new_of = torch.randperm(indptr.numel() - 1, generator=gen)
    new_indptr, new_indices, old_of, old_edge = permuted(indptr, indices, new_of)
    seeds = torch.randperm(indptr.numel() - 1, generator=gen)[:300]
    seeds = torch.cat([torch.tensor([0, 1, 2]), seeds[seeds > 2]])
    fanouts = [*range(1, 71), 200, -1] if mode == "native" else [1, 5, 64, 65, -1]
    for fanout in fanouts:
        expected = sampled(indptr, indices, seeds, fanout, method)
        ends, position = draw(
            new_indptr,
            new_indices,
            new_of[seeds],
            fanout,
            KEY,
            ids=old_of,
            source_ids=old_of,
            method=method,
        )
        assert_same((ends, old_edge[position]), expected)


@pytest.mark.parametrize("method", ["uniform", "labor"])
def test_equals_sampler_under_its_own_numbers(native_only: None, method: str) -> None:
    indptr, indices = lists()
    ids = torch.arange(indptr.numel() - 1)
    for fanout in (1, 10, 64, 65, 150, -1):
        expected = sampled(indptr, indices, ids, fanout, method)
        assert_same(draw(indptr, indices, ids, fanout, KEY, ids=ids, method=method), expected)
        (layer,) = sample_reference(
            indptr, indices, ids, [fanout], [KEY], method=method, keep_edges=True
        ).layers
        assert layer.edge is not None
        assert_same((layer.indptr, layer.edge), expected)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_native_equals_reference_on_any_lists(data: st.DataObject) -> None:
    """Ids of 63 bits, repeated rows, empty lists, keys of 64 bits, both id widths."""
    num_rows, num_src = data.draw(st.integers(1, 25)), data.draw(st.integers(1, 25))
    a_list = st.lists(st.integers(0, num_src - 1), max_size=90)
    rows_of = data.draw(st.lists(a_list, min_size=num_rows, max_size=num_rows))
    indptr = torch.tensor([0] + [len(row) for row in rows_of]).cumsum(0)
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    indices = torch.tensor([s for row in rows_of for s in row], dtype=dtype)
    some_ids = st.integers(0, 2**63 - 1)
    ids = torch.tensor(data.draw(st.lists(some_ids, min_size=num_rows, max_size=num_rows)))
    source_ids = torch.tensor(data.draw(st.lists(some_ids, min_size=num_src, max_size=num_src)))
    rows = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=80)), dtype=torch.int64)
    fanout = data.draw(st.sampled_from([-1, 1, 2, 3, 7, 20, 64, 66]))
    key = data.draw(st.integers(0, 2**64 - 1))
    for method in ("uniform", "labor"):
        for table in (source_ids, None):
            results = []
            for mode in ("native", "reference"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv("POLYHOP_KERNELS", mode)
                    results.append(
                        draw(indptr, indices, rows, fanout, key, ids=ids, source_ids=table, method=method)
                    )
            assert_same(*results)


@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize("fanout", [7, 70, -1])
def test_same_for_any_thread_count(
    native_only: None, fanout: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many ranges of rows, among them some of several hubs; repeats of a row draw alike."""
    indptr, indices = lists()
    gen = torch.Generator().manual_seed(1)
    rows = torch.randint(len(HUBS), indptr.numel() - 1, (20_000,), generator=gen)
    rows[::4000] = 2
    ids = torch.randint(1 << 62, (indptr.numel() - 1,), generator=gen)
    results = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("POLYHOP_THREADS", threads)
        results.append(draw(indptr, indices, rows, fanout, KEY, ids=ids, source_ids=ids, method=method))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    ends, position = results[0]
    assert torch.equal(position[: ends[1]], position[ends[4000] : ends[4001]])


def test_ids_key_the_draw(native_only: None) -> None:
    """Two rows with equal ids and lists of one length draw alike; other ids, other draws. All 64 bits count."""
    indptr = torch.arange(0, 4001, 1000)
    indices = torch.zeros(4000, dtype=torch.int32)
    ids = torch.tensor([5, 5, 6, 5 + (1 << 40)])
    ends, position = draw(indptr, indices, torch.arange(4), 20, KEY, ids=ids)
    picks = [set((part % 1000).tolist()) for part in position.split(20)]
    assert ends.tolist() == [0, 20, 40, 60, 80]
    assert picks[0] == picks[1]
    assert picks[0] != picks[2]
    assert picks[0] != picks[3]


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_nothing_to_draw(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    indptr, indices = torch.tensor([0, 0, 2, 2]), torch.tensor([1, 1])
    nobody = torch.empty(0, dtype=torch.int64)
    for method in ("uniform", "labor"):
        for fanout in (1, -1):
            ends, position = draw(indptr, indices, nobody, fanout, KEY, ids=torch.arange(3), method=method)
            assert (ends.tolist(), position.tolist()) == ([0], [])
            ends, position = draw(
                indptr, indices, torch.tensor([2, 0, 0]), fanout, KEY, ids=torch.arange(3), method=method
            )
            assert (ends.tolist(), position.tolist()) == ([0, 0, 0, 0], [])
    ends, position = draw(torch.tensor([0]), nobody, nobody, 3, KEY, ids=nobody)
    assert (ends.tolist(), position.tolist()) == ([0], [])


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_rows_outside_the_graph(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several, whichever thread finds it."""
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    monkeypatch.setenv("POLYHOP_THREADS", "4")
    indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([0, 1])
    for bad in (2, -1, 1 << 62):
        rows = torch.zeros(100_000, dtype=torch.int64)
        rows[70_000] = rows[40_000] = rows[99_000] = bad
        with pytest.raises(InputError, match=rf"rows\[40000\] = {bad}, outside the 2 rows"):
            draw(indptr, indices, rows, 1, KEY, ids=torch.arange(2))


def test_wrong_arguments() -> None:
    indptr, indices, ids = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.arange(2)
    for fanout in (0, -2, 2.5, "3"):
        with pytest.raises(ConfigError, match="fanout"):
            draw(indptr, indices, ids, fanout, KEY, ids=ids)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'labor'"):
        draw(indptr, indices, ids, 1, KEY, ids=ids, method="labour")
    with pytest.raises(InputError, match="rows must be int64"):
        draw(indptr, indices, ids.int(), 1, KEY, ids=ids)
    with pytest.raises(InputError, match=r"ids must have shape \[2\]"):
        draw(indptr, indices, ids, 1, KEY, ids=torch.arange(3))
    with pytest.raises(InputError, match="source_ids must be int64"):
        draw(indptr, indices, ids, 1, KEY, ids=ids, source_ids=ids.int(), method="labor")
    with pytest.raises(InputError, match="indptr must run from 0"):
        draw(indptr, indices[:1], ids, 1, KEY, ids=ids)


def test_debug_mode_names_the_bad_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    with pytest.raises(KernelError, match=r"indices\[1\] = 2, outside 0 .. 1"):
        draw(
            torch.tensor([0, 1, 2]),
            torch.tensor([0, 2]),
            torch.arange(2),
            1,
            KEY,
            ids=torch.arange(2),
            source_ids=torch.arange(2),
        )


@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize("mode", ["native", "reference"])
def test_several_keys_draw_as_each_alone(mode: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    indptr, indices = lists()
    ids, cuts, keys = torch.arange(1200), [0, 300, 300, 301, 900], [KEY, 1, (1 << 64) - 1, 1 << 63]
    rows = torch.randint(1200, (900,), generator=torch.Generator().manual_seed(3))
    got = draw(indptr, indices, rows, 7, keys, ids=ids, method=method, cuts=cuts)
    alone = [
        draw(indptr, indices, rows[start:stop], 7, key, ids=ids, method=method)
        for key, start, stop in zip(keys, cuts, cuts[1:])
    ]
    counts = torch.cat([ends.diff() for ends, _ in alone])
    assert_same(
        got,
        (torch.cat([counts[:0], counts.new_zeros(1), counts.cumsum(0)]), torch.cat([p for _, p in alone])),
    )
    with pytest.raises(InputError, match="4 keys need"):
        draw(indptr, indices, rows, 7, keys, ids=ids, cuts=[0, 300])
