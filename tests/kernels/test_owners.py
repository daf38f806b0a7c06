"""Nodes by owner: order, rows as they are asked for, and counts, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyhop.errors import InputError
from polyhop.kernels.owners import by_owner


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize("is_sorted", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_by_owner(mode: str, is_sorted: bool, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    total, own = int(bounds[-1]), data.draw(st.integers(0, len(sizes) - 1))
    batches = [
        data.draw(st.permutations(range(total)))[: data.draw(st.integers(0, total))]
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    ids = [node for batch in batches for node in batch]
    cuts = torch.tensor([0, *(len(batch) for batch in batches)]).cumsum(0).tolist()
    order, rows, counts = by_owner(
        torch.tensor(ids, dtype=torch.int64), cuts, bounds, own, is_sorted=is_sorted
    )
    assert order.sort().values.tolist() == list(range(len(ids)))
    expected, shifted = [], []
    for q, size in enumerate(sizes):
        for m, batch in enumerate(batches):
            mine = [node for node in batch if bounds[q] <= node < bounds[q + 1]]
            mine = sorted(mine) if is_sorted else mine
            expected += mine
            shifted += [node - int(bounds[q]) + (0 if q == own else m * size) for node in mine]
            assert counts[q, m] == len(mine)
    assert [ids[at] for at in order.tolist()] == expected
    assert rows.tolist() == shifted


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_what_nobody_owns(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    with pytest.raises(InputError, match=r"ids\[1\] = 9, outside 0 .. 8"):
        by_owner(torch.tensor([3, 9]), [0, 2], torch.tensor([0, 4, 9]), 0, is_sorted=True)
    with pytest.raises(InputError, match="cuts"):
        by_owner(torch.tensor([3, 8]), [0, 1], torch.tensor([0, 4, 9]), 0, is_sorted=True)
