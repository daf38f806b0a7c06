"""Memory of the host that a device reads: registered once, for as long as anybody reads it. The runtime is a record."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from polyhop.graph import DenseFeatures, placed

GPU = torch.device("cuda", 0)


class Runtime:
    """cudaHostRegister and its opposite: what is registered, and how many bytes of it."""

    def __init__(self, refuses: bool = False) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []
        self.refuses = refuses

    def cudaHostRegister(self, where: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append("register")
        if self.refuses or where in self.registered:
            return 712
        self.registered[where] = size
        return 0

    def cudaHostUnregister(self, where: int) -> int:  # noqa: N802
        self.calls.append("unregister")
        del self.registered[where]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(placed, "_runtime", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.calls.append(f"wait for {device}"))
    return made


def test_two_readers_of_the_same_rows(runtime: Runtime) -> None:
    values = torch.rand(9, 4)
    _, first = placed._readable(values, GPU)
    _, second = placed._readable(values, GPU)
    assert first is second
    assert runtime.registered == {values.data_ptr(): 9 * 4 * 4}
    del first
    gc.collect()
    assert runtime.registered, "the other one still reads it"
    del second
    gc.collect()
    assert runtime.registered == {}
    assert runtime.calls == ["register", "wait for cuda:0", "unregister"]
    _, again = placed._readable(values, GPU)
    assert runtime.registered
    del again


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 9), (2, 4)])
def test_rows_of_a_larger_matrix(runtime: Runtime, start: int, stop: int) -> None:
    """All of it is registered, whoever comes first: torch takes memory for pinned by where it begins."""
    whole = torch.rand(9, 4)
    _, part = placed._readable(whole[start:stop], GPU)
    assert runtime.registered == {whole.data_ptr(): 9 * 4 * 4}
    _, rest = placed._readable(whole, torch.device("cuda", 1))
    assert rest is part
    del rest, part
    gc.collect()
    assert runtime.registered == {}
    assert set(runtime.calls[1:3]) == {"wait for cuda:0", "wait for cuda:1"}


def test_memory_that_cannot_be_registered_is_copied(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.refuses = True
    forgotten: list[Any] = []
    monkeypatch.setattr(placed, "_forget_error", forgotten.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    values = torch.rand(9, 4)
    copied, held = placed._readable(values, GPU)
    assert held is None
    assert copied.data_ptr() != values.data_ptr()
    assert torch.equal(copied, values)
    assert forgotten == [GPU], "else the next launch would be blamed"


def test_memory_is_free_where_placing_fails(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(placed, "_brought", full)
    x = DenseFeatures(torch.rand(9, 4))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *given: self)
    with pytest.raises(torch.OutOfMemoryError):
        placed.PlacedFeatures.of(x, GPU, 3, torch.rand(9))
    gc.collect()
    assert runtime.registered == {}


@pytest.mark.parametrize("piece", [1, 64, 1 << 28])
def test_hot_rows_come_in_pieces(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(placed, "_PIECE_BYTES", piece)
    values, ids = torch.rand(20, 3), torch.tensor([0, 3, 4, 9, 11, 12, 19])
    assert torch.equal(placed._brought(values, ids, torch.device("cpu")), values[ids])
    assert placed._brought(values, ids[:0], torch.device("cpu")).shape == (0, 3)
    assert placed._brought(torch.empty(20, 0), ids, torch.device("cpu")).shape == (7, 0)
