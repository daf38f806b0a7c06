"""Ranks in groups: what passes inside one reaches nobody else, and sums in two tiers are sums."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyhop.comm import Collective, Cost, GroupLine, TieredLine, group_size, run_in_threads
from polyhop.errors import ConfigError, InputError, PeerError

Run = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "gloo"])
def run(request: pytest.FixtureRequest, ranks: Run) -> Run:
    return ranks if request.param == "gloo" else run_in_threads


def outside(line: Collective, num_groups: int) -> list[int]:
    size = line.num_ranks // num_groups
    return [q for q in range(line.num_ranks) if q // size != line.rank // size]


def inside(line: Collective, num_groups: int) -> tuple[list[Any], Cost, Cost]:
    """Every operation once, on the line of the group and on a fork of it; (results, all that left, what left the group)."""
    group, others = GroupLine.of(line, num_groups), outside(line, num_groups)
    before = line.traffic.now(), line.traffic.to(others)
    results: list[Any] = [group.rank, group.num_ranks]
    fork = group.fork()
    for each in (group, fork):
        rows = [torch.full((1 + q,), 10 * line.rank + q) for q in range(group.num_ranks)]
        results.append(torch.cat(each.all_to_all(rows, kind="ids")).tolist())
        results.append(each.all_reduce(torch.tensor([float(line.rank)]), kind="hidden").tolist())
        results.append(
            each.broadcast(torch.tensor([line.rank]), kind="weights", source=group.num_ranks - 1).tolist()
        )
        give = each.expect_sum(3, torch.float32, kind="hidden")
        results.append(give(torch.full((3,), float(line.rank))).wait().tolist())
        each.barrier()
    if group.num_ranks > 1:
        sent = fork.start_send(torch.tensor([line.rank]), (group.rank + 1) % group.num_ranks, kind="ids")
        results.append(fork.receive([1], torch.int64, (group.rank - 1) % group.num_ranks).tolist())
        sent.wait()
    fork.close()
    return results, line.traffic.now() - before[0], line.traffic.to(others) - before[1]


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_every_operation_of_a_group(run: Run, num_groups: int) -> None:
    size = 4 // num_groups
    found = run(4, inside, num_groups)
    for rank, (results, sent, left) in enumerate(found):
        group, place = rank // size, rank % size
        members = range(group * size, (group + 1) * size)
        at_once = [
            [10 * q + place for q in members for _ in range(1 + place)],
            [float(sum(members))],
            [members[-1]],
            [float(sum(members))] * 3,
        ]
        ring = [[members[(place - 1) % size]]] if size > 1 else []
        assert results == [place, size, *at_once, *at_once, *ring]
        assert left == Cost()
        assert (sent.total_bytes > 0) == (size > 1)


def test_groups_do_not_wait_for_one_another() -> None:
    """The second group ends all its work before the first begins."""
    done = threading.Barrier(4)

    def work(line: Collective) -> list[float]:
        group = GroupLine.of(line, 2)
        if line.rank < 2:
            done.wait(30)
        total = group.all_reduce(torch.tensor([float(line.rank)]), kind="hidden").tolist()
        if line.rank >= 2:
            done.wait(30)
        return total

    assert run_in_threads(4, work) == [[1.0], [1.0], [5.0], [5.0]]


def mixed(line: Collective) -> list[float]:
    """Operations of all and of the group take turns on one line."""
    group, found = GroupLine.of(line, 2), []
    for turn in range(3):
        first = line.start_all_reduce(torch.tensor([1.0 + turn]), kind="gradients")
        second = group.start_all_reduce(torch.tensor([10.0 * line.rank]), kind="hidden")
        found += [*second.wait().tolist(), *first.wait().tolist()]
    return found


def test_a_group_takes_turns_with_all(run: Run) -> None:
    for rank, found in enumerate(run(4, mixed)):
        own = 10.0 if rank < 2 else 50.0
        assert found == [own, 4.0, own, 8.0, own, 12.0]


def numbers(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def tiered(line: Collective, num_groups: int, sizes: list[int]) -> tuple[list[torch.Tensor], Cost, Cost]:
    """Several sums under way at once, the last one expected; (sums, all that left, what left the group)."""
    all_ranks, others = TieredLine(line, num_groups), outside(line, num_groups)
    before = line.traffic.now(), line.traffic.to(others)
    give = all_ranks.expect_sum(sizes[-1], torch.float64, kind="gradients")
    pending = [all_ranks.start_all_reduce(numbers(line.rank, size), kind="gradients") for size in sizes[:-1]]
    pending.append(give(numbers(line.rank, sizes[-1])))
    sums = [each.wait() for each in pending]
    return sums, line.traffic.now() - before[0], line.traffic.to(others) - before[1]


@pytest.mark.parametrize("sizes", [[0, 1, 7], [9001, 30_000, 5], [20_000, 3, 12_345]])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_sums_in_tiers(num_groups: int, sizes: list[int]) -> None:
    found = run_in_threads(4, tiered, num_groups, sizes)
    for sums, _, _ in found:
        for size, total, first in zip(sizes, sums, found[0][0], strict=True):
            expected = sum((numbers(rank, size) for rank in range(1, 4)), numbers(0, size))
            assert torch.allclose(total, expected, rtol=0, atol=1e-13)
            assert torch.equal(total, first)


def test_sums_in_tiers_over_processes(ranks: Run) -> None:
    over_threads = run_in_threads(4, tiered, 2, [20_000, 3, 12_345])
    for (sums, sent, left), expected in zip(
        ranks(4, tiered, 2, [20_000, 3, 12_345]), over_threads, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(sums, expected[0], strict=True))
        assert left == expected[2]
        assert left.total_bytes < sent.total_bytes


def test_tiers_send_fewer_bytes_between_groups() -> None:
    """Of 8 ranks in 2 groups, a flat sum lets each send the whole vector's bytes out; in tiers a quarter of them."""

    def flat(line: Collective) -> tuple[Cost, Cost]:
        line.all_reduce(numbers(line.rank, 80_000), kind="gradients")
        before = line.traffic.to(outside(line, 2))
        TieredLine(line, 2).all_reduce(numbers(line.rank, 80_000), kind="gradients")
        return before, line.traffic.to(outside(line, 2)) - before

    for plain, in_tiers in run_in_threads(8, flat):
        assert plain.total_bytes == 8 * 80_000
        assert in_tiers.total_bytes == 8 * 20_000


