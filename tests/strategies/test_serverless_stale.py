"""Bounded asynchrony: what is read is never older than its bound, the bound is reached, and it learns (I3, I4)."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("cryptography")


from polyhop.comm import run_in_threads
from polyhop.graph import Graph
from polyhop.serverless.ledger import Terms
from polyhop.serverless.tables import NEVER, Ages, Reading, StalenessError, Table
from polyhop.serverless.versions import Versions
from polyhop.strategies import serverless_step

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "serverless"))

from faulty import FaultyLauncher, ThreadLauncher  # type: ignore[import-not-found]
from test_serverless import alone, assert_same, on_rank  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]
PATIENT = Terms(floor_s=20.0, ratio=3.0, cold_s=20.0)


def seen(step: Any) -> tuple[Ages, int, list[int]]:
    return step.server.ages, step.server.versions.most_alive, list(step.server.versions.alive)


def trained(
    graph: Graph,
    monkeypatch: Any,
    staleness: int | None,
    epochs: int,
    ranks: int = 2,
    name: str = "gcn-3",
    **options: Any,
) -> list[Any]:
    """Functions that are late at random; and in some epochs one interval takes long, so that others get ahead of it."""

    def slow(key: Any) -> float:
        return 0.5 if key.interval == 0 and key.epoch in (2, 6) and not key.is_backward else 0.0

    def late(order: Any, **more: Any) -> Any:
        return FaultyLauncher(order, seed=5, rate=0.3, kinds=("late",), late_s=0.01, slow=slow)

    monkeypatch.setattr(serverless_step, "LocalLauncher", late)
    monkeypatch.setattr(serverless_step, "TERMS", PATIENT)
    given = {"intervals": 5, "functions": 3, "staleness": staleness, "pipe_epochs": 0, **options}
    return run_in_threads(ranks, on_rank, graph, name, 0.2, epochs, given, seen)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_ages_are_bounded_and_the_bound_is_reached(
    make_graph: MakeGraph, monkeypatch: Any, staleness: int
) -> None:
    found = trained(make_graph(80), monkeypatch, staleness, 12)
    ages = [each[2][0] for each in found]
    assert max(each.oldest for each in ages) == staleness + 1
    for each in ages:
        assert set(each.seen) <= set(range(-staleness, staleness + 2))
    for _, _, (_, most_alive, alive) in found:
        assert most_alive <= staleness + 2
        assert len(alive) == 1
    losses = found[0][0]
    assert found[1][0] == losses
    assert min(losses[1:]) < losses[0]  # how well it learns is the business of a bench


def test_attention_weights_of_functions_keep_the_bound(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """Rows are read once, for a task and for the sum that follows it, whatever has come meanwhile."""
    found = trained(make_graph(80), monkeypatch, 1, 5, name="gat", edge_functions=True)
    ages = [each[2][0] for each in found]
    assert max(each.oldest for each in ages) == 2
    for each in ages:
        assert set(each.seen) <= set(range(-1, 3))
    assert found[0][0] == found[1][0]
    assert all(math.isfinite(loss) for loss in found[0][0])


@pytest.mark.parametrize(
    ("staleness", "wanted", "is_on"), [(1, None, True), (1, False, False), (0, None, False), (0, True, True)]
)
def test_what_is_old_is_taken_ahead_where_that_is_wanted(
    make_graph: MakeGraph, monkeypatch: Any, staleness: int, wanted: bool | None, is_on: bool
) -> None:
    """Rows, gradients and weights. Epochs that are due, and exact ones, have the weights that were published."""
    versions, read = set(), set()
    reading, take = Table.reading, Versions.take

    def noted_reading(self: Table, interval: Any, epoch: int) -> Reading:
        found = reading(self, interval, epoch)
        is_old = any(self.tags[each] < epoch for each in interval.reads)
        read.add((is_old, found.sources is None))
        return found

    def noted_take(self: Versions, is_ahead: bool = False) -> int:
        found = take(self, is_ahead)
        versions.add((is_ahead, found < 0))
        return found

    monkeypatch.setattr(Table, "reading", noted_reading)
    monkeypatch.setattr(Versions, "take", noted_take)
    found = trained(make_graph(80), monkeypatch, staleness, 12, extrapolate=wanted)
    assert found[0][0] == found[1][0]
    assert (True, True) in read if is_on else {made for _, made in read} == {False}
    assert (False, True) not in read
    assert any(is_old for is_old, _ in read)
    assert versions == ({(False, False), (True, True)} if is_on and staleness else {(False, False)})


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_hundred_thousand_reads(make_graph: MakeGraph, monkeypatch: Any, staleness: int) -> None:
    found = trained(make_graph(300), monkeypatch, staleness, 150, intervals=14)
    ages = [each[2][0] for each in found]
    seen_ages = sum((each.seen for each in ages), Counter[int]())
    print(f"staleness {staleness}: {dict(sorted(seen_ages.items()))}")
    assert sum(seen_ages.values()) == sum(each.num_reads for each in ages) >= 100_000
    assert max(seen_ages) == max(each.oldest for each in ages) == staleness + 1  # reached, and never passed
    assert min(seen_ages) >= -staleness


def test_pipe_reads_rows_of_its_epoch_alone(make_graph: MakeGraph, monkeypatch: Any) -> None:
    graph = make_graph(80)
    found = trained(graph, monkeypatch, None, 4)
    for _, _, (ages, most_alive, _) in found:
        assert set(ages.seen) == {0}
        assert most_alive <= 2
    assert found[0][0] == pytest.approx(alone(graph, "gcn-3", 0.2, 4)[0], rel=1e-10)


def test_the_check_can_fail() -> None:
    ages = Ages()
    ages.check(5, [5, 5], None)
    ages.check(5, [4, 5], 0)
    ages.check(5, [3, 6], 1)
    assert (ages.num_reads, ages.oldest) == (6, 2)
    for epoch, tag, bound in ((5, 4, None), (5, 6, None), (5, 3, 0), (5, 6, 0), (5, 2, 1), (0, NEVER, 3)):
        with pytest.raises(StalenessError, match="fault of the server"):
            ages.check(epoch, [tag], bound)


@pytest.mark.parametrize("name", ["gcn", "gcn-3", "sage", "gat"])
def test_what_reads_nothing_old_has_the_weights_of_one_process(
    make_graph: MakeGraph, monkeypatch: Any, name: str
) -> None:
    """Units are dropped where rows are read, and layers map late: the same numbers, as long as all epochs are exact."""
    monkeypatch.setattr(serverless_step, "LocalLauncher", lambda order: ThreadLauncher(order))
    graph = make_graph(80)
    expected = alone(graph, name, 0.4, 5)
    given = {"intervals": 4, "functions": 2, "staleness": 2, "pipe_epochs": 3}  # the first three and the last
    for found in run_in_threads(2, on_rank, graph, name, 0.4, 5, given, seen):
        assert_same(found, expected, 1e-10)
        assert set(found[2][0].seen) == {0}


def test_exact_epochs_come_first_and_last(make_graph: MakeGraph, monkeypatch: Any) -> None:
    """Between them intervals get ahead, and old rows are read."""
    ages: dict[int, set[int]] = {}
    original = Ages.check

    def noted(self: Ages, epoch: int, tags: Any, staleness: int | None) -> None:
        tags = list(tags)
        ages.setdefault(epoch, set()).update(epoch - tag for tag in tags)
        original(self, epoch, tags, staleness)

    monkeypatch.setattr(Ages, "check", noted)
    trained(make_graph(80), monkeypatch, 2, 14, pipe_epochs=2)
    assert all(ages[epoch] == {0} for epoch in (0, 1, 12, 13))
    assert max(age for epoch in range(2, 12) for age in ages[epoch]) >= 1
