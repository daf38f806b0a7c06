"""The ledger: whatever happens, every task counts exactly once."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from polyhop.serverless.ledger import DUPLICATE, OK, UNKNOWN, Lease, Ledger, Terms
from polyhop.serverless.wire import TaskKey

TERMS = Terms(floor_s=1.0, ratio=3.0, cold_s=10.0)


def key(interval: int, place: int = 0, epoch: int = 0) -> TaskKey:
    return TaskKey(epoch, place, interval, 0, False)


def taken(ledger: Ledger[str], function: str = "f", now: float = 0.0) -> Lease:
    found = ledger.lease(function, now)
    assert found is not None
    return found[0]


def test_the_least_advanced_comes_first() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    for each in (key(0, 2), key(5, 0), key(1, 0, 1), key(3, 1), key(4, 0)):
        ledger.offer(each, "work")
    order = [taken(ledger).key for _ in range(5)]
    assert order == [key(4, 0), key(5, 0), key(3, 1), key(0, 2), key(1, 0, 1)]
    assert ledger.lease("f", 0.0) is None
    assert (len(ledger), ledger.num_waiting, ledger.num_leased) == (5, 0, 5)


def test_a_lease_that_runs_out_is_given_again_first() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    ledger.offer(key(9), "late")
    first = taken(ledger)
    ledger.offer(key(1), "new")
    assert first.deadline == 10.0  # nothing is known of the kind
    assert ledger.expire(9.9) == []
    assert ledger.expire(10.0) == [first]
    assert ledger.expire(11.0) == []
    second = taken(ledger, "g", 11.0)
    assert (second.key, second.attempt) == (key(9), 2)
    assert taken(ledger).key == key(1)


def test_the_first_result_counts_also_when_it_is_late() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    ledger.offer(key(0), "work")
    first = taken(ledger)
    ledger.expire(20.0)
    second = taken(ledger, "g", 20.0)
    assert ledger.commit(key(0), first.number, 21.0) == (OK, "work")
    assert ledger.commit(key(0), second.number, 22.0) == (DUPLICATE, None)
    assert ledger.commit(key(0), second.number, 22.0) == (DUPLICATE, None)
    assert ledger.commit(key(0), first.number, 22.0) == (DUPLICATE, None)
    assert (ledger.counts[OK], ledger.counts["late"], ledger.counts[DUPLICATE]) == (1, 1, 3)


def test_a_late_result_of_a_task_that_waits_again_counts_and_it_is_not_given_out() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    ledger.offer(key(0), "work")
    first = taken(ledger)
    ledger.expire(10.0)
    assert ledger.num_waiting == 1
    assert ledger.commit(key(0), first.number, 10.5)[0] == OK
    assert ledger.lease("g", 11.0) is None


def test_leases_that_were_never_given_are_unknown() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    ledger.offer(key(0), "a")
    ledger.offer(key(1), "b")
    lease = taken(ledger)
    assert ledger.commit(key(0), 99, 0.0) == (UNKNOWN, None)
    assert ledger.commit(key(1), lease.number, 0.0) == (UNKNOWN, None)  # of another task
    assert ledger.commit(key(7), lease.number, 0.0) == (UNKNOWN, None)
    assert ledger.commit(key(0), lease.number, 0.0) == (OK, "a")


def test_leases_last_by_what_their_kind_takes() -> None:
    ledger: Ledger[str] = Ledger(Terms(floor_s=1.0, ratio=3.0, cold_s=10.0, memory=0.5))
    for at, took in enumerate((2.0, 4.0)):
        ledger.offer(key(at), "work")
        lease = taken(ledger, now=100.0)
        ledger.commit(lease.key, lease.number, 100.0 + took)
    assert ledger.lease_s(key(5)) == pytest.approx(9.0)  # the mean is 3
    assert ledger.lease_s(TaskKey(0, 0, 0, 0, True)) == 10.0  # another kind
    ledger.offer(key(8), "work")
    assert taken(ledger, now=0.0).deadline == pytest.approx(9.0)


def test_what_a_lost_function_had_is_given_again() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    for at in range(3):
        ledger.offer(key(at), "work")
    lost = [taken(ledger, "f"), taken(ledger, "f")]
    kept = taken(ledger, "g")
    assert ledger.lose("f") == lost
    assert ledger.lose("f") == []
    assert {taken(ledger, "h").key, taken(ledger, "h").key} == {each.key for each in lost}
    assert ledger.commit(kept.key, kept.number, 1.0)[0] == OK


def test_a_task_is_offered_once() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    ledger.offer(key(0), "work")
    with pytest.raises(ValueError, match="offered before"):
        ledger.offer(key(0), "work")
    lease = taken(ledger)
    ledger.commit(lease.key, lease.number, 0.0)
    with pytest.raises(ValueError, match="offered before"):
        ledger.offer(key(0), "work")


def test_what_is_forgotten_is_bounded() -> None:
    ledger: Ledger[str] = Ledger(TERMS)
    for epoch in range(50):
        ledger.offer(key(0, epoch=epoch), "work")
        lease = taken(ledger)
        ledger.expire(1e6 * (epoch + 1))
        again = taken(ledger, "g")
        ledger.commit(lease.key, lease.number, 0.0)
        ledger.forget(epoch)
        assert len(ledger._leases) <= 2
        assert len(ledger._done_epoch) == 1
        assert again.attempt == 2
    assert ledger.commit(key(0, epoch=1), 1, 0.0) == (UNKNOWN, None)


def test_faults_lose_nothing_and_count_nothing_twice() -> None:
    """3,000 tasks, of every two leases one is killed, hangs, repeats or comes late."""
    rng, ledger, now = random.Random(1), Ledger[int](Terms(0.5, 3.0, 2.0)), 0.0
    tasks = [TaskKey(0, at % 4, at, at % 3, at % 2 == 0) for at in range(3000)]
    done: list[int] = []
    late: list[Lease] = []
    faults = 0
    for at, each in enumerate(tasks):
        ledger.offer(each, at)

    def bring(lease: Lease) -> None:
        verdict, work = ledger.commit(lease.key, lease.number, now)
        if verdict == OK:
            assert work is not None
            done.append(work)

    while len(done) < len(tasks):
        now += 0.01
        ledger.expire(now)
        found = ledger.lease(f"f{rng.randrange(8)}", now)
        if late and (found is None or rng.random() < 0.2):
            bring(late.pop(rng.randrange(len(late))))
        if found is None:
            continue
        fault = rng.choice(["none"] * 5 + ["killed before", "killed after", "hang", "repeat", "dies"])
        faults += fault != "none"
        if fault == "killed before":
            ledger.lose(found[0].function)
        elif fault == "hang":
            late.append(found[0])
        elif fault == "dies":
            continue
        else:
            bring(found[0])
            if fault == "repeat":
                bring(found[0])
    assert faults > 1000
    assert sorted(done) == list(range(3000))
    assert ledger.counts[OK] == 3000
    assert ledger.counts["again"] > 500


class Faults(RuleBasedStateMachine):
    """Any order of offers, leases, results, repeats, losses and time."""

    leases: Bundle[Any] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[int] = Ledger(TERMS)
        self.now, self.offered, self.done = 0.0, 0, list[int]()

    @rule()
    def offer(self) -> None:
        self.ledger.offer(key(self.offered), self.offered)
        self.offered += 1

    @rule(target=leases, function=st.sampled_from("abc"))
    def lease(self, function: str) -> Any:
        found = self.ledger.lease(function, self.now)
        return multiple() if found is None else found[0]

    @rule(lease=leases)
    def bring_and_maybe_again(self, lease: Lease) -> None:
        verdict, work = self.ledger.commit(lease.key, lease.number, self.now)
        if verdict == OK:
            assert work is not None
            self.done.append(work)

    @rule(lease=consumes(leases))
    def lose(self, lease: Lease) -> None:
        self.ledger.lose(lease.function)

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @invariant()
    def every_task_is_done_once_or_open(self) -> None:
        assert len(set(self.done)) == len(self.done)
        assert len(self.done) + len(self.ledger) == self.offered

    def teardown(self) -> None:
        """Whatever was lost can still be done."""
        self.now += 1000.0
        self.ledger.expire(self.now)
        while (found := self.ledger.lease("z", self.now)) is not None:
            self.bring_and_maybe_again(found[0])
        assert sorted(self.done) == list(range(self.offered))


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
