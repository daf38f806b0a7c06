"""Rows by first appearance: equal to Python's dict and to the reference, over many batches, for any ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels import Relabel, reference

MODES = ["native", "reference"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("POLYHOP_KERNELS", request.param)
    return str(request.param)


def some(n: int, limit: int, seed: int) -> Tensor:
    return torch.randint(limit, (n,), generator=torch.Generator().manual_seed(seed))


def check_batch(table: Relabel, start: Tensor, parts: list[Tensor]) -> None:
    """A batch against a dict: rows of every part, ids, length, and what is found."""
    rows: dict[int, int] = {}
    table.start(start)
    for part in (start, *parts):
        expected = [rows.setdefault(i, len(rows)) for i in part.tolist()]
        if part is not start:
            got = table.add(part)
            assert got.dtype == torch.int32
            assert got.tolist() == expected
        assert len(table) == len(rows)
        assert table.ids().tolist() == list(rows)
    wanted = torch.cat([start, *parts, torch.tensor([0, 1, 1 << 62, (1 << 62) - 1, -1])])
    found = table.find(wanted)
    assert found.dtype == torch.int32
    assert found.tolist() == [rows.get(i, -1) for i in wanted.tolist()]
    assert len(table) == len(rows), "finding adds nothing"


@pytest.mark.parametrize("limit", [60, 5000, 1 << 62])
def test_equals_a_dict(mode: str, limit: int) -> None:
    """One table over batches of many sizes, with parts smaller and larger than the blocks of the native loop."""
    table = Relabel()
    for seed, sizes in enumerate([(3, 1), (0, 7), (700, 256, 257, 3000), (0,), (1, 0, 5), (40, 9000, 2)]):
        start = some(sizes[0], limit, seed).unique()
        start = start[torch.randperm(start.numel(), generator=torch.Generator().manual_seed(seed))]
        check_batch(table, start, [some(n, limit, 100 * seed + n) for n in sizes[1:]])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids(data: st.DataObject) -> None:
    few = data.draw(st.lists(st.integers(0, 1 << 62), min_size=1, max_size=20))
    ids = st.one_of(st.sampled_from(few), st.integers(0, 1 << 62))
    for mode in MODES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("POLYHOP_KERNELS", mode)
            start = data.draw(st.lists(ids, unique=True, max_size=30))
            parts = data.draw(st.lists(st.lists(ids, max_size=40), max_size=4))
            check_batch(
                Relabel(),
                torch.tensor(start, dtype=torch.int64),
                [torch.tensor(part, dtype=torch.int64) for part in parts],
            )


def test_equals_reference_on_large_batches(native_only: None) -> None:
    table = Relabel()
    ids = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(0))[:50_000]
    table.start(ids)
    for seed in range(3):
        more = some(200_000, 1 << 20, seed)
        ids, rows = reference.relabel(ids, more)
        assert torch.equal(table.add(more), rows)
    assert torch.equal(table.ids(), ids)
    assert torch.equal(table.find(ids), torch.arange(ids.numel(), dtype=torch.int32))


@pytest.mark.parametrize("stride", [1, 1024, 10_946, 1 << 20, 1 << 42, 0x9E3779B97F4A7C15 >> 20])
def test_no_stride_fills_one_corner(native_only: None, stride: int) -> None:
    """Ids that differ only in high bits, or step evenly: a hash that kept their pattern would take minutes here."""
    ids = torch.arange(min(300_000, (1 << 62) // stride)) * stride
    table = Relabel()
    assert torch.equal(table.add(ids), torch.arange(ids.numel(), dtype=torch.int32))
    assert torch.equal(table.find(ids.flip(0)), torch.arange(ids.numel(), dtype=torch.int32).flip(0))


def test_a_new_table_is_empty(mode: str) -> None:
    table = Relabel()
    nobody = torch.empty(0, dtype=torch.int64)
    assert len(table) == 0
    assert table.ids().tolist() == []
    assert table.find(torch.tensor([0, 5])).tolist() == [-1, -1]
    assert table.add(nobody).tolist() == []
    assert table.add(torch.tensor([7, 7, 3])).tolist() == [0, 0, 1]


def test_repeated_first_ids(mode: str) -> None:
    """The second appearance is named, also far into the list, and nothing stays."""
    table = Relabel()
    table.start(torch.tensor([8, 9]))
    with pytest.raises(InputError, match=r"ids\[2\] = 4 appears before"):
        table.start(torch.tensor([4, 5, 4, 5]))
    assert (len(table), table.ids().tolist()) == (0, [])
    assert table.find(torch.tensor([4, 5, 8])).tolist() == [-1, -1, -1]
    assert table.add(torch.tensor([5, 4])).tolist() == [0, 1]
    ids = torch.arange(5000)
    ids[4000] = 17
    with pytest.raises(InputError, match=r"ids\[4000\] = 17 appears before"):
        table.start(ids)
    assert table.find(ids[:3]).tolist() == [-1, -1, -1]


def test_negative_ids(mode: str) -> None:
    table = Relabel()
    with pytest.raises(InputError, match=r"ids\[1\] = -3, expected ids of at least 0"):
        table.start(torch.tensor([1, -3]))
    table.start(torch.tensor([6]))
    with pytest.raises(InputError, match=r"ids\[2\] = -1"):
        table.add(torch.tensor([2, 3, -1]))
    assert table.ids().tolist() == [6], "a refused add changes nothing"
    assert table.add(torch.tensor([3])).tolist() == [1]


def test_wrong_arguments() -> None:
    table = Relabel()
    for call in (table.start, table.add, table.find):
        with pytest.raises(InputError, match="ids must be int64"):
            call(torch.tensor([1], dtype=torch.int32))
        with pytest.raises(InputError, match="ids must be int64"):
            call(torch.tensor([[1]]))


def test_mode_changes_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is finished where it was started."""
    table = Relabel()
    for first, second in (MODES, MODES[::-1]):
        monkeypatch.setenv("POLYHOP_KERNELS", first)
        table.start(torch.tensor([5]))
        monkeypatch.setenv("POLYHOP_KERNELS", second)
        assert table.add(torch.tensor([9, 5])).tolist() == [1, 0]
        assert table.ids().tolist() == [5, 9]


