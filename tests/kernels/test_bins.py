"""Edges counted, filed and grouped chunk by chunk: native and reference against plain Python."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import InputError, KernelError
from polyhop.kernels.bins import Bins, bin_edges, count_edges, group_edges, sum_lists, unique_lists

NODES = 23
DTYPES = (torch.int32, torch.int64)
edges = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=60)


def _columns(pairs: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=dtype).reshape(-1, 2)
    return both[:, 0].contiguous(), both[:, 1].contiguous()


def _both(patch: pytest.MonkeyPatch, run):
    results = []
    for mode in ("native", "reference"):
        patch.setenv("POLYHOP_KERNELS", mode)
        results.append(run())
    return results


@settings(max_examples=60, deadline=None)
@given(edges, st.sampled_from(DTYPES))
def test_counts(pairs, dtype) -> None:
    src, dst = _columns(pairs, dtype)

    def run() -> list[list[int]]:
        degrees = [torch.zeros(NODES, dtype=torch.int32) for _ in range(2)]
        for a, b in zip(src.split(7), dst.split(7), strict=True):
            count_edges(a, b, *degrees)
        return [d.tolist() for d in degrees]

    with pytest.MonkeyPatch.context() as patch:
        for ins, outs in _both(patch, run):
            assert ins == [sum(v == n for _, v in pairs) for n in range(NODES)]
            assert outs == [sum(u == n for u, _ in pairs) for n in range(NODES)]


def test_counts_in_a_large_range(native_only: None) -> None:
    gen = torch.Generator().manual_seed(0)
    nodes = 700_001
    for dtype in DTYPES:
        src, dst = (torch.randint(nodes, (50_000,), generator=gen).to(dtype) for _ in range(2))
        src[0], dst[0] = nodes - 1, 0
        degrees = [torch.ones(nodes, dtype=torch.int32) for _ in range(2)]
        count_edges(src, dst, *degrees)
        for ids, degree in zip((dst, src), degrees, strict=True):
            assert torch.equal(degree - 1, torch.bincount(ids, minlength=nodes).to(torch.int32))


@settings(max_examples=100, deadline=None)
@given(
    edges,
    st.lists(st.integers(0, NODES), max_size=5),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.permutations(range(NODES)),
)
def test_bins_hold_the_records_in_order(pairs, cuts, dtype, out, is_renamed, apart, new) -> None:
    bounds = sorted({0, *cuts, NODES})
    bins = Bins.of(torch.tensor(bounds))
    key, value = _columns(pairs, dtype)
    to = torch.tensor(new, dtype=out) if is_renamed else None
    weight = torch.arange(len(pairs), dtype=torch.float32)
    named = [(new[u], new[v]) if is_renamed else (u, v) for u, v in pairs]
    expected = [
        [(u - low, v, e) for e, (u, v) in enumerate(named) if low <= u < high and not (apart and u == v)]
        for low, high in itertools.pairwise(bounds)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for keys, values, weights, counts in _both(
            patch, lambda: bin_edges(key, value, bins, to=to, weight=weight, dtype=out, apart=apart)
        ):
            assert counts.tolist() == [len(one) for one in expected]
            assert values.dtype == out
            found = list(zip(keys.tolist(), values.tolist(), weights.tolist(), strict=True))
            assert found == [record for one in expected for record in one]


@pytest.mark.parametrize("num_ids", [1, 1000, 70_000, 3_000_000])
def test_every_id_finds_its_bin(native_only: None, num_ids: int) -> None:
    gen = torch.Generator().manual_seed(0)
    inner = torch.randint(num_ids, (40,), generator=gen).unique()
    bounds = torch.cat(
        [torch.zeros(1, dtype=torch.int64), inner[inner > 0], torch.tensor([num_ids])]
    ).unique()
    ids = torch.cat([bounds[:-1], bounds[1:] - 1, torch.randint(num_ids, (500,), generator=gen)])
    places, _, _, counts = bin_edges(ids, ids, Bins.of(bounds), dtype=torch.int64)
    at = torch.searchsorted(bounds, ids, right=True) - 1
    assert counts.tolist() == torch.bincount(at, minlength=len(bounds) - 1).tolist()
    assert torch.equal(places.long(), (ids - bounds[at])[torch.sort(at, stable=True).indices])


@settings(max_examples=60, deadline=None)
@given(edges, st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_groups_keep_the_order(pairs, dtype, has_value, has_weight) -> None:
    key, value = _columns(pairs, torch.int32)
    value = value.to(dtype)
    weight = torch.arange(len(pairs), dtype=torch.float32) if has_weight else None
    expected = [[e for e, (u, _) in enumerate(pairs) if u == n] for n in range(NODES)]
    with pytest.MonkeyPatch.context() as patch:
        for indptr, values, weights in _both(
            patch, lambda: group_edges(key, value if has_value else None, NODES, weight, dtype=dtype)
        ):
            assert indptr.diff().tolist() == [len(one) for one in expected]
            flat = [e for one in expected for e in one]
            assert values.dtype == dtype
            assert values.tolist() == [pairs[e][1] if has_value else e for e in flat]
            assert (weights is None) != has_weight
            assert weights is None or weights.tolist() == flat


@settings(max_examples=60, deadline=None)
@given(edges, st.sampled_from(DTYPES), st.integers(-5, 5))
def test_lists_without_repeats_and_self(pairs, dtype, first) -> None:
    key, value = _columns(pairs, torch.int32)
    expected = [sorted({v for u, v in pairs if u == n} - {first + n}) for n in range(NODES)]
    with pytest.MonkeyPatch.context() as patch:
        for indptr, values in _both(
            patch, lambda: unique_lists(*group_edges(key, value.to(dtype), NODES)[:2], first)
        ):
            assert indptr.diff().tolist() == [len(one) for one in expected]
            assert values.tolist() == [v for one in expected for v in one]


@settings(max_examples=60, deadline=None)
@given(edges, st.booleans())
def test_sums_stand_where_the_first_stood(pairs, has_weight) -> None:
    key, value = _columns(pairs, torch.int32)
    weight = torch.arange(len(pairs), dtype=torch.float32) / 4 if has_weight else None
    expected: list[dict[int, float]] = [{} for _ in range(NODES)]
    for e, (u, v) in enumerate(pairs):
        expected[u][v] = expected[u].get(v, 0.0) + (e / 4 if has_weight else 1.0)
    with pytest.MonkeyPatch.context() as patch:
        for indptr, values, sums in _both(patch, lambda: sum_lists(*group_edges(key, value, NODES, weight))):
            assert indptr.diff().tolist() == [len(one) for one in expected]
            assert list(zip(values.tolist(), sums.tolist(), strict=True)) == [
                item for one in expected for item in one.items()
            ]


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize("bad", [-1, NODES, 2**40])
def test_wrong_ids_are_named(mode: str, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    good, wrong = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
    wrong[4] = bad
    degree = torch.zeros(NODES, dtype=torch.int32)
    for a, b in ((good, wrong), (wrong, good)):
        with pytest.raises(KernelError, match=rf"record 4 .*{bad}.* 0 \.\. {NODES - 1}"):
            count_edges(a, b, degree, degree.clone())
        with pytest.raises(KernelError, match="record 4"):
            bin_edges(a, b, Bins.of(torch.tensor([0, NODES])), dtype=torch.int64)
    if bad < 2**31:
        with pytest.raises(KernelError, match=r"key\[4\]"):
            group_edges(wrong.to(torch.int32), None, NODES)


def test_ends_must_match() -> None:
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(InputError, match="both int32 or both int64"):
        bin_edges(ids, ids.long(), Bins.of(torch.tensor([0, 1])))
