"""The store: addresses that are wrong, ports that are busy, strangers that answer; and what is said while waiting."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from polyhop.comm import store
from polyhop.comm.store import Patience, bounded, host_store, is_loopback, reach_store
from polyhop.errors import LaunchError

HERE = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HERE, 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def patience() -> Iterator[Patience]:
    made = Patience(1, 0.6)
    yield made
    made.close()


def test_store_is_hosted_on_that_address_alone_and_its_port_is_given_back() -> None:
    hosted = host_store(HERE, 0)
    port = hosted.port
    hosted.set("a", "1")
    waits = Patience(1, 20)
    client, address = reach_store(HERE, port, waits)
    waits.close()
    assert client.get("a") == b"1"
    assert address == HERE
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=2)
    del client, hosted
    until = time.monotonic() + 5
    while True:
        try:
            socket.create_server((HERE, port)).close()
            break
        except OSError:
            assert time.monotonic() < until, "the port is still taken"
            time.sleep(0.05)


def test_busy_port_is_named() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is busy.*choose another.*0 takes a free one"):
            host_store(HERE, port)


def test_address_of_another_host_cannot_be_hosted() -> None:
    with pytest.raises(LaunchError, match=r"192.0.2.77 is no address of this host.*MASTER_ADDR"):
        host_store("192.0.2.77", 0)


def test_unknown_name_cannot_be_hosted() -> None:
    with pytest.raises(LaunchError, match=r"does not resolve.*MASTER_ADDR"):
        host_store("no-such-host.invalid", 0)


def test_refused_address_is_named_after_the_time(patience: Patience) -> None:
    port = free_port()
    with pytest.raises(
        LaunchError, match=rf"rank 1 did not reach the store at {HERE}:{port} within 0.6 s: .*refused"
    ):
        reach_store(HERE, port, patience)
    assert patience.left_s == 0


def test_unknown_name_is_told_from_a_refusal(patience: Patience) -> None:
    with pytest.raises(LaunchError, match=r"'no-such-host.invalid' does not resolve.*MASTER_ADDR"):
        reach_store("no-such-host.invalid", 1, patience)


def test_something_else_listens_there(patience: Patience) -> None:
    with socket.create_server((HERE, 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(LaunchError, match=f"something answers at {HERE}:{port}, but it is no store"):
            reach_store(HERE, port, patience)


def test_store_that_opens_late_is_reached() -> None:
    port = free_port()
    opened = []

    def late() -> None:
        time.sleep(0.4)
        opened.append(host_store(HERE, port))

    thread = threading.Thread(target=late)
    thread.start()
    waits = Patience(1, 20)
    reach_store(HERE, port, waits)
    waits.close()
    thread.join()


def test_store_of_the_run_before_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of a program opens its own store at one address: who is early finds the last one, and it ends."""
    stores = [host_store(HERE, 0, "0/0")]
    port, seen, has_looked = stores[0].port, [], threading.Event()
    look = store._run_of

    def run_of(found: Any) -> str | None:
        seen.append(look(found))
        has_looked.set()
        return seen[-1]

    def change() -> None:
        has_looked.wait(20)
        stores.clear()
        stores.append(host_store(HERE, port, "0/1"))
        stores[0].set("a", "1")

    monkeypatch.setattr(store, "_run_of", run_of)
    thread = threading.Thread(target=change)
    thread.start()
    waits = Patience(1, 20)
    client, _ = reach_store(HERE, port, waits, "0/1")
    waits.close()
    thread.join()
    assert (seen[0], seen[-1]) == ("0/0", "0/1")
    client.wait(["a"])  # of the second store alone
    stores.clear()


@pytest.mark.parametrize(("run", "expected"), [("0/0", "run 0/0"), (None, "no run yet")])
def test_store_of_another_run_is_named_after_the_time(
    patience: Patience, run: str | None, expected: str
) -> None:
    hosted = host_store(HERE, 0, run)
    with pytest.raises(LaunchError, match=f"within 0.6 s: the store there is of {expected}, not of run 0/1"):
        reach_store(HERE, hosted.port, patience, "0/1")


@pytest.mark.parametrize("num_broken", [2, 100])
def test_connection_that_breaks_is_tried_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, num_broken: int
) -> None:
    """A store that has just ended closes what it had accepted; a stranger may do so to everyone."""
    monkeypatch.setattr(store, "_CONNECT_S", 0.2)
    monkeypatch.setattr(store, "_MOST_BROKEN", 3)
    listener = socket.create_server((HERE, 0))
    port, hosted = listener.getsockname()[1], []

    def hang_up() -> None:
        heard = 0
        with listener, suppress(OSError):  # until the test shuts it
            while heard < num_broken:
                link, _ = listener.accept()
                with link:
                    heard += bool(link.recv(1))  # knocking says nothing
        if heard == num_broken:
            hosted.append(host_store(HERE, port))

    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    waits = Patience(1, 20)
    if num_broken == 2:
        reach_store(HERE, port, waits)
        thread.join()
        assert hosted
    else:
        with pytest.raises(LaunchError, match=f"something answers at {HERE}:{port}, but it is no store"):
            reach_store(HERE, port, waits)
        assert waits.left_s > 0
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    waits.close()


def test_port_that_connects_to_itself_is_no_store(
    monkeypatch: pytest.MonkeyPatch, patience: Patience
) -> None:
    """Where nobody listens, the system may give the caller that very port, and TCP then connects it to itself."""
    port, connect = free_port(), socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda at, timeout: connect(at, timeout, source_address=(HERE, port))
    )
    monkeypatch.setattr(store, "_connect", lambda *_: pytest.fail("taken for a store"))
    with pytest.raises(LaunchError, match=rf"did not reach the store at {HERE}:{port}.*(refused|in use)"):
        reach_store(HERE, port, patience)


def test_slow_start_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "_SAY_AFTER_S", (0.1, 0.5, 60.0))
    port = free_port()
    waits = Patience(3, 1.2)
    with pytest.raises(LaunchError):
        reach_store(HERE, port, waits)
    waits.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        f"polyhop: rank 3 waits to reach the store at {HERE}:{port} (connection refused"
    )
    assert "gives up in 1 s" in lines[0]


def test_quick_start_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    waits = Patience(0, 5)
    waits.wait_for("meet", "rank 1 of 2")
    time.sleep(0.3)
    waits.close()
    assert capsys.readouterr().err == ""


def test_call_that_never_returns_is_left_behind() -> None:
    started = time.monotonic()
    with pytest.raises(LaunchError, match="gone"):
        bounded(lambda: time.sleep(5), 0.2, "gone")
    assert time.monotonic() - started < 4
    assert bounded(lambda: 7, 5, "gone") == 7
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"], 5, "gone")


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("host", False)],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
