"""Widths change at their epochs and nowhere else, alike at both ends, whatever took how long; what fails is heard of."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import PeerError
from polyhop.exchange import assigner as module
from polyhop.exchange.assigner import Assigner, Policy
from polyhop.exchange.crossing import DIRECTIONS, Crossing, Lists, Spans
from polyhop.exchange.quantised import QuantisedMessages
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import partition, share
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

NUM_RANKS, ROWS, COLUMNS, LAYERS = 3, 40, 16, 2
POLICY = Policy(period=4, first=3, group_size=5)
Snapshot = dict[str, list[list[int]]]


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    before = threading.active_count()
    yield
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert [t.name for t in threading.enumerate() if t.name == "assigner"] == []


def reads(reader: int, owner: int) -> Tensor:
    if reader == owner or (reader, owner) == (1, 2):  # a channel without rows
        return torch.empty(0, dtype=torch.int64)
    return torch.arange(reader + 2 * owner, ROWS)


class Weighing:
    """A layer that weighs its halo's rows unevenly."""

    is_linear = True

    def __init__(self, num_halo: int) -> None:
        self._num_halo = num_halo

    def weights(self) -> Tensor:
        return torch.logspace(-2, 2, max(self._num_halo, 1), dtype=torch.float64)[: self._num_halo]

    def sum_weights(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64)  # no sums cross here


class Worker:
    """A rank with two channels; ``step`` sends rows whose ranges depend on epoch and row."""

    def __init__(self, line: Collective, policy: Policy = POLICY) -> None:
        self.line = line
        lists = Lists(
            ROWS,
            [reads(q, line.rank) for q in range(NUM_RANKS)],
            [reads(line.rank, q).numel() for q in range(NUM_RANKS)],
        )
        ids = torch.arange(ROWS) + 1000 * line.rank
        halo = torch.cat([1000 * q + reads(line.rank, q) for q in range(NUM_RANKS)])
        own = line.fork()
        self.channels = [
            Crossing(QuantisedMessages(lists, 8, (ids, halo), Spans(layer=at + 1)), own)
            for at in range(LAYERS)
        ]
        self.assigner = Assigner(self.channels, line.fork(), policy)

    def step(self, epoch: int) -> None:
        key = Key(5, epoch)
        self.assigner.begin_step(key)
        for at, channel in enumerate(self.channels):
            channel.begin_step(key)
            rng = torch.Generator().manual_seed(1000 * epoch + 10 * self.line.rank + at)
            scale = torch.logspace(-2, 2, ROWS)[torch.randperm(ROWS, generator=rng)][:, None]
            rows = (torch.randn(ROWS, COLUMNS, generator=rng) * scale).requires_grad_()
            halo = channel.leave(rows, 0, Weighing(channel.lists.num_halo))[2]()  # type: ignore[arg-type]
            (halo**2).sum().backward()  # type: ignore[no-untyped-call]
        self.assigner.end_step(key)

    def widths(self) -> Snapshot:
        """All widths by name, as lists."""
        found: Snapshot = {}
        for at, channel in enumerate(self.channels):
            assert isinstance(channel.messages, QuantisedMessages)
            for way in DIRECTIONS:
                for which in ("leaving", "arriving"):
                    each = getattr(channel.messages.widths[way], which)
                    found[f"{at} {way} {which}"] = [bits.tolist() for bits in each]
        return found

    def close(self) -> None:
        self.assigner.close()


def follow(
    line: Collective, num_epochs: int, policy: Policy = POLICY, sleeps: int | None = None
) -> list[Snapshot]:
    """Widths of each epoch; with ``sleeps`` this rank's steps take times drawn with that seed and its rank."""
    worker, found = Worker(line, policy), []
    drawn = random.Random(None if sleeps is None else 97 * sleeps + line.rank)
    for epoch in range(num_epochs):
        if sleeps is not None:
            time.sleep(drawn.choice([0.0, 0.0, 0.002, 0.02]))
        worker.step(epoch)
        found.append(worker.widths())
    worker.close()
    return found


def flat(snapshot: Snapshot) -> set[int]:
    return {bits for ranks in snapshot.values() for rows in ranks for bits in rows}


def test_widths_change_at_their_epochs_only() -> None:
    for found in run_in_threads(NUM_RANKS, follow, 16):
        changed = [epoch for epoch in range(1, 16) if found[epoch] != found[epoch - 1]]
        assert changed == [3, 7, 11, 15]
        assert flat(found[0]) == {8}, "before anything is known of the ranges"
        assert len(flat(found[3])) > 1


