"""Messages between stages in few bits: bytes to the byte, unbiased, the same bits every time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import InputError, UnsupportedError
from polyhop.graph import Block, Graph
from polyhop.kernels.keys import Key
from polyhop.strategies.pipeline_chunks import choose_chunks, cut_chunks
from polyhop.strategies.pipeline_messages import Messages
from polyhop.strategies.pipeline_pieces import Pieces

sys.path.insert(0, str(Path(__file__).parent))

import test_pipeline as running  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]


def messages_of(graph: Graph, bits: int, name: str = "gcnii") -> tuple[Messages, Pieces]:
    block = Block(graph.indptr, graph.indices, graph.num_nodes)
    chunks = cut_chunks(block, choose_chunks(block, 3, 0))
    pieces = Pieces.of(running.model_of(name, graph, 0.0), graph.num_features)
    return Messages(pieces, chunks, bits), pieces


def state_of(messages: Messages, pieces: Pieces, layer: int, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    num_rows = messages._chunks[1].num_rows
    return {
        name: torch.randn(num_rows, *shape, generator=rng, dtype=dtype)
        for name, (shape, dtype) in pieces.states[layer].items()
    }


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_arrives_is_right_on_average(make_graph: MakeGraph, bits: int, direction: Any) -> None:
    """Each value's mean over many steps is within five standard errors of what was sent; steps differ."""
    messages, pieces = messages_of(make_graph(60), bits)
    rows, total, squares, count = state_of(messages, pieces, 2), {}, {}, 400
    for step in range(count):
        messages.begin(Key(5, step))
        found = messages.opened(messages.packed(rows, 1, 2, direction), 2)
        for name, value in found.items():
            total[name] = total.get(name, 0.0) + value
            squares[name] = squares.get(name, 0.0) + value.square()
    for name, value in rows.items():
        mean = total[name] / count
        spread = (squares[name] / count - mean.square()).clamp(min=0).sqrt()
        assert bool((spread > 0).any())
        # A value next to a level is rounded away from it too seldom to be seen: allow for a few such times.
        step_size = (value.amax(1, keepdim=True) - value.amin(1, keepdim=True)) / (2**bits - 1)
        allowed = 5 * spread / count**0.5 + 8 * step_size / count
        assert bool(((mean - value).abs() <= allowed).all()), name


