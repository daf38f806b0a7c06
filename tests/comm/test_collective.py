"""The contract of Collective, over threads and over gloo processes: the same jobs, the same results, the same counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.comm.collective import slices
from polyhop.errors import InputError, PeerError

Run = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "gloo"])
def run(request: pytest.FixtureRequest, ranks: Run) -> Run:
    return ranks if request.param == "gloo" else run_in_threads


def _rows(source: int, to: int, width: int) -> torch.Tensor:
    """What rank ``source`` has for rank ``to``: (source + 2 * to) % 4 rows, so some pieces are empty."""
    return torch.full(((source + 2 * to) % 4, width), 10.0 * source + to, dtype=torch.float64)


def exchange(line: Collective, known: bool) -> tuple[list[torch.Tensor], Cost]:
    before = line.traffic.now()
    pieces = [_rows(line.rank, q, 3) for q in range(line.num_ranks)]
    counts = [_rows(q, line.rank, 3).shape[0] for q in range(line.num_ranks)] if known else None
    got = line.all_to_all(pieces, kind="features", counts=counts)
    return got, line.traffic.now() - before


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("known", [True, False])
def test_all_to_all(run: Run, num_ranks: int, known: bool) -> None:
    for rank, (got, cost) in enumerate(run(num_ranks, exchange, known)):
        for q, piece in enumerate(got):
            assert torch.equal(piece, _rows(q, rank, 3))
        sent = [_rows(rank, q, 3).shape[0] for q in range(num_ranks) if q != rank]
        assert cost.bytes.get("features", 0) == 3 * 8 * sum(sent)
        assert cost.messages.get("features", 0) == sum(n > 0 for n in sent)
        assert cost.bytes.get("sizes", 0) == (0 if known else 8 * (num_ranks - 1))


def reduce(line: Collective, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, Cost]:
    before = line.traffic.now()
    total = line.all_reduce(_terms(line.rank, size, dtype), kind="gradients")
    return total, line.traffic.now() - before


def _terms(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order of adding."""
    rng = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=rng) * 10.0 ** torch.randint(-6, 7, (size,), generator=rng)).to(dtype)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000, 20_000])
def test_all_reduce_adds_in_rank_order(run: Run, num_ranks: int, size: int) -> None:
    expected = _terms(0, size, torch.float32)
    for rank in range(1, num_ranks):
        expected = expected + _terms(rank, size, torch.float32)
    bounds = slices(size, num_ranks)
    for rank, (total, cost) in enumerate(run(num_ranks, reduce, size, torch.float32)):
        assert torch.equal(total, expected)
        if num_ranks <= 2 or size <= 1000:  # small, or as many bytes either way: whole, in one round
            assert (cost.total_bytes, cost.rounds) == (4 * size * (num_ranks - 1), num_ranks > 1)
            continue
        mine = bounds[rank + 1] - bounds[rank]
        assert cost.total_bytes == 4 * ((size - mine) + mine * (num_ranks - 1))
        assert cost.rounds == 2


def gather(line: Collective) -> list[torch.Tensor]:
    return line.all_gather(torch.arange(line.rank * 2), kind="scores")


def test_all_gather_of_uneven_tensors(run: Run) -> None:
    for got in run(3, gather):
        assert [piece.tolist() for piece in got] == [[], [0, 1], [0, 1, 2, 3]]


def spread(line: Collective) -> list[float]:
    first = line.broadcast(torch.full((3,), float(line.rank)), kind="weights")
    last = line.broadcast(torch.full((2,), float(line.rank)), kind="weights", source=line.num_ranks - 1)
    return torch.cat([first, last]).tolist()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_broadcast(run: Run, num_ranks: int) -> None:
    assert run(num_ranks, spread) == [[0.0] * 3 + [num_ranks - 1.0] * 2] * num_ranks


def ring(line: Collective) -> tuple[float, Cost]:
    before = line.traffic.now()
    token = torch.tensor([float(line.rank)], dtype=torch.float64)
    sent = line.start_send(token, (line.rank + 1) % line.num_ranks, kind="hidden")
    got = line.receive([1], torch.float64, (line.rank - 1) % line.num_ranks)
    sent.wait()
    line.barrier()
    return float(got), line.traffic.now() - before


def test_point_to_point(run: Run) -> None:
    for rank, (got, cost) in enumerate(run(4, ring)):
        assert got == (rank - 1) % 4
        assert cost.bytes["hidden"] == 8
        assert cost.messages["hidden"] == 1


def two_lines(line: Collective) -> tuple[list[float], list[float]]:
    """Two lines in opposite orders on different ranks: each has its own order, so neither waits for the other."""
    other = line.fork()
    first, second = (line, other) if line.rank % 2 else (other, line)
    a = first.start_all_reduce(torch.tensor([1.0 if first is line else 10.0]), kind="gradients")
    b = second.start_all_reduce(torch.tensor([1.0 if second is line else 10.0]), kind="gradients")
    on_line, on_other = (a, b) if first is line else (b, a)
    return on_line.wait().tolist(), on_other.wait().tolist()