def test_strided_views(mode: str) -> None:
    table = Relabel()
    table.start(torch.arange(10)[::2])
    assert table.add(torch.arange(10)[::3]).tolist() == [0, 5, 3, 6]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_lists_of_several_batches(mode: str, data: st.DataObject) -> None:
    """Each mini-batch as if it were alone: its nodes, then its neighbours, by first appearance."""
    node, table = st.integers(0, 30), Relabel()
    batches = data.draw(st.lists(st.lists(node, unique=True, max_size=6), min_size=1, max_size=4))
    ids = torch.tensor([each for batch in batches for each in batch], dtype=torch.int64)
    order = torch.tensor(data.draw(st.permutations(range(ids.numel()))), dtype=torch.int64)
    lists = [data.draw(st.lists(node, max_size=5)) for _ in order]  # lists[j] is of ids[order[j]]
    cut = data.draw(st.integers(0, len(lists)))
    pieces = [lists[:cut], lists[cut:]]
    counts = [torch.tensor([len(each) for each in piece], dtype=torch.int64) for piece in pieces]
    flat = [torch.tensor([i for each in piece for i in each], dtype=torch.int64) for piece in pieces]
    cuts = torch.tensor([0, *(len(batch) for batch in batches)]).cumsum(0).tolist()
    weights = [each.float() / 7 for each in flat] if data.draw(st.booleans()) else None
    got = table.join(ids, cuts, order, counts, flat, weights)
    of = {int(at): lists[j] for j, at in enumerate(order)}
    known, rows, indptr, weighed, edge_cuts = [], [], [], [], [0]
    for m, batch in enumerate(batches):
        mine = [of[at] for at in range(cuts[m], cuts[m + 1])]
        place = {each: row for row, each in enumerate(batch)}
        rows += [place.setdefault(i, len(place)) for each in mine for i in each]
        known += list(place)
        indptr += [sum(len(each) for each in mine[:i]) for i in range(len(batch) + 1)]
        weighed += [i for each in mine for i in each]
        edge_cuts.append(len(rows))
        assert got.cuts[m + 1] == len(known)
    assert (got.ids.tolist(), got.rows.tolist(), got.indptr.tolist()) == (known, rows, indptr)
    assert (got.rows.dtype, got.edge_cuts) == (torch.int32, edge_cuts)
    assert (got.weights is None) == (weights is None)
    if got.weights is not None:
        assert torch.equal(got.weights, torch.tensor(weighed).float() / 7)


def test_lists_in_their_order_and_what_is_refused(mode: str) -> None:
    table, ids, one = Relabel(), torch.tensor([5, 3]), torch.tensor([1, 1])
    got = table.join(ids, [0, 2], None, [one], [torch.tensor([7, 5])])
    assert (got.ids.tolist(), got.rows.tolist()) == ([5, 3, 7], [2, 0])
    with pytest.raises(InputError):
        table.join(torch.tensor([5, 5]), [0, 2], None, [one], [torch.tensor([7, 5])])
    with pytest.raises(InputError):
        table.join(ids, [0, 2], None, [one], [torch.tensor([7, -1])])
    with pytest.raises(InputError, match="3 neighbours"):
        table.join(ids, [0, 2], None, [one], [torch.tensor([7, 5, 6])])
