"""The meeting: ranks (here threads, each with its own connection) find each other, or all say the same of what is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from polyhop.comm import meeting
from polyhop.comm.meeting import Meeting, Peer, describe_ranks, meet
from polyhop.comm.store import Patience, host_store, reach_store
from polyhop.errors import LaunchError

HERE = "127.0.0.1"


@pytest.fixture
def hosted() -> Iterator[Any]:
    store = host_store(HERE, 0)
    yield store
    del store


def come(
    hosted: Any, *ranks: tuple[int, int, Mapping[str, Any]], limit_s: float = 20.0
) -> list[Meeting | LaunchError]:
    """Processes of (rank, number of ranks, agreed) come to the store at once; what each of them gets."""
    got: dict[int, Meeting | LaunchError] = {}

    def one(at: int, rank: int, num_ranks: int, agreed: Mapping[str, Any]) -> None:
        patience = Patience(rank, limit_s)
        try:
            store, address = reach_store(HERE, hosted.port, patience)
            got[at] = meet(
                store,
                rank,
                num_ranks,
                where=f"{HERE}:{hosted.port}",
                address=address,
                patience=patience,
                agreed=agreed,
            )
        except LaunchError as error:
            got[at] = error
        finally:
            patience.close()

    threads = [threading.Thread(target=one, args=(at, *rank)) for at, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [got[at] for at in range(len(ranks))]


def test_all_ranks_meet(hosted: Any) -> None:
    met = come(hosted, *((rank, 3, {"lr": 0.1}) for rank in range(3)))
    for one in met:
        assert isinstance(one, Meeting), one
        assert [peer.rank for peer in one.peers] == [0, 1, 2]
        assert one.address == HERE
    assert isinstance(met[0], Meeting)
    assert isinstance(met[1], Meeting)
    met[0].store.set("key", "value")  # keys of the run, the same for all
    assert met[1].store.get("key") == b"value"


def test_ranks_that_never_came_are_named(hosted: Any) -> None:
    for one in come(hosted, (0, 4, {}), (2, 4, {}), limit_s=0.8):
        assert isinstance(one, LaunchError)
        text = str(one)
        assert "ranks 1, 3 of 4 never came to the meeting" in text
        assert f"{HERE}:{hosted.port}" in text
        for word in ("firewall", "MASTER_ADDR", "number of ranks", "0.8 s"):
            assert word in text


def test_rank_started_twice_is_told_to_all(hosted: Any) -> None:
    for one in come(hosted, (0, 3, {}), (1, 3, {}), (1, 3, {})):
        assert isinstance(one, LaunchError)
        assert "rank 1 was started twice" in str(one)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((1, 3, {"lr": 0.1}), "number of ranks is"),
        ((1, 2, {"lr": 0.2}), "lr is"),
        ((1, 2, {}), "lr is"),
        ((1, 2, {"lr": 0.1, "x": 1}), "x is"),
    ],
)
def test_ranks_started_differently_say_in_what(
    hosted: Any, second: tuple[int, int, dict[str, Any]], expected: str
) -> None:
    both = come(hosted, (0, 2, {"lr": 0.1}), second)
    for one in both:
        assert isinstance(one, LaunchError)
        assert f"the ranks were started differently: {expected}" in str(one)
    assert str(both[0]) == str(both[1])


def test_other_version_is_refused(hosted: Any) -> None:
    given = {"polyhop": "0.0.1", "number of ranks": "1"}
    hosted.set("polyhop/0/start", json.dumps({"by": "rank 0 (pid 1 on host a)", "given": given}))
    (one,) = come(hosted, (0, 1, {}))
    assert "polyhop is" in str(one)
    assert "0.0.1 for rank 0 (pid 1 on host a)" in str(one)


def test_long_options_are_compared_whole(hosted: Any) -> None:
    long = "x" * 500
    for one in come(hosted, (0, 2, {"recipe": long + "a"}), (1, 2, {"recipe": long + "b"})):
        assert isinstance(one, LaunchError)
        assert "recipe is" in str(one)
        assert len(str(one)) < 800


@pytest.mark.parametrize("planted", [b"\x80\x04K\x01.", b"[1]", b"{" + b" " * 20_000 + b"}", b'{"given": 3}'])
def test_what_others_wrote_is_no_record(hosted: Any, planted: bytes) -> None:
    hosted.set("polyhop/0/start", planted)
    (one,) = come(hosted, (0, 1, {}))
    assert isinstance(one, LaunchError)
    assert "program" in str(one)


def test_rank_outside_the_range(hosted: Any) -> None:
    (one,) = come(hosted, (5, 2, {}))
    assert "is no rank of 2" in str(one)


def test_attempts_do_not_see_each_other(hosted: Any) -> None:
    patience = Patience(0, 10)
    for name in ("0", "1"):
        met = meet(hosted, 0, 1, where="here", address=HERE, patience=patience, name=name)
        assert len(met.peers) == 1
    patience.close()


def test_address_that_faces_the_others() -> None:
    """The store's host reaches it over its loopback, the others over the network."""
    here, near, far = Peer(0, "a", 1, "127.0.1.1"), Peer(1, "a", 2, "127.0.0.1"), Peer(2, "b", 3, "127.0.0.9")
    assert meeting._facing(here, [here, near]) == "127.0.1.1"
    assert meeting._facing(Peer(2, "b", 3, "10.0.0.2"), [here, near, far]) == "10.0.0.2"
    seen = meeting._facing(here, [here, Peer(2, "b", 3, "192.0.2.55")])
    assert seen == "127.0.1.1" or not seen.startswith("127.")  # the former on a host without a network


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "rank 3"),
        ([1, 3], "ranks 1, 3"),
        (list(range(12)), "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (12 of them)"),
    ],
)
def test_ranks_in_words(ranks: list[int], expected: str) -> None:
    assert describe_ranks(ranks) == expected
