"""The heartbeat between real processes: killed, stopped, failing, forking and late ranks; strangers at its port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from polyhop.comm.heartbeat import LOST_PEER, Heartbeat
from polyhop.comm.link import BEAT, HELLO, Link
from polyhop.comm.store import Patience
from polyhop.errors import LaunchError

HERE = "127.0.0.1"
TIMEOUT_S = 2.5  # of the scenes
SLACK_S = 6.0  # for the grace of a second, and a machine that has other work


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    program = Path(__file__).with_name("heartbeat_scenes.py")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    return told


def test_ranks_that_end_well_are_not_missed(scenes: dict[str, Any]) -> None:
    assert scenes["well"]["codes"] == [0, 0, 0]
    assert scenes["well"]["said"] == ["", "", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_named_at_once(scenes: dict[str, Any], rank: int) -> None:
    scene = scenes[f"kill {rank}"]
    assert scene["codes"] == [-9 if q == rank else LOST_PEER for q in range(3)]
    assert max(scene["seconds"]) < SLACK_S
    for q in {0, 1, 2} - {rank}:
        lost = (
            f"rank {rank} (pid {rank}00 on host a) was lost: it ended without a word; this run cannot go on"
        )
        assert scene["said"][q] == f"polyhop: rank {q}: {lost}\n"


@pytest.mark.parametrize("rank", [0, 2])
def test_stopped_rank_is_named_in_time(scenes: dict[str, Any], rank: int) -> None:
    scene = scenes[f"stop {rank}"]
    assert scene["codes"] == [None if q == rank else LOST_PEER for q in range(3)]
    for q in {0, 1, 2} - {rank}:
        lost = f"rank {rank} (pid {rank}00 on host a) was lost: it gave no sign for 2.5 s"
        assert scene["said"][q].startswith(f"polyhop: rank {q}: {lost}")
        assert scene["said"][q].count("\n") == 1
        assert TIMEOUT_S * 0.5 < scene["seconds"][q] < TIMEOUT_S + SLACK_S


def test_rank_that_was_given_up_learns_it_when_it_goes_on(scenes: dict[str, Any]) -> None:
    scene = scenes["stop 2, go on"]
    assert scene["codes"] == [LOST_PEER] * 3
    assert "the other ranks gave rank 2 (pid 200 on host a) up: it gave no sign" in scene["said"][2]


@pytest.mark.parametrize("rank", [0, 1])
def test_late_beat_is_forgiven(scenes: dict[str, Any], rank: int) -> None:
    assert scenes[f"pause {rank}"]["codes"] == [0, 0, 0]
    assert scenes[f"pause {rank}"]["said"] == ["", "", ""]


def test_exit_without_a_word_is_a_loss_and_the_main_thread_may_take_it(scenes: dict[str, Any]) -> None:
    scene = scenes["exit 1"]
    assert scene["codes"] == [0, 0, LOST_PEER]  # rank 0 asked, was told, and ended by itself
    assert scene["said"][0].startswith("taken: rank 1 (pid 100 on host a) was lost: it ended without a word")
    assert "rank 1" in scene["said"][2]


@pytest.mark.parametrize(("rank", "others"), [(0, [1, 2]), (1, [0])])
def test_failure_is_told_with_its_first_line(scenes: dict[str, Any], rank: int, others: list[int]) -> None:
    scene = scenes[f"fail {rank}"]
    assert scene["codes"][rank] == 0
    for q in others:
        assert scene["codes"][q] == LOST_PEER
        failed = f"rank {rank} (pid {rank}00 on host a) failed: ConfigError: lr=-1"
        assert scene["said"][q] == f"polyhop: rank {q}: {failed}\n"


def test_failure_reaches_a_main_thread_that_asks(scenes: dict[str, Any]) -> None:
    assert scenes["fail 1"]["codes"][2] == 0
    assert "taken: rank 1 (pid 100 on host a) failed: ConfigError: lr=-1" in scenes["fail 1"]["said"][2]


def test_last_words_are_heard_but_not_for_ever(scenes: dict[str, Any]) -> None:
    scene = scenes["last words"]
    assert scene["codes"] == [LOST_PEER, 0, LOST_PEER]
    assert "last word: 1\n" in scene["said"][0]


def test_forked_child_does_not_hide_the_end_of_its_rank(scenes: dict[str, Any]) -> None:
    scene = scenes["forked"]
    assert scene["codes"] == [LOST_PEER, 0, LOST_PEER]
    assert "it ended without a word" in scene["said"][0]


class Memory:
    """A store in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.set, self.get = self.kept.__setitem__, self.kept.__getitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


def begin(
    store: Memory, rank: int, hearts: dict[int, Heartbeat | LaunchError], limit_s: float = 20.0
) -> None:
    patience = Patience(rank, limit_s)
    try:
        hearts[rank] = Heartbeat.start(
            store, rank, ["rank 0", "rank 1"], address=HERE, timeout_s=30, patience=patience
        )
    except LaunchError as error:
        hearts[rank] = error
    finally:
        patience.close()


def test_strangers_are_dropped_and_ports_closed() -> None:
    """Only who knows the token gets in; then nobody."""
    store, hearts = Memory(), dict[int, Heartbeat | LaunchError]()
    zero = threading.Thread(target=begin, args=(store, 0, hearts))
    zero.start()
    while not store.check(["heartbeat"]):
        time.sleep(0.01)
    told = json.loads(store.get("heartbeat"))
    where = (told["host"], told["port"])
    assert len(told["token"]) == 64
    for first in (
        lambda link: link.send(HELLO, 1, text="0" * 64),
        lambda link: link.send(HELLO, 7, text=told["token"]),
        lambda link: link.send(BEAT, 1, text=told["token"]),
        lambda link: link.socket.send(b"GET / HTTP/1.1\r\n" * 20),
    ):
        stranger = Link(socket.create_connection(where, timeout=5), None)
        first(stranger)
        stranger.socket.settimeout(5)
        with suppress(ConnectionResetError):
            assert stranger.socket.recv(1) == b""
        stranger.socket.close()
    assert zero.is_alive()
    one = threading.Thread(target=begin, args=(store, 1, hearts))
    one.start()
    for thread in (zero, one):
        thread.join()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(where, timeout=5)
    ends = [
        threading.Thread(target=heart.goodbye) for heart in hearts.values() if isinstance(heart, Heartbeat)
    ]
    assert len(ends) == 2
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("polyhop-heartbeat")]


def test_peer_that_never_connects_is_named() -> None:
    hearts: dict[int, Heartbeat | LaunchError] = {}
    begin(Memory(), 0, hearts, limit_s=0.5)
    assert "no heartbeat of rank 1" in str(hearts[0])
    assert "firewall" in str(hearts[0])
    begin(Memory(), 1, hearts, limit_s=0.5)
    assert "rank 0 came to the meeting, but its heartbeat did not open" in str(hearts[1])


def test_one_rank_needs_no_heart() -> None:
    patience = Patience(0, 5)
    heart = Heartbeat.start(Memory(), 0, ["rank 0"], address=HERE, timeout_s=1, patience=patience)
    patience.close()
    heart.goodbye()
    assert heart.loss() is None
