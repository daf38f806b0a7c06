"""Rows across the cut and their gradients back are what autograd makes of the rows of all ranks in one matrix."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import InputError, PeerError
from polyhop.exchange.crossing import Crossing, Lists, Messages, Spans, matrix, taken
from polyhop.exchange.skipping import SkippingCrossing
from polyhop.exchange.stale import StaleCrossing
from polyhop.kernels.keys import Key
from polyhop.trace import Trace

Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Scene:
    """Rows of all ranks are ids 0, 1, ... in rank order; reads[r][q]: which rows of rank q rank r reads, by local number."""

    sizes: Sequence[int]
    reads: Sequence[Sequence[Sequence[int]]]

    @property
    def num_ranks(self) -> int:
        return len(self.sizes)

    def start(self, rank: int) -> int:
        return sum(self.sizes[:rank])

    def lists(self, rank: int) -> Lists:
        lent = [torch.tensor(self.reads[q][rank], dtype=torch.int64) for q in range(self.num_ranks)]
        return Lists(self.sizes[rank], lent, [len(ids) for ids in self.reads[rank]])

    def halo(self, rank: int) -> Tensor:
        ids = [self.start(q) + at for q in range(self.num_ranks) for at in self.reads[rank][q]]
        return torch.tensor(ids, dtype=torch.int64)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
        flat = torch.sin(1.0 + torch.arange(sum(self.sizes) * max(1, _size(shape)), dtype=torch.float64))
        return flat.view(sum(self.sizes), *shape).to(dtype)

    def own(self, values: Tensor, rank: int) -> Tensor:
        return values[self.start(rank) : self.start(rank) + self.sizes[rank]]


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


SCENES = {
    "three": Scene([5, 3, 4], [[[], [0, 2], [3]], [[4, 1], [], [0, 1, 2, 3]], [[0, 1], [2], []]]),
    "a channel without rows": Scene([3, 3, 3], [[[], [1], []], [[], [], [0, 2]], [[2], [], []]]),
    "one reads from nobody": Scene([3, 2], [[[], []], [[0, 1, 2], []]]),
    "one has no rows": Scene([3, 0, 2], [[[], [], [0, 1]], [[], [], []], [[1], [], []]]),
    "alone": Scene([4], [[[]]]),
}


def mixed(rows: Tensor, tail: Tensor, halo: Tensor, rank: int) -> Tensor:
    """A scalar that all three take part in, not linear in any."""
    return (
        (1 + rank) * (rows**2).sum() + torch.sin(2 * tail).sum() + (halo**3).sum() + (rows.sum() * halo).sum()
    )


def across(
    line: Collective, scene: Scene, shape: tuple[int, ...], first: int, overlaps: bool
) -> tuple[Tensor, Tensor, float, Cost]:
    """(the halo's rows, gradients of the own ones, the loss, what was sent)."""
    own = scene.own(scene.values(shape), line.rank).clone().requires_grad_()
    channel = Crossing(Messages(scene.lists(line.rank)), line, overlaps=overlaps)
    channel.begin_step(Key(0))
    before = line.traffic.now()
    rows, tail, arrive = channel.leave(own * 1.0, min(first, own.shape[0]))
    halo = arrive()
    loss = mixed(rows, tail, halo, line.rank)
    loss.backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    return halo.detach(), own.grad, float(loss.detach()), line.traffic.now() - before


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1,)], ids=str)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_rows_and_gradients_are_those_of_one_matrix(
    scene: Scene, shape: tuple[int, ...], overlaps: bool
) -> None:
    for first in (0, 2):
        found = run_in_threads(scene.num_ranks, across, scene, shape, first, overlaps)
        whole = scene.values(shape).requires_grad_()
        losses = []
        for rank in range(scene.num_ranks):
            own = scene.own(whole, rank)
            losses.append(mixed(own, own[min(first, own.shape[0]) :], whole[scene.halo(rank)], rank))
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        assert whole.grad is not None
        for rank, (halo, grad, loss, sent) in enumerate(found):
            assert torch.equal(halo, scene.values(shape)[scene.halo(rank)])
            assert loss == pytest.approx(float(losses[rank].detach()), rel=1e-12, abs=1e-12)
            assert torch.allclose(grad, scene.own(whole.grad, rank), rtol=1e-12, atol=1e-12)
            lists = scene.lists(rank)
            rows = sum(lists.leaving("forward")) + sum(lists.leaving("backward"))
            assert sent.bytes.get("hidden", 0) == rows * 8 * _size(shape)
            messages = sum(bool(k) for way in ("forward", "backward") for k in lists.leaving(way))
            assert sent.messages.get("hidden", 0) == messages
            assert set(sent.bytes) <= {"hidden"}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_overlap_changes_no_bit(scene: Scene) -> None:
    one, other = (run_in_threads(scene.num_ranks, across, scene, (3,), 1, given) for given in (True, False))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert a[2] == b[2]


