"""Rows in few bits: both ends agree, errors stay within a step and vanish on average, ranges are those of the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import InputError, PeerError
from polyhop.exchange.crossing import DIRECTIONS, Crossing, Lists, Spans
from polyhop.exchange.quantised import QuantisedMessages, Widths
from polyhop.kernels import quantised_bytes
from polyhop.kernels.keys import Key

Run = Callable[..., list[Any]]

NUM_RANKS, ROWS, COLUMNS = 3, 7, 21
WIDTHS = (1, 2, 4, 8, 16, 32)


def reads(reader: int, owner: int) -> Tensor:
    """Local rows of ``owner`` that ``reader`` reads: all pairs but one (1 reads nothing of 2), of different lengths."""
    if reader == owner or (reader, owner) == (1, 2):
        return torch.empty(0, dtype=torch.int64)
    return torch.arange(reader + owner, ROWS)


def lists_of(rank: int) -> Lists:
    lent = [reads(q, rank) for q in range(NUM_RANKS)]
    return Lists(ROWS, lent, [reads(rank, q).numel() for q in range(NUM_RANKS)])


def ids_of(rank: int) -> tuple[Tensor, Tensor]:
    """The user's ids: 100, 101, ... in rank order."""
    halo = torch.cat([100 + ROWS * q + reads(rank, q) for q in range(NUM_RANKS)])
    return 100 + ROWS * rank + torch.arange(ROWS), halo


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    """[all rows, columns]: scales differ from row to row, and one row is constant."""
    rows = torch.randn(
        NUM_RANKS * ROWS, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    rows = rows * torch.logspace(-3, 3, rows.shape[0], dtype=torch.float64)[:, None] + 0.5
    rows[4] = 0.25
    return rows.to(dtype)


def widths_of(rank: int, direction: str) -> Widths:
    """A mix that is a function of (direction, sender, receiver, position) alone."""

    def mix(sender: int, receiver: int, count: int) -> Tensor:
        shift = 3 * sender + receiver + (direction == "backward")
        return torch.tensor([WIDTHS[(at + shift) % 6] for at in range(count)], dtype=torch.uint8)

    lists = lists_of(rank)
    way: Any = direction
    leaving = [mix(rank, q, k) for q, k in enumerate(lists.leaving(way))]
    return Widths(leaving, [mix(q, rank, k) for q, k in enumerate(lists.arriving(way))])


def channel_of(line: Collective, width: int | None, layer: int = 1) -> Crossing:
    """One width for all, or (None) the mix."""
    messages = QuantisedMessages(lists_of(line.rank), width or 8, ids_of(line.rank), Spans(layer=layer))
    if width is None:
        for direction in DIRECTIONS:
            messages.set_widths(direction, widths_of(line.rank, direction))
    return Crossing(messages, line)


def step(channel: Crossing, key: Key, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(halo, what came back of gradients that are the halo's exact rows)."""
    rank = channel.line.rank
    own = values(dtype)[ROWS * rank : ROWS * (rank + 1)].clone().requires_grad_()
    channel.begin_step(key)
    rows, _, arrive = channel.leave(own * 1, 0)
    halo = arrive()
    grads = values(dtype)[ids_of(rank)[1] - 100]
    (0 * rows.sum() + (halo * grads).sum()).backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    return halo.detach(), own.grad


def steps_of(bits: Tensor, rows: Tensor) -> Tensor:
    """[rows, 1]: the largest error of a row of that width: a step, with the rounding of its parameters."""
    low, high = rows.amin(1).double(), rows.amax(1).double()
    levels = 2.0 ** bits.double().clamp(max=8) - 1
    error = (high - low) / levels * 1.05 + 0.02 * torch.maximum(low.abs(), high.abs()) / levels
    error = torch.where(bits == 16, rows.abs().amax(1).double() * 2.0**-8, error)
    error = torch.where(bits == 32, rows.abs().amax(1).double() * 2.0**-24, error)  # float32, in doubles too
    return error[:, None] + 1e-12


def mixed_step(line: Collective, dtype: torch.dtype) -> tuple[Tensor, Tensor, Cost]:
    channel = channel_of(line, None)
    before = line.traffic.now()
    halo, grad = step(channel, Key(3, 5), dtype)
    return halo, grad, line.traffic.now() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_both_ends_agree_on_mixed_widths(dtype: torch.dtype) -> None:
    found = run_in_threads(NUM_RANKS, mixed_step, dtype)
    rows = values(dtype).double()
    bounds = torch.zeros(NUM_RANKS * ROWS, 1, dtype=torch.float64)
    sums = torch.zeros(NUM_RANKS * ROWS, COLUMNS, dtype=torch.float64)
    for rank, (halo, _, sent) in enumerate(found):
        assert halo.dtype == dtype
        ids = ids_of(rank)[1] - 100
        forward, back = widths_of(rank, "forward"), widths_of(rank, "backward")
        slack = 0.01 if dtype == torch.bfloat16 else 0.0
        error = (halo.double() - rows[ids]).abs()
        bound = steps_of(torch.cat(forward.arriving), rows[ids]) + slack * rows[ids].abs()
        assert bool((error <= bound).all())
        assert float(error.max()) > 0
        expected = [quantised_bytes(bits, COLUMNS) for way in (forward, back) for bits in way.leaving]
        assert sent.bytes == {"hidden": sum(expected)}
        assert sent.messages == {"hidden": sum(bool(size) for size in expected)}
        sums.index_add_(0, ids, rows[ids])
        bounds.index_add_(0, ids, steps_of(torch.cat(back.leaving), rows[ids]))
    for rank, (_, grad, _) in enumerate(found):
        own = slice(ROWS * rank, ROWS * (rank + 1))
        slack = 0.02 if dtype == torch.bfloat16 else 1e-6
        assert bool(((grad.double() - sums[own]).abs() <= bounds[own] + slack * sums[own].abs() + 1e-9).all())


def test_rows_of_32_bits_and_constant_rows_are_exact() -> None:
    rows = values()
    for rank, (halo, _, _) in enumerate(run_in_threads(NUM_RANKS, mixed_step, torch.float32)):
        ids = ids_of(rank)[1] - 100
        bits = torch.cat(widths_of(rank, "forward").arriving)
        is_exact = (bits == 32) | (ids == 4)
        assert bool(is_exact.any())
        assert torch.equal(halo[is_exact], rows[ids][is_exact])


def test_over_gloo(ranks: Run) -> None:
    expected = run_in_threads(NUM_RANKS, mixed_step, torch.float32)
    for one, other in zip(ranks(NUM_RANKS, mixed_step, torch.float32), expected, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert one[2].bytes == other[2].bytes


def many(line: Collective, width: int, count: int) -> tuple[Tensor, Tensor]:
    """Means, and means of squares, over many steps: [2, H, F] of the halo and [2, n, F] of the gradients."""
    channel = channel_of(line, width)
    sums = [torch.zeros(2, *each.shape, dtype=torch.float64) for each in step(channel, Key(0))]
    for epoch in range(count):
        for total, each in zip(sums, step(channel, Key(0, epoch)), strict=True):
            total += torch.stack([each.double(), each.double() ** 2])
    return sums[0] / count, sums[1] / count


@pytest.mark.parametrize("width", [1, 2, 8])
def test_messages_are_right_on_average(width: int) -> None:
    """Every element over 400 steps, forward and backward: within 5.5 times the most that its mean can spread."""
    count = 400
    found = run_in_threads(NUM_RANKS, many, width, count)
    rows = values().double()
    spread = (rows.amax(1) - rows.amin(1)) / (2**width - 1) / 2  # half a step
    back = torch.zeros(NUM_RANKS * ROWS, COLUMNS, dtype=torch.float64)
    spread_back = torch.zeros(NUM_RANKS * ROWS, dtype=torch.float64)
    for rank in range(NUM_RANKS):
        ids = ids_of(rank)[1] - 100
        back.index_add_(0, ids, rows[ids])
        spread_back.index_add_(0, ids, spread[ids] ** 2)
    for rank, (halo, grads) in enumerate(found):
        ids, own = ids_of(rank)[1] - 100, slice(ROWS * rank, ROWS * (rank + 1))
        for mean, right, most in (
            (halo[0], rows[ids], spread[ids]),
            (grads[0], back[own], spread_back[own].sqrt()),
        ):
            bound = 5.5 * 1.05 * most[:, None] / count**0.5
            # The parameters of a row are bfloat16: a step may be a little longer, a few values' last bits are float32's.
            assert bool(((mean - right).abs() <= bound + 1e-6 * right.abs()).all())


def same_key(line: Collective, layer: int, key: Key) -> tuple[Tensor, Tensor]:
    return step(channel_of(line, 2, layer), key)


def test_rounding_is_a_function_of_step_and_layer() -> None:
    one, again, later, above = (
        run_in_threads(NUM_RANKS, same_key, layer, key)
        for layer, key in ((1, Key(3, 5)), (1, Key(3, 5)), (1, Key(3, 6)), (2, Key(3, 5)))
    )
    for rank in range(NUM_RANKS):
        for way in (0, 1):
            assert torch.equal(one[rank][way], again[rank][way])
            if one[rank][way].any():
                assert not torch.equal(one[rank][way], later[rank][way])
                assert not torch.equal(one[rank][way], above[rank][way])


def test_each_reader_gets_noise_of_its_own() -> None:
    """A row that two ranks read is rounded for each apart, so that errors do not add up where gradients meet."""
    found = run_in_threads(NUM_RANKS, same_key, 1, Key(3, 5))
    shared = set(ids_of(0)[1].tolist()) & set(ids_of(2)[1].tolist())
    node = max(shared)
    copies = [found[rank][0][ids_of(rank)[1] == node] for rank in (0, 2)]
    assert not torch.equal(*copies)


def traced(line: Collective) -> tuple[dict[Any, list[Tensor]], dict[Any, list[Tensor]], bool]:
    channel = channel_of(line, 4)
    messages = channel.messages
    assert isinstance(messages, QuantisedMessages)
    step(channel, Key(0, 0))
    is_quiet = not messages.take_squares()
    messages.traces = True
    for epoch in range(3):
        step(channel, Key(0, epoch))
    found = messages.take_squares()
    return found, messages.take_squares(), is_quiet


def test_ranges_are_those_of_the_rows() -> None:
    rows = values().double()
    squares = (rows.amax(1) - rows.amin(1)) ** 2
    for rank, (found, again, is_quiet) in enumerate(run_in_threads(NUM_RANKS, traced)):
        assert is_quiet, "nothing is noted unless it is asked for"
        assert again == {}, "taken is taken"
        assert set(found) == set(DIRECTIONS)
        own, halo = ids_of(rank)
        for q in range(NUM_RANKS):
            sent = own[reads(q, rank)] - 100
            assert found["forward"][q].dtype == torch.float64
            assert torch.allclose(found["forward"][q], 3 * squares[sent], rtol=1e-5)
        back = torch.cat(found["backward"])
        assert torch.allclose(back, 3 * squares[halo - 100], rtol=1e-5)


def not_finite(line: Collective, value: float, direction: str) -> str:
    """Rank 1 has a value that is not finite, in the rows or in the gradients that it sends."""
    channel = channel_of(line, 4, layer=2)
    own = values()[ROWS * line.rank : ROWS * (line.rank + 1)].clone()
    if line.rank == 1 and direction == "forward":
        own[5, 3] = value
    own.requires_grad_()
    channel.begin_step(Key(0))
    try:
        halo = channel.leave(own, 0)[2]()
        grads = torch.ones_like(halo)
        if line.rank == 1:
            grads[2, 1] = value
        (halo * grads).sum().backward()  # type: ignore[no-untyped-call]
    except InputError as error:
        line.fail(error)  # type: ignore[attr-defined]
        return str(error)
    except PeerError:
        return ""
    return ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(value: float) -> None:
    told = run_in_threads(NUM_RANKS, not_finite, value, "forward")[1]
    assert "rows that layer 2 sends from rank 1 to rank 0 are not finite, first at node 112" in told
    told = run_in_threads(NUM_RANKS, not_finite, value, "backward")[1]
    node = int(ids_of(1)[1][2])
    assert (
        f"gradients of rows that layer 2 sends from rank 1 to rank 0 are not finite, first at node {node}"
        in told
    )


def disagreeing(line: Collective) -> None:
    channel = channel_of(line, 4 if line.rank else 8)
    step(channel, Key(0))


def test_ends_that_disagree_are_told() -> None:
    with pytest.raises((InputError, PeerError), match="expected"):
        run_in_threads(NUM_RANKS, disagreeing)


def rechosen(line: Collective) -> list[tuple[Tensor, float]]:
    """Steps with 8 bits, then 2, then the mix: (halo, bytes)."""
    channel, found = channel_of(line, 8), []
    lists = lists_of(line.rank)
    for width in (8, 2, None):
        for way in DIRECTIONS:
            assert isinstance(channel.messages, QuantisedMessages)
            uniform = Widths.uniform(width or 8, lists.leaving(way), lists.arriving(way))
            channel.messages.set_widths(way, uniform if width else widths_of(line.rank, way))
        before = line.traffic.now()
        halo, _ = step(channel, Key(3, 5))
        found.append((halo, (line.traffic.now() - before).bytes.get("hidden", 0)))
    return found


def test_new_widths_are_those_of_a_channel_made_with_them() -> None:
    mixed = run_in_threads(NUM_RANKS, mixed_step, torch.float32)
    two = run_in_threads(NUM_RANKS, same_key, 1, Key(3, 5))
    for rank, found in enumerate(run_in_threads(NUM_RANKS, rechosen)):
        assert torch.equal(found[1][0], two[rank][0])
        assert torch.equal(found[2][0], mixed[rank][0])
        assert found[1][1] < 0.5 * found[0][1]
