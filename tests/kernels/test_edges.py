"""Repeated sources and own loops: native and reference against a plain Python count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.kernels import native
from polyhop.kernels.edges import first_of_each, loop_weights, num_repeated

MODES = ["native", "reference"]


def choose(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "native" and native.status()["library"].startswith("no native"):
        pytest.skip(native.status()["library"])
    monkeypatch.setenv("POLYHOP_KERNELS", mode)


def lists(sources: list[list[int]], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    indptr = torch.tensor([0] + [len(s) for s in sources]).cumsum(0)
    return indptr, torch.tensor([u for s in sources for u in s], dtype=dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(sources=st.lists(st.lists(st.integers(0, 4), max_size=7), min_size=5, max_size=5))
@settings(max_examples=40, deadline=None)
def test_first_of_each_marks_later_copies(mode: str, dtype: torch.dtype, sources: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        choose(mode, patch)
        indptr, indices = lists(sources, dtype)
        expected = [u not in s[:k] for s in sources for k, u in enumerate(s)]
        assert first_of_each(indptr, indices).tolist() == expected
        assert num_repeated(indptr, indices) == expected.count(False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_loop_weights(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(mode, monkeypatch)
    indptr, indices = lists([[1, 0], [2], [2, 0, 2]], dtype)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert loop_weights(indptr, indices).tolist() == [1.0, 0.0, 1.0]  # type: ignore[union-attr]
    assert loop_weights(indptr, indices, weight).tolist() == [2.0, 0.0, 6.0]  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES)
def test_no_loops_is_none(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(mode, monkeypatch)
    assert loop_weights(*lists([[1], [0], []], torch.int32)) is None


@pytest.mark.parametrize("mode", MODES)
def test_no_edges(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(mode, monkeypatch)
    assert num_repeated(*lists([[], []], torch.int32)) == 0
