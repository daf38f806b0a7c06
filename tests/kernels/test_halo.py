"""The halo found chunk by chunk: native and reference against sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.kernels.halo import Halo


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 300),
    st.lists(st.integers(0, 10_000), max_size=80),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([1, 64, 128, 1 << 20]),
)
def test_rows_are_own_nodes_then_halo(nodes, given, span, dtype, step) -> None:
    start, stop = sorted(round(s * nodes) for s in span)
    ids = torch.tensor([i % nodes for i in given], dtype=dtype)
    remote = [i for i in ids.tolist() if not start <= i < stop]
    expected = sorted(set(remote))
    with pytest.MonkeyPatch.context() as patch:
        for mode in ("native", "reference"):
            patch.setenv("POLYHOP_KERNELS", mode)
            halo = Halo(nodes, start, stop)
            assert sum(halo.mark(chunk) for chunk in ids.split(11)) == len(remote)
            assert halo.close() == len(expected)
            assert [i for piece in halo.ids(step) for i in piece.tolist()] == expected
            rows = halo.rows(ids).tolist()
            assert rows == [
                i - start if start <= i < stop else stop - start + expected.index(i) for i in ids.tolist()
            ]


def test_rows_may_replace_the_ids(native_only: None) -> None:
    ids = torch.tensor([5, 0, 3, 5, 9], dtype=torch.int32)
    halo = Halo(10, 3, 5)
    halo.mark(ids)
    halo.close()
    assert halo.rows(ids, out=ids) is ids
    assert ids.tolist() == [3, 2, 0, 3, 4]