def test_both_ends_have_the_same_widths() -> None:
    found = run_in_threads(NUM_RANKS, follow, 9)
    for epoch in range(9):
        for at in range(LAYERS):
            for way in DIRECTIONS:
                for src in range(NUM_RANKS):
                    for dst in range(NUM_RANKS):
                        sent = found[src][epoch][f"{at} {way} leaving"][dst]
                        assert sent == found[dst][epoch][f"{at} {way} arriving"][src]
                        ends = (src, dst) if way == "forward" else (dst, src)
                        assert len(sent) == reads(ends[1], ends[0]).numel()


def test_rows_that_matter_more_have_more_bits() -> None:
    """Forward, of one message: wider rows are those of larger (range of the last epochs)^2 x weight, in groups of one."""
    policy = Policy(period=50, first=2, group_size=1)
    found = run_in_threads(NUM_RANKS, ranked, policy)
    for rank in range(NUM_RANKS):
        for bits, beta in zip(*found[rank], strict=True):
            assert len(bits) == len(beta)
            order = sorted(range(len(beta)), key=lambda at, beta=beta: beta[at])  # type: ignore[misc]
            along = [bits[at] for at in order]
            assert along == sorted(along)
    assert len({bits for rank in found for rows in rank[0] for bits in rows}) > 1


def ranked(line: Collective, policy: Policy) -> tuple[list[list[int]], list[list[float]]]:
    """Of the first channel forward: widths for each rank, and what they were chosen by, computed here."""
    worker = Worker(line, policy)
    messages = worker.channels[0].messages
    assert isinstance(messages, QuantisedMessages)
    squares: list[Tensor] = []

    def note(take: Any = messages.take_squares) -> Any:
        taken = take()
        squares.extend(each.clone() for each in taken["forward"])
        return taken

    messages.take_squares = note  # type: ignore[method-assign]
    for epoch in range(3):
        worker.step(epoch)
    worker.close()
    mine = Weighing(worker.channels[0].lists.num_halo).weights()
    pieces = list(mine.split(list(worker.channels[0].lists.wanted)))  # type: ignore[no-untyped-call]
    weights = line.all_to_all(pieces, kind="widths")
    beta = [(square * weight).tolist() for square, weight in zip(squares, weights, strict=True)]
    return [bits.tolist() for bits in messages.widths["forward"].leaving], beta


@pytest.mark.parametrize("is_random", [False, True])
def test_timing_changes_nothing(is_random: bool) -> None:
    policy = Policy(period=4, first=3, group_size=5, is_random=is_random)
    expected = run_in_threads(NUM_RANKS, follow, 12, policy)
    for sleeps in range(3):
        assert run_in_threads(NUM_RANKS, follow, 12, policy, sleeps, latency_s=0.003) == expected
    assert expected[0][11] != expected[0][3]


def test_over_gloo(ranks: Run) -> None:
    assert ranks(NUM_RANKS, follow, 9, POLICY, 1) == run_in_threads(NUM_RANKS, follow, 9)


def continued(line: Collective, stop_at: int, num_epochs: int) -> list[Snapshot]:
    """The widths of each epoch of a run that is stopped after some and continued by another worker."""
    first, found = Worker(line), []
    for epoch in range(stop_at):
        first.step(epoch)
        found.append(first.widths())
    kept = {name: value.clone() for name, value in first.assigner.state().items()}
    first.close()
    second = Worker(line)
    second.assigner.restore(kept)
    for epoch in range(stop_at, num_epochs):
        second.step(epoch)
        found.append(second.widths())
    second.close()
    return found


@pytest.mark.parametrize("stop_at", range(1, 10))
def test_a_continued_run_chooses_the_same(stop_at: int) -> None:
    """At every epoch: also where the answer is being sought (2, 6) and where it waits (just before 3 and 7)."""
    expected = run_in_threads(NUM_RANKS, follow, 12)
    assert run_in_threads(NUM_RANKS, continued, stop_at, 12) == expected


def stated(line: Collective, num_epochs: int) -> list[Snapshot]:
    """A checkpoint is made after every step, and the run goes on."""
    worker, found = Worker(line), []
    for epoch in range(num_epochs):
        worker.step(epoch)
        worker.assigner.state()
        found.append(worker.widths())
    worker.close()
    return found


def test_asking_for_the_state_changes_nothing() -> None:
    assert run_in_threads(NUM_RANKS, stated, 12) == run_in_threads(NUM_RANKS, follow, 12)


