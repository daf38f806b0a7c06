"""What is particular to ranks over torch.distributed: injected latency, groups on one store, the way to a host.

The groups here join threads of one process, each with a connection of its own: no process has to be started. The contract of
the interface is held over real processes in test_collective.py.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from polyhop.comm import Collective
from polyhop.comm.torch_line import TorchCollective, _DelayLine, interface_towards, join
from polyhop.errors import LaunchError

LATENCY_S = 0.1


def delay_threads() -> int:
    return sum(thread.name == "polyhop-latency" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _loopback_and_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    assert delay_threads() == 0


def meet(
    num_ranks: int, job: Callable[[TorchCollective], Any], store: Any = None, **options: Any
) -> list[Any]:
    """job(line) on ranks that are threads; each closes its line after."""
    store = store or HashStore()
    results: list[Any] = [None] * num_ranks

    def rank_main(rank: int) -> None:
        try:
            line = join(store, rank, num_ranks, start_timeout_s=30, **options)
            results[rank] = job(line)
            line.close()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def rounds(line: Collective) -> tuple[float, int]:
    start = time.monotonic()
    for _ in range(4):
        line.barrier()
    return time.monotonic() - start, delay_threads()


def test_every_round_pays_the_latency() -> None:
    for seconds, threads in meet(2, rounds, latency_s=LATENCY_S):
        assert seconds >= 4 * LATENCY_S
        assert threads >= 1


def test_without_latency_nothing_waits_in_between() -> None:
    assert [threads for _, threads in meet(2, rounds)] == [0, 0]


def many_at_once(line: Collective) -> tuple[list[list[float]], float]:
    """Thirty exchanges under way: a longer wire holds none of them up by the others."""
    start = time.monotonic()
    pending = [
        line.start_all_to_all(
            [torch.full((2,), 100.0 * line.rank + step)] * line.num_ranks,
            kind="hidden",
            counts=[2] * line.num_ranks,
        )
        for step in range(30)
    ]
    return [[float(piece[0]) for piece in each.wait()] for each in pending], time.monotonic() - start


def test_messages_under_way_keep_their_order_and_overlap() -> None:
    for got, seconds in meet(3, many_at_once, latency_s=LATENCY_S):
        assert got == [[100.0 * q + step for q in range(3)] for step in range(30)]
        assert LATENCY_S <= seconds < 30 * LATENCY_S  # one after the other would take longer than the last


def reduced(line: Collective) -> tuple[list[float], list[float], float]:
    other = line.fork()
    total = line.all_reduce(torch.full((5,), line.rank + 1.0), kind="gradients")
    beside = other.all_reduce(torch.full((3,), 10.0 * line.rank), kind="gradients")
    other.close()
    return total.tolist(), beside.tolist(), line.traffic.now().bytes["gradients"]


@pytest.mark.parametrize("latency_s", [0.0, 0.02])
def test_lines_share_their_counters(latency_s: float) -> None:
    for total, beside, sent in meet(2, reduced, latency_s=latency_s):
        assert total == [3.0] * 5
        assert beside == [10.0] * 3
        assert sent in (4 * (2 + 3) + 4 * (1 + 2), 4 * (3 + 2) + 4 * (2 + 1))


def test_several_groups_on_one_store() -> None:
    store = HashStore()
    for name in ("a", "b"):
        found = meet(2, lambda line: line.all_reduce(torch.ones(1), kind="scores").item(), store, name=name)
        assert found == [2.0, 2.0]


def test_one_rank_alone_needs_no_connection() -> None:
    line = join(None, 0, 1)
    assert line.all_reduce(torch.tensor([2.0]), kind="scores").tolist() == [2.0]
    assert line.broadcast(torch.tensor([3]), kind="weights").tolist() == [3]
    assert [piece.tolist() for piece in line.all_to_all([torch.arange(2)], kind="ids")] == [[0, 1]]
    line.barrier()
    line.fork().close()
    line.close()
    assert line.traffic.now().total_messages == 0


def test_a_peer_that_never_comes() -> None:
    with pytest.raises(LaunchError, match="rank 0 of 2 cannot connect to the others over gloo"):
        join(HashStore(), 0, 2, start_timeout_s=0.5)


def test_what_fails_late_is_raised_where_it_is_waited_for() -> None:
    def gone() -> list[Any]:
        raise OSError("connection gone")

    line = _DelayLine(0.01)
    first, second = line.put(gone), line.put(list)
    with pytest.raises(OSError, match="connection gone"):
        first()
    assert second() == []  # the line goes on
    line.close()


def test_a_delay_line_runs_in_order_and_not_before_time() -> None:
    line, ran = _DelayLine(LATENCY_S), []
    start = time.monotonic()
    waits = [line.put(lambda at=at: ran.append((at, time.monotonic())) or []) for at in range(5)]  # type: ignore[misc]
    for wait in waits:
        wait()
    line.close()
    assert [at for at, _ in ran] == list(range(5))
    assert all(when - start >= LATENCY_S for _, when in ran)


def test_the_interface_towards_this_host() -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert "lo" in names
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") in (
        "lo",
        None,
    )  # None where it means ::1: gloo is then left to find out
    found = interface_towards("192.0.2.1")  # a documentation address: the way out, if there is one
    assert found is None or found in names


def test_a_host_that_has_no_address() -> None:
    assert interface_towards("no-such-host.invalid") is None


def test_joining_chooses_the_interface_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    join(None, 0, 1)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    join(None, 0, 1, address="127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    join(None, 0, 1, address="127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