def test_over_gloo(ranks: Run) -> None:
    scene = SCENES["three"]
    expected = run_in_threads(3, across, scene, (2, 3), 1, True)
    for a, b in zip(ranks(3, across, scene, (2, 3), 1, True), expected, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
        assert a[3].bytes == b[3].bytes


def test_gradients_are_added_in_rank_order() -> None:
    """Bit for bit: own first, then each reader by its number, whoever came first."""
    scene = Scene([2, 1, 1, 1], [[[], [], [], []], *([[0, 1], [], [], []] for _ in range(3))])
    grads = [1e8, 1.0, -1e8]
    for slow in range(4):
        found = run_in_threads(4, weighed, scene, grads, slow)[0]
        expected = torch.full((2, 2), 0.25, dtype=torch.float32)
        for grad in grads:
            expected = expected + torch.tensor(grad, dtype=torch.float32)
        assert torch.equal(found, expected)


def weighed(line: Collective, scene: Scene, grads: list[float], slow: int) -> Tensor:
    own = scene.own(scene.values((2,), torch.float32), line.rank).clone().requires_grad_()
    channel = Crossing(Messages(scene.lists(line.rank)), line)
    rows, _, arrive = channel.leave(own, 0)
    halo = arrive()
    if line.rank == slow:
        time.sleep(0.05)
    (0.25 * rows.sum() + (halo * grads[line.rank - 1]).sum()).backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    return own.grad


def no_gradient(line: Collective, scene: Scene) -> Cost:
    """Input rows need none: nothing goes back."""
    own = scene.own(scene.values((3,)), line.rank)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    channel = Crossing(Messages(scene.lists(line.rank)), line)
    before = line.traffic.now()
    rows, _, arrive = channel.leave(own, 0)
    ((rows * weight).sum() + (arrive() * weight).sum()).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    expected = own.sum(0) + scene.values((3,))[scene.halo(line.rank)].sum(0)
    assert torch.allclose(weight.grad, expected)
    return line.traffic.now() - before


def test_rows_without_gradients_send_none_back() -> None:
    scene = SCENES["three"]
    for rank, sent in enumerate(run_in_threads(3, no_gradient, scene)):
        assert sent.bytes["hidden"] == sum(scene.lists(rank).leaving("forward")) * 24


def twice(line: Collective, scene: Scene) -> tuple[Tensor, Tensor]:
    """Two channels in one pass, as layers use them, and what autograd makes of the rows if they were in one place."""
    own = scene.own(scene.values((3,)), line.rank).clone().requires_grad_()
    channels = [Crossing(Messages(scene.lists(line.rank)), line) for _ in range(2)]
    h = own
    for channel in channels:
        rows, tail, arrive = channel.leave(h, 1)
        halo = arrive()
        h = torch.tanh(rows + 0.1 * halo.sum(0) + 0.2 * tail.sum(0))
    (h**2).sum().backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    return h.detach(), own.grad


def test_two_layers() -> None:
    scene = SCENES["three"]
    found = run_in_threads(3, twice, scene)
    whole = scene.values((3,)).requires_grad_()
    h = whole
    for _ in range(2):
        parts = [scene.own(h, rank) for rank in range(3)]
        h = torch.cat(
            [
                torch.tanh(own + 0.1 * h[scene.halo(rank)].sum(0) + 0.2 * own[1:].sum(0))
                for rank, own in enumerate(parts)
            ]
        )
    (h**2).sum().backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    assert torch.allclose(torch.cat([each[0] for each in found]), h.detach(), rtol=1e-12)
    assert torch.allclose(torch.cat([each[1] for each in found]), whole.grad, rtol=1e-12)


# When rows move.

LATENCY_S = 0.25


def timed(line: Collective, scene: Scene, overlaps: bool) -> tuple[float, float, dict[str, float]]:
    """Seconds of posting rows and of waiting for them after as long a time of work, and the trace's totals."""
    trace = Trace()
    channel = Crossing(Messages(scene.lists(line.rank), Spans(trace, 1)), line, overlaps=overlaps)
    line.barrier()
    began = time.perf_counter()
    _, _, arrive = channel.leave(scene.own(scene.values((3,)), line.rank), 0)
    left = time.perf_counter() - began
    time.sleep(LATENCY_S)
    line.barrier()  # as slow as a message, so all that was posted before is here
    began = time.perf_counter()
    arrive()
    return left, time.perf_counter() - began, trace.totals()


def test_rows_move_while_others_compute() -> None:
    for left, waited, totals in run_in_threads(2, timed, _pair(), True, latency_s=LATENCY_S):
        assert left < 0.5 * LATENCY_S
        assert waited < 0.5 * LATENCY_S
        assert totals["wait"] < 0.5 * LATENCY_S
        assert totals["communicate"] > LATENCY_S
    for left, _, totals in run_in_threads(2, timed, _pair(), False, latency_s=LATENCY_S):
        assert left >= 0.9 * LATENCY_S, "without overlap rows are waited for where they leave"
        assert totals["wait"] >= 0.8 * LATENCY_S


def _pair() -> Scene:
    return Scene([3, 3], [[[], [0, 1]], [[2], []]])


# When something goes wrong.


def broken_off(line: Collective, scene: Scene) -> tuple[Tensor, Tensor]:
    """A step that raises between leaving and arriving on all ranks; the next one is as if it had not been."""
    channel = Crossing(Messages(scene.lists(line.rank)), line)
    own = scene.own(scene.values((3,)), line.rank)
    channel.begin_step(Key(0, 0))
    channel.leave(own + 7, 0)
    channel.begin_step(Key(0, 1))
    return channel.leave(own, 0)[2](), scene.values((3,))[scene.halo(line.rank)]


def test_a_step_that_was_broken_off_leaves_nothing() -> None:
    for found, expected in run_in_threads(3, broken_off, SCENES["three"]):
        assert torch.equal(found, expected)


def fails_between(line: Collective, scene: Scene) -> None:
    channel = Crossing(Messages(scene.lists(line.rank)), line)
    _, _, arrive = channel.leave(scene.own(scene.values((3,)), line.rank), 0)
    arrive()
    if line.rank == 1:
        raise ValueError("rank 1 has had enough")
    channel.begin_step(Key(0, 1))
    channel.leave(scene.own(scene.values((3,)), line.rank), 0)[2]()


def test_a_rank_that_fails_wakes_the_others() -> None:
    before = threading.active_count()
    with pytest.raises((ValueError, PeerError), match="rank 1 has had enough"):
        run_in_threads(3, fails_between, SCENES["three"])
    assert threading.active_count() == before


def of_other_lists(line: Collective) -> None:
    lists = Lists(3, [torch.arange(0), torch.arange(2)], [0, 1])
    if line.rank == 1:
        lists = Lists(3, [torch.arange(1), torch.arange(0)], [3, 0])
    Crossing(Messages(lists), line).leave(torch.ones(3, 2), 0)[2]()


def test_ranks_with_lists_that_do_not_match_are_told() -> None:
    with pytest.raises((InputError, PeerError), match="expected"):
        run_in_threads(2, of_other_lists)


def test_arriving_needs_leaving() -> None:
    (line,) = run_in_threads(1, lambda line: line)
    channel = Crossing(Messages(Lists(2, [torch.arange(0)], [0])), line)
    with pytest.raises(AssertionError, match="leave before they arrive"):
        channel.end_forward()
    with pytest.raises(AssertionError, match="says what they weigh"):
        channel.weights()


# Small things.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_taken_and_matrix(dtype: torch.dtype) -> None:
    rows = torch.arange(24).view(4, 3, 2).to(dtype)
    assert matrix(rows).shape == (4, 6)
    assert matrix(rows[:0]).shape == (0, 6)
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(taken(matrix(rows), ids), matrix(rows)[ids])


def test_lists_count_both_ways() -> None:
    lists = SCENES["three"].lists(1)
    assert lists.leaving("forward") == lists.arriving("backward") == [2, 0, 1]
    assert lists.leaving("backward") == lists.arriving("forward") == [2, 0, 4]
    assert lists.num_halo == 6


# The rivals, where they must be the exact channel.


def trajectory(line: Collective, scene: Scene, kind: str) -> list[tuple[Tensor, Tensor]]:
    """Five steps with the same rows: (halo, gradients)."""
    messages = Messages(scene.lists(line.rank))
    channel: Crossing = {  # type: ignore[no-untyped-call]
        "exact": lambda: Crossing(messages, line),
        "stale": lambda: StaleCrossing(messages, line),
        "smoothed": lambda: StaleCrossing(messages, line, smoothing=0.5),
        "skipping": lambda: SkippingCrossing(messages, line, drift=0.0, max_age=100),
        "young": lambda: SkippingCrossing(messages, line, drift=1e9, max_age=1),
    }[kind]()
    found = []
    for epoch in range(5):
        own = scene.own(scene.values((3,)), line.rank).clone().requires_grad_()
        channel.begin_step(Key(0, epoch))
        rows, tail, arrive = channel.leave(own, 1)
        halo = arrive()
        mixed(rows, tail, halo, line.rank).backward()  # type: ignore[no-untyped-call]
        assert own.grad is not None
        found.append((halo.detach().clone(), own.grad))
    channel.state()  # takes in what is under way
    return found


@pytest.mark.parametrize("kind", ["stale", "smoothed", "skipping", "young"])
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_rivals_are_exact_when_nothing_changes(scene: Scene, kind: str) -> None:
    """R1, R3: one layer is exact from the second step forward, from the third backward; a running mean comes close."""
    exact = run_in_threads(scene.num_ranks, trajectory, scene, "exact")
    found = run_in_threads(scene.num_ranks, trajectory, scene, kind)
    since = 0 if kind in ("skipping", "young") else 2
    for own, expected in zip(found, exact, strict=True):
        if kind == "smoothed":  # it may begin with nothing
            assert bool(((own[4][0] - expected[4][0]).abs() <= 0.51**4 * expected[4][0].abs()).all())
            continue
        for (halo, grad), (right, right_grad) in zip(own[since:], expected[since:], strict=True):
            assert torch.allclose(halo, right, rtol=1e-12)
            assert torch.allclose(grad, right_grad, rtol=1e-12)
        if kind == "stale":
            assert not bool(own[0][0].any()), "nothing has come in the first step"