def test_roundings_are_their_own(make_graph: MakeGraph) -> None:
    """The same rows at another layer, in the other direction, of another name or step are rounded otherwise."""
    messages, pieces = messages_of(make_graph(60), 4)
    rows = state_of(messages, pieces, 2)
    rows["h0"] = rows["h"].clone()
    messages.begin(Key(5, 1))
    one = messages.opened(messages.packed(rows, 1, 2, "forward"), 2)
    assert not torch.equal(one["h"], one["h0"])
    for layer, direction, key in (
        (1, "forward", Key(5, 1)),
        (2, "backward", Key(5, 1)),
        (2, "forward", Key(5, 2)),
    ):
        messages.begin(key)
        other = messages.opened(messages.packed(rows, 1, layer, direction), layer)
        assert not torch.equal(one["h"], other["h"])
    messages.begin(Key(5, 1))
    assert torch.equal(messages.opened(messages.packed(rows, 1, 2, "forward"), 2)["h"], one["h"])


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_bytes_are_those_accounted(make_graph: MakeGraph, bits: int) -> None:
    graph = make_graph(60)
    for name in ("gat", "gcnii"):
        found = running.over_stages(graph, name, 3, 0.3, epochs=2, chunks=5, bits=bits)
        for rank in range(3):
            counted = found.costs[rank].only("hidden", "gradients")
            for expected in (found.accounts[rank], found.estimates[rank]):
                assert dict(counted.bytes) == dict(expected.bytes), (name, rank)
                assert dict(counted.messages) == dict(expected.messages), (name, rank)
    code = -(-12 * bits // 8) + (4 if bits <= 8 else 0)  # of a row of 12 columns: "h", and as much of "h0"
    row = 2 * 12 * 8 if bits == 32 else 2 * code
    assert found.costs[0].bytes["hidden"] == 60 * row


def test_results_repeat_and_32_bits_are_exact(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    plain = running.over_stages(graph, "gcnii", 3, 0.3, epochs=3, chunks=5)
    whole = running.over_stages(graph, "gcnii", 3, 0.3, epochs=3, chunks=5, bits=32)
    few, again = (
        running.over_stages(graph, "gcnii", 3, 0.3, epochs=3, chunks=5, bits=4, recompute=recompute)
        for recompute in (False, True)
    )
    running.assert_same(whole, plain, 0.0)
    running.assert_same(again, few, 0.0)
    assert few.losses != plain.losses
    near = running.over_stages(graph, "gcnii", 3, 0.3, epochs=3, chunks=5, bits=8)
    assert near.losses == pytest.approx(plain.losses, rel=1e-2)


def test_gradients_are_right_on_average(make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows exact and their gradients in 2 bits: what goes backward is linear, so the mean over steps is exact."""
    graph, count, packed = make_graph(60), 120, Messages.packed
    exact = running.over_stages(graph, "gcn", 2, chunks=3, exact_layers=True).gradients

    def only_back(self: Messages, rows: dict[str, Tensor], chunk: int, layer: int, direction: Any) -> Tensor:
        if direction == "backward":
            return packed(self, rows, chunk, layer, direction)
        return rows["h"]

    def opened(self: Messages, message: Tensor, layer: int) -> dict[str, Tensor]:
        return {"h": message} if message.dtype != torch.uint8 else plainly(self, message, layer)

    plainly = Messages.opened
    monkeypatch.setattr(Messages, "packed", only_back)
    monkeypatch.setattr(Messages, "opened", opened)

    def run(line: Collective) -> list[dict[str, Tensor]]:
        model = running.model_of("gcn", graph, 0.0)
        step = running.build(line, graph, model, chunks=3, exact_layers=True, bits=2)
        if line.rank == 1:  # which gets rows; rank 0 gets gradients
            shapes = {c: (step.chunks[c].num_rows, 12) for c in range(3)}
            step._messages.form = lambda chunk, layer: (shapes[chunk], torch.float64)
        found = []
        for epoch in range(count):
            running.stepped(step, model, epoch)
            found.append(running.gradients_of(model))
        return found

    draws = run_in_threads(2, run)[0]
    for name in draws[0]:
        values = torch.stack([each[name] for each in draws])
        error = (values.mean(0) - exact[name]).abs()
        allowed = 5 * values.std(0) / count**0.5
        assert float(values.std(0).max()) > 0
        assert bool((error <= allowed + 1e-12).all()), name


def test_rows_that_are_not_finite_are_named(make_graph: MakeGraph) -> None:
    messages, pieces = messages_of(make_graph(60), 8)
    rows = state_of(messages, pieces, 2)
    rows["h"][3, 1] = float("nan")
    messages.begin(Key(5, 1))
    node = int(messages._chunks.ids[messages._chunks[1].rows][3])
    with pytest.raises(InputError, match=f"gradients of rows.*layer 2 .*node {node}:"):
        messages.packed(rows, 1, 2, "backward")


def test_widths_of_halo_alone_are_refused(make_graph: MakeGraph) -> None:
    with pytest.raises(UnsupportedError, match="bits=adaptive is for strategy 'halo'"):
        running.over_stages(make_graph(60), "gcn", 2, bits="adaptive")


def on_rank(line: Collective, *given: Any) -> Any:
    """Of this module, so that ranks, which are processes of their own, find it."""
    return running.on_rank(line, *given)


def test_over_gloo(make_graph: MakeGraph, ranks: Callable[..., list[Any]]) -> None:
    graph, options = make_graph(60), {"chunks": 5, "bits": 4}
    virtual = running.over_stages(graph, "gcnii", 3, 0.3, epochs=2, **options)
    real = running.joined(ranks(3, on_rank, graph, "gcnii", 0.3, 2, options))
    running.assert_same(real, virtual, 0.0)
    assert [cost.bytes for cost in real.costs] == [cost.bytes for cost in virtual.costs]
