"""Gradients of all ranks become their sum, in buckets that leave while the backward pass runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.exchange.gradients import GradientSum, bucket_sizes

Run = Callable[..., list[Any]]

SEEDING = threading.Lock()
ROWS = 12


class Wide(nn.Module):
    """Six layers in a row, a layer nobody uses, and one that only odd rows use."""

    def __init__(self) -> None:
        super().__init__()
        with SEEDING:  # ranks may be threads, and torch's generator is one
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
            self.idle = nn.Linear(4, 2)
            self.odd = nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor, is_odd: bool) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.odd(x) if is_odd else x).square().sum()


def inputs(row: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(row), dtype=torch.float64)


def loss_of(model: Wide, rows: range) -> Tensor:
    return torch.stack([model(inputs(row), row % 2 == 1) for row in rows]).sum()


def rows_of(rank: int, num_ranks: int, kind: str) -> range:
    """``mixed``: any rows everywhere; ``odd on one``: with 2 ranks, rank 1 alone has odd rows; ``idle``: rank 1 has none."""
    if kind == "idle":
        return range(0) if rank == 1 else range(rank, ROWS, num_ranks)
    return range(rank, ROWS, num_ranks)


def summed(
    line: Collective, kind: str, bucket_bytes: int, steps: int
) -> tuple[dict[str, Tensor | None], list[float], list[Cost]]:
    model = Wide()
    added = GradientSum(list(model.parameters()), line, bucket_bytes=bucket_bytes)
    losses, costs = [], []
    for _ in range(steps):
        model.zero_grad()
        before = line.traffic.now()
        added.begin()
        total = torch.zeros((), dtype=torch.float64)
        if rows := rows_of(line.rank, line.num_ranks, kind):
            loss = loss_of(model, rows)
            loss.backward()
            total = loss.detach()
        costs.append(line.traffic.now() - before)  # when the backward pass returns
        losses.append(float(added.end(total)))
    return {name: p.grad for name, p in model.named_parameters()}, losses, costs


def alone(kind: str, num_ranks: int) -> tuple[dict[str, Tensor | None], float]:
    model = Wide()
    total = torch.zeros((), dtype=torch.float64)
    for rank in range(num_ranks):
        if rows := rows_of(rank, num_ranks, kind):
            loss = loss_of(model, rows)
            loss.backward()
            total += loss.detach()
    return {name: p.grad for name, p in model.named_parameters()}, float(total)


def assert_sums(found: list[Any], kind: str) -> None:
    expected, loss = alone(kind, len(found))
    for grads, losses, _ in found:
        assert losses == [pytest.approx(loss, rel=1e-12)] * len(losses)
        for name, grad in grads.items():
            whole = expected[name]
            assert (grad is None) == (whole is None), name
            if grad is not None and whole is not None:
                assert grad.dtype == torch.float64
                assert torch.allclose(grad, whole, rtol=0, atol=1e-12), name
                first = found[0][0][name]
                assert torch.equal(grad, first), name  # the same bits everywhere


@pytest.mark.parametrize("kind", ["mixed", "idle"])
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 22])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_gradients_of_one_process(num_ranks: int, bucket_bytes: int, kind: str) -> None:
    found = run_in_threads(num_ranks, summed, kind, bucket_bytes, 2)
    assert_sums(found, kind)
    for grads, _, _ in found:
        assert grads["idle.weight"] is None  # no rank has one: the optimiser must not see zeros
        assert num_ranks == 1 or grads["odd.weight"] is not None or kind == "idle"


def test_a_parameter_that_one_rank_uses_has_its_gradient_everywhere() -> None:
    """With two ranks, odd rows are rank 1's alone."""
    found = run_in_threads(2, summed, "mixed", 200, 1)
    assert_sums(found, "mixed")
    assert float(found[0][0]["odd.weight"].abs().max()) > 0


def test_over_gloo(ranks: Run) -> None:
    found = ranks(3, summed, "idle", 200, 3)
    assert_sums(found, "idle")
    threads = run_in_threads(3, summed, "idle", 200, 3)
    for name, grad in threads[0][0].items():
        assert grad is None or torch.equal(grad, found[0][0][name])