# What fails in the thread is heard of in training.


class Broken(Exception):  # noqa: N818
    """Only this test raises it."""


def break_solve(monkeypatch: pytest.MonkeyPatch, rank: int | None) -> None:
    """The solver fails in the threads of one rank, or of all."""
    solve = getattr(module, "solve")  # noqa: B009
    lock, seen = threading.Lock(), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        with lock:
            seen[0] += 1
            number = seen[0]
        if rank is None or number % NUM_RANKS == rank:
            raise Broken("no widths today")
        return solve(*args, **kwargs)

    monkeypatch.setattr(module, "solve", failing)


@pytest.mark.parametrize("rank", [None, 1])
def test_what_fails_in_the_thread_is_raised_in_training(
    monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    break_solve(monkeypatch, rank)
    began = time.monotonic()
    with pytest.raises((Broken, PeerError), match="no widths today"):
        run_in_threads(NUM_RANKS, follow, 12)
    assert time.monotonic() - began < 30


def stated_broken(line: Collective) -> str:
    worker = Worker(line)
    for epoch in range(2):  # the answer for epoch 3 is sought from the end of epoch 1 on
        worker.step(epoch)
    try:
        kept = worker.assigner.state()
        found = f"{sum('.next.' in name for name in kept)} widths of the next change"
    except Broken as error:
        found = str(error)
    worker.close()
    return found


def test_a_state_without_its_answer_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a checkpoint is written whose continuation would skip the change and end with other weights."""
    break_solve(monkeypatch, None)
    assert run_in_threads(NUM_RANKS, stated_broken) == ["no widths today"] * NUM_RANKS


def lost(line: Collective) -> None:
    """Rank 1 ends while the others' threads wait for it."""
    worker = Worker(line)
    for epoch in range(12):
        if line.rank == 1 and epoch == 2:
            raise Broken("rank 1 has left")
        worker.step(epoch)


def test_a_rank_that_ends_leaves_no_thread_waiting() -> None:
    before = threading.active_count()
    with pytest.raises((Broken, PeerError), match="rank 1 has left"):
        run_in_threads(NUM_RANKS, lost)
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def closed_early(line: Collective, num_epochs: int) -> int:
    worker = Worker(line)
    for epoch in range(num_epochs):
        worker.step(epoch)
    worker.close()
    line.barrier()
    return sum(thread.name == "assigner" for thread in threading.enumerate())


@pytest.mark.parametrize("num_epochs", [0, 1, 2, 3])
def test_threads_end_at_close(num_epochs: int) -> None:
    assert run_in_threads(NUM_RANKS, closed_early, num_epochs, latency_s=0.01) == [0] * NUM_RANKS


# D1: the losses of a training do not depend on when what happens.

SEEDING = threading.Lock()


class Uneven(nn.GraphSAGE):
    """Takes times of its own on every rank."""

    drawn: random.Random | None = None

    def layer(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.drawn is not None:
            time.sleep(self.drawn.choice([0.0, 0.0, 0.001, 0.01]))
        found: dict[str, Any] = super().layer(*args, **kwargs)
        return found


def losses(line: Collective, graph: Graph, options: dict[str, Any], sleeps: int | None) -> list[float]:
    with SEEDING:
        torch.manual_seed(7)
        model = Uneven(graph.num_features, 16, 3, out_channels=graph.num_classes, dropout=0.3)
    if sleeps is not None:
        model.drawn = random.Random(31 * sleeps + line.rank)
    trainer = Trainer(
        "halo", max_epochs=14, eval_every=100, bits_period=4, device="cpu", progress="none", seed=3, **options
    )
    held = share(graph, partition(graph, line.num_ranks, "hash"), line.rank)
    return [record["loss"] for record in trainer.fit(model, held, line=line).history]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 2},
        {"bits": "adaptive", "bits_group": 4},
        {"bits": "random"},
        {"halo": "stale", "bits": "adaptive", "bits_group": 4},
        {"halo": "skipping", "halo_drift": 0.1},
        {"halo": "sampled", "halo_share": 0.5},
    ],
    ids=str,
)
def test_losses_do_not_depend_on_timing(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    graph = make_graph(num_nodes=120)
    expected = run_in_threads(3, losses, graph, options, None)
    assert len(expected[0]) == 14
    for sleeps, latency_s in ((0, 0.0), (1, 0.002)):
        assert run_in_threads(3, losses, graph, options, sleeps, latency_s=latency_s) == expected