def test_lines_do_not_mix(run: Run) -> None:
    assert run(2, two_lines) == [([2.0], [20.0])] * 2


def overlapped(line: Collective) -> list[list[int]]:
    """Three exchanges under way at once; waited for in order."""
    pending = [
        line.start_all_to_all(
            [torch.tensor([100 * i + 10 * line.rank + q]) for q in range(line.num_ranks)],
            kind="ids",
            counts=[1] * line.num_ranks,
        )
        for i in range(3)
    ]
    return [torch.cat(each.wait()).tolist() for each in pending]


def test_several_under_way(run: Run) -> None:
    for rank, got in enumerate(run(3, overlapped)):
        assert got == [[100 * i + 10 * q + rank for q in range(3)] for i in range(3)]


def reduced_at_once(line: Collective) -> list[list[float]]:
    """Several sums under way: the second half of the first is sent after the first half of the others."""
    pending = [line.start_all_reduce(torch.full((5 * i + 1,), float(i)), kind="gradients") for i in range(4)]
    return [each.wait().tolist() for each in pending]


def test_several_sums_under_way(run: Run) -> None:
    for got in run(3, reduced_at_once):
        assert got == [[3.0 * i] * (5 * i + 1) for i in range(4)]


def expected(line: Collective, size: int) -> tuple[list[torch.Tensor], torch.Tensor, list[Cost]]:
    """Two expected sums, one after the other, with another exchange between the first's two ends."""
    sums, costs = [], []
    for turn in range(2):
        before = line.traffic.now()
        give = line.expect_sum(size, torch.float32, kind="gradients")
        costs.append(line.traffic.now() - before)
        if turn == 0:
            between = line.all_reduce(torch.full((size,), float(line.rank)), kind="statistics")
        pending = give(_terms(line.rank, size, torch.float32) * (1 + turn))
        sums.append(pending.wait())
        costs.append((line.traffic.now() - before).only("gradients"))
    return sums, between, costs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 50, 30_000])  # the last is summed in slices by 3 ranks and more
def test_an_expected_sum_is_that_of_all_reduce(run: Run, num_ranks: int, size: int) -> None:
    wanted = run(num_ranks, reduce, size, torch.float32)
    for rank, (sums, between, costs) in enumerate(run(num_ranks, expected, size)):
        assert torch.equal(sums[0], wanted[rank][0])
        assert torch.equal(sums[1], 2 * wanted[rank][0])
        assert torch.equal(between, torch.full((size,), num_ranks * (num_ranks - 1) / 2))
        assert costs[0] == Cost()  # nothing leaves before there is something to send
        assert costs[3] == wanted[rank][1]


def mixed(line: Collective) -> str:
    try:
        line.all_to_all([torch.zeros(1, 2 + q) for q in range(line.num_ranks)], kind="hidden")
    except InputError as error:
        return str(error)
    return ""


def test_pieces_of_other_width_are_refused(run: Run) -> None:
    assert all("one dtype and width" in text for text in run(2, mixed))


def wrong_peer(line: Collective) -> str:
    try:
        line.send(torch.zeros(1), line.rank, kind="hidden")
    except InputError as error:
        return str(error)
    return ""


def test_a_rank_is_no_peer_of_itself(run: Run) -> None:
    assert all("no peer" in text for text in run(2, wrong_peer))


def _fails_on_one(line: Collective) -> None:
    if line.rank == 1:
        raise ValueError("planted")
    line.barrier()


def test_a_failing_thread_wakes_the_others() -> None:
    with pytest.raises((ValueError, PeerError), match="planted"):
        run_in_threads(3, _fails_on_one)


def _ping(line: Collective) -> float:
    start = time.monotonic()
    for _ in range(5):
        line.barrier()
    return time.monotonic() - start


def test_injected_latency_is_paid_by_every_round() -> None:
    # A rank that comes late may find a message due; together the rounds still take their time.
    assert max(run_in_threads(2, _ping, latency_s=0.02)) >= 4.5 * 0.02


def test_unknown_kind_is_refused() -> None:
    line = run_in_threads(1, lambda line: line)[0]
    with pytest.raises(ValueError, match="unknown kind"):
        line.traffic.sent("gossip", 1)


def test_costs_add_and_scale() -> None:
    one = Cost({"ids": 4}, {"ids": 1}, 1)
    assert (one + one).to_json() == {"bytes": {"ids": 8}, "messages": {"ids": 2}, "rounds": 2}
    assert (one * 3 - one).total_bytes == 8
    assert (one + Cost({"features": 2})).only("features").total_bytes == 2