def test_buckets_leave_before_the_end() -> None:
    """Every bucket but the last is posted inside the backward pass where its gradients are all there."""

    def chain(line: Collective, bucket_bytes: int) -> tuple[Cost, Cost, list[int]]:
        model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(5)])
        parameters = list(model.parameters())
        added = GradientSum(parameters, line, bucket_bytes=bucket_bytes)
        added.begin()
        model(torch.ones(1, 8)).sum().backward()
        during = line.traffic.now()
        added.end(torch.tensor(0.0))
        return during, line.traffic.now(), bucket_sizes(parameters, bucket_bytes)

    for during, after, sizes in run_in_threads(2, chain, 1):
        assert sizes == [64, 64, 64, 64, 64 + 7]
        assert during.bytes["gradients"] == 4 * 64 * 4  # four buckets
        assert during.messages["gradients"] == 4
        assert after.messages["gradients"] == 5
    for during, _, sizes in run_in_threads(2, chain, 1 << 22):
        assert len(sizes) == 1
        assert during.total_bytes == 0


def test_a_bucket_with_an_idle_parameter_waits_for_the_end() -> None:
    """Buckets leave from the last parameter to the first: "odd", which rank 1 alone uses, then "idle", which nobody does."""
    during = [costs[0].total_bytes for _, _, costs in run_in_threads(2, summed, "mixed", 1, 1)]
    assert during == [0, (16 + 4) * 8]


def test_sizes_of_buckets() -> None:
    parameters = [torch.zeros(10), torch.zeros(20), torch.zeros(30)]
    assert bucket_sizes(parameters, 1) == [30, 20, 10 + 5]
    assert bucket_sizes(parameters, 121) == [50, 10 + 5]
    assert bucket_sizes(parameters, 1 << 20) == [60 + 5]
    assert bucket_sizes(parameters) == [60 + 5]


def test_hooks_are_gone_after_close() -> None:
    def closed(line: Collective) -> int:
        layer = nn.Linear(4, 4)
        added = GradientSum(list(layer.parameters()), line, bucket_bytes=1)
        added.begin()
        added.close()
        layer(torch.ones(1, 4)).sum().backward()
        return len(added._sent)

    assert run_in_threads(2, closed) == [0, 0]


def test_a_backward_pass_outside_begin_and_end_sends_nothing() -> None:
    def outside(line: Collective) -> float:
        layer = nn.Linear(4, 4)
        added = GradientSum(list(layer.parameters()), line, bucket_bytes=1)
        layer(torch.ones(1, 4)).sum().backward()
        sent = line.traffic.now().total_bytes
        layer.zero_grad()
        added.begin()
        added.end(torch.tensor(0.0))
        layer(torch.ones(1, 4)).sum().backward()  # after a step
        return sent + float(len(added._sent) - 2)

    assert run_in_threads(2, outside) == [0.0, 0.0]


def stops(line: Collective, asker: int, at: int) -> list[bool]:
    """Whether the stop is agreed after each of five steps; one rank is asked before its step ``at``."""
    layer = nn.Linear(2, 2)
    step = [0]
    added = GradientSum(
        list(layer.parameters()), line, asks_to_stop=lambda: line.rank == asker and step[0] == at
    )
    agreed = []
    for step[0] in range(5):  # the lambda reads it
        added.begin()
        added.end(torch.tensor(0.0))
        agreed.append(added.is_stop_agreed)
    return agreed


@pytest.mark.parametrize("asker", [0, 2])
def test_a_stop_is_known_to_all_after_the_same_step(asker: int) -> None:
    assert run_in_threads(3, stops, asker, 2) == [[False, False, True, True, True]] * 3
    assert run_in_threads(3, stops, asker, 99) == [[False] * 5] * 3


def test_frozen_parameters_stay_without_gradient() -> None:
    def frozen(line: Collective, bucket_bytes: int) -> tuple[bool, Tensor]:
        with SEEDING:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].requires_grad_(False)
        added = GradientSum(list(model.parameters()), line, bucket_bytes=bucket_bytes)
        added.begin()
        model(torch.full((1, 3), line.rank + 1.0)).sum().backward()
        added.end(torch.tensor(0.0))
        assert model[0].weight.grad is not None
        return model[1].weight.grad is None and model[1].bias.grad is None, model[0].weight.grad

    with SEEDING:
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    whole(torch.tensor([[1.0] * 3, [2.0] * 3])).sum().backward()
    for bucket_bytes in (1, 1 << 20):
        for is_none, grad in run_in_threads(2, frozen, bucket_bytes):
            assert is_none
            torch.testing.assert_close(grad, whole[0].weight.grad)