def forked(line: Collective) -> list[float]:
    fork = TieredLine(line, 2).fork()
    return fork.all_reduce(numbers(line.rank, 10_000), kind="gradients")[:3].tolist()


def test_a_fork_of_tiers_sums_too() -> None:
    found = run_in_threads(4, forked)
    assert found[0] == found[3]
    assert found[0] == pytest.approx(sum(numbers(rank, 10_000)[:3] for rank in range(4)).tolist())


def broken(line: Collective) -> str:
    if line.rank == 3:
        raise ValueError("planted")
    try:
        TieredLine(line, 2).all_reduce(torch.ones(50_000), kind="gradients")
    except PeerError as error:
        return str(error)
    return ""


def test_a_rank_of_another_group_that_fails_is_noticed() -> None:
    with pytest.raises((ValueError, PeerError), match="planted"):
        run_in_threads(4, broken)


@pytest.mark.parametrize(
    ("num_ranks", "num_groups", "fitting"),
    [(4, 3, "1, 2, 4"), (2, 4, "1, 2"), (6, 0, "1, 2, 3, 6"), (5, -1, "1, 5")],
)
def test_groups_that_are_not_alike(num_ranks: int, num_groups: int, fitting: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"split_groups={num_groups} with {num_ranks} ranks: .*\({fitting}\)"
    ):
        group_size(num_ranks, num_groups)


def test_peers_of_a_group_are_its_members() -> None:
    def wrong(line: Collective) -> str:
        try:
            GroupLine.of(line, 2).send(torch.zeros(1), 2, kind="hidden")
        except InputError as error:
            return str(error)
        return ""

    assert all("no peer" in text for text in run_in_threads(4, wrong))
