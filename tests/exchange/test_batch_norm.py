"""BatchNorm over the rows of several ranks is torch's BatchNorm over all of them in one matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import UnsupportedError
from polyhop.exchange.batch_norm import account_statistics, shared_statistics
from polyhop.nn.modules import BatchNorm

Run = Callable[..., list[Any]]

STEPS = 3
SHARES = {  # rows of each rank
    "2": (7, 5),
    "3 uneven": (1, 40, 3),
    "4": (6, 2, 9, 4),
    "first empty": (0, 8, 3),
    "all but one empty": (0, 0, 6, 0),
    "two single rows": (1, 0, 1),
}
shares = pytest.mark.parametrize("sizes", SHARES.values(), ids=SHARES)


@dataclass
class Seen:
    """What came out of some steps of a model."""

    outputs: list[Tensor]
    input_grads: list[Tensor]
    grads: list[dict[str, Tensor]]
    buffers: dict[str, Tensor]
    cost: Cost


def matrices(
    num_rows: int, width: int, dtype: torch.dtype = torch.float64, offset: float = 0.0
) -> list[Tensor]:
    """Rows and weights of the loss for each step: [STEPS] of [2, N, F]; the features' scales differ."""
    rng = torch.Generator().manual_seed(num_rows)
    drawn = torch.randn(STEPS, 2, num_rows, width, generator=rng, dtype=torch.float64)
    drawn[:, 0] = drawn[:, 0] * torch.linspace(0.5, 3, width, dtype=torch.float64) + offset
    return list(drawn.to(dtype))


def steps(model: nn.Module, given: list[Tensor], cost: Callable[[], Cost] = Cost) -> Seen:
    before = cost()
    outputs, input_grads, grads = [], [], []
    for x, factor in given:
        x = x.clone().requires_grad_()
        model.zero_grad()
        out = model(x)
        (out * factor).sum().backward()
        outputs.append(out.detach())
        input_grads.append(x.grad)
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    return Seen(outputs, input_grads, grads, buffers, cost() - before)


def share(given: list[Tensor], sizes: tuple[int, ...], rank: int) -> list[Tensor]:
    return [step.split(list(sizes), dim=1)[rank] for step in given]


def on_rank(line: Collective, model: nn.Module, given: list[Tensor], sizes: tuple[int, ...]) -> Seen:
    mine = copy.deepcopy(model)
    with shared_statistics(mine, line.fork()):
        return steps(mine, share(given, sizes, line.rank), line.traffic.now)


def varied(model: nn.Module) -> nn.Module:
    """With weights that are neither one nor zero."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) + 0.5)
    return model


def assert_same(ranks: list[Seen], whole: Seen, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance}
    for step in range(STEPS):
        torch.testing.assert_close(
            torch.cat([seen.outputs[step] for seen in ranks]), whole.outputs[step], **close
        )
        own = torch.cat([seen.input_grads[step] for seen in ranks])
        torch.testing.assert_close(own, whole.input_grads[step], **close)
        for name, grad in whole.grads[step].items():
            torch.testing.assert_close(sum(seen.grads[step][name] for seen in ranks), grad, **close)
    for name, value in whole.buffers.items():
        torch.testing.assert_close(ranks[0].buffers[name], value, **close)
        assert all(torch.equal(seen.buffers[name], ranks[0].buffers[name]) for seen in ranks)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not affine": {"affine": False},
    "cumulative": {"momentum": None},
    "no running": {"track_running_stats": False},
    "eps": {"eps": 0.3, "momentum": 0.7},
}


@shares
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_one_matrix(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    model = varied(nn.BatchNorm1d(5, dtype=torch.float64, **options))
    given = matrices(sum(sizes), 5)
    ranks = run_in_threads(len(sizes), on_rank, model, given, sizes)
    assert_same(ranks, steps(copy.deepcopy(model), given), 1e-12)


@shares
def test_float32_is_as_near_as_its_digits(sizes: tuple[int, ...]) -> None:
    model = varied(nn.BatchNorm1d(4))
    given = matrices(sum(sizes), 4, torch.float32)
    exact = steps(copy.deepcopy(model).double(), [step.double() for step in given])
    ranks = run_in_threads(len(sizes), on_rank, model.float(), given, sizes)
    assert ranks[0].outputs[0].dtype == ranks[0].grads[0]["weight"].dtype == torch.float32
    as_double = [
        Seen(
            [out.double() for out in seen.outputs],
            [grad.double() for grad in seen.input_grads],
            [{name: grad.double() for name, grad in step.items()} for step in seen.grads],
            {name: value.double() for name, value in seen.buffers.items()},
            seen.cost,
        )
        for seen in ranks
    ]
    exact.buffers = {name: value.double() for name, value in exact.buffers.items()}
    # Two rows are normalised to +-1 whatever they are: their gradients are differences of nearly equal numbers.
    assert_same(as_double, exact, 1e-5 if sum(sizes) > 2 else 1e-3)


@pytest.mark.parametrize("apart", [False, True], ids=["one mean", "means of ranks apart"])
def test_large_offsets_cost_no_digits(apart: bool) -> None:
    sizes = (300, 500, 200)
    model = varied(nn.BatchNorm1d(3))
    given = matrices(sum(sizes), 3, torch.float32, offset=1e4)
    if apart:
        for step in given:
            step[0, 300:800] -= 2e4
    exact = steps(copy.deepcopy(model).double(), [step.double() for step in given])
    ranks = run_in_threads(3, on_rank, model, given, sizes)
    for step in range(STEPS):
        found = torch.cat([seen.outputs[step] for seen in ranks]).double()
        torch.testing.assert_close(found, exact.outputs[step], rtol=2e-6, atol=2e-6)
        own = torch.cat([seen.input_grads[step] for seen in ranks]).double()
        assert (own - exact.input_grads[step]).abs().max() <= 3e-6 * exact.input_grads[step].abs().max()
    torch.testing.assert_close(
        ranks[0].buffers["running_var"].double(), exact.buffers["running_var"], rtol=1e-6, atol=0
    )


def constant(line: Collective) -> nn.Module:
    model = nn.BatchNorm1d(40, momentum=1.0)
    value = torch.linspace(1e4, 1.3e4, 40)  # sums of so many round
    with shared_statistics(model, line):
        assert model(value.expand(1000 + 77 * line.rank, 40)).abs().max() < 1e-6
    torch.testing.assert_close(model.running_mean, value, rtol=0, atol=0)
    return model


def test_constant_columns_have_no_variance() -> None:
    for model in run_in_threads(3, constant):
        assert model.running_var.abs().max() < 1e-12


def test_bfloat16_rows_stay_so() -> None:
    model = varied(nn.BatchNorm1d(4))
    given = matrices(30, 4, torch.bfloat16)
    exact = steps(copy.deepcopy(model), [step.float() for step in given])
    ranks = run_in_threads(2, on_rank, model, given, (10, 20))
    for step in range(STEPS):
        found = torch.cat([seen.outputs[step] for seen in ranks])
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), exact.outputs[step], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["1d", "2d"])
def test_channels_with_more_dimensions(shape: tuple[int, ...]) -> None:
    kind = nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d
    model = varied(kind(4, dtype=torch.float64))
    rng = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 9, 4, *shape, generator=rng, dtype=torch.float64) for _ in range(STEPS)]
    ranks = run_in_threads(3, on_rank, model, given, (2, 0, 7))
    assert_same(ranks, steps(copy.deepcopy(model), given), 1e-12)


def deep() -> nn.Module:
    """BatchNorms of polyhop and torch, nested, one of them used twice, with other layers between."""
    twice = nn.BatchNorm1d(6)
    inner = nn.Sequential(nn.Linear(6, 6), twice, nn.Tanh(), nn.Linear(6, 6), twice)
    return varied(nn.Sequential(nn.Linear(5, 6), BatchNorm(6), inner, nn.ReLU(), nn.Linear(6, 5)).double())


@shares
def test_several_in_a_model(sizes: tuple[int, ...]) -> None:
    model, given = deep(), matrices(sum(sizes), 5)
    ranks = run_in_threads(len(sizes), on_rank, model, given, sizes)
    # Two rows become +-1, so the second BatchNorm's gradients are differences of nearly equal numbers.
    assert_same(ranks, steps(copy.deepcopy(model), given), 1e-10 if sum(sizes) > 2 else 1e-5)


def test_over_processes(ranks: Run) -> None:
    model = varied(nn.BatchNorm1d(5, dtype=torch.float64))
    given = matrices(12, 5)
    assert_same(ranks(3, on_rank, model, given, (4, 0, 8)), steps(copy.deepcopy(model), given), 1e-12)


@pytest.mark.parametrize("width", [1, 5, 3000])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_counters_equal_the_account(num_ranks: int, width: int) -> None:
    sizes = (4, 0, 3, 2)[:num_ranks]
    model = nn.BatchNorm1d(width)
    given = matrices(sum(sizes), width, torch.float32)
    for rank, seen in enumerate(run_in_threads(num_ranks, on_rank, model, given, sizes)):
        assert seen.cost == account_statistics([width] * STEPS, num_ranks, rank)
        assert (seen.cost.total_bytes > 0) == (num_ranks > 1)


def forward_alone(line: Collective) -> tuple[Cost, Tensor]:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    with shared_statistics(model, line):
        model(matrices(4, 3)[line.rank][0]).sum().backward()
    return line.traffic.now(), model[0].weight.grad


def test_inputs_without_gradient_send_no_sums_back() -> None:
    for rank, (cost, grad) in enumerate(run_in_threads(3, forward_alone)):
        assert cost == account_statistics([3], 3, rank, has_input_grad=False) + account_statistics(
            [2], 3, rank
        )
        assert grad is not None


def test_account_of_nothing() -> None:
    assert account_statistics([], 4, 0) == Cost()
    assert account_statistics([8], 1, 0) == Cost()


def single_row(line: Collective, allow: bool) -> tuple[Tensor | None, str, dict[str, Tensor]]:
    model = BatchNorm(3, allow_single_element=allow).double()
    model.module.running_mean += 2
    mine = torch.full((1 if line.rank == 1 else 0, 3), 5.0, dtype=torch.float64)
    out, said = None, ""
    with shared_statistics(model, line):
        try:
            out = model(mine).detach()
        except ValueError as error:
            said = str(error)
    return out, said, dict(model.module.named_buffers())


def test_one_row_in_all_is_refused_on_every_rank() -> None:
    for out, said, buffers in run_in_threads(3, single_row, False):
        assert out is None
        assert "Expected more than 1 value per channel when training" in said
        assert torch.equal(buffers["running_var"], torch.ones(3, dtype=torch.float64))
        assert buffers["num_batches_tracked"] == 1  # as torch counts it


def test_one_row_in_all_is_normalised_by_running_statistics_where_allowed() -> None:
    for rank, (out, _, buffers) in enumerate(run_in_threads(3, single_row, True)):
        expected = torch.full((1 if rank == 1 else 0, 3), 3 / (1 + 1e-5) ** 0.5, dtype=torch.float64)
        torch.testing.assert_close(out, expected)
        assert buffers["num_batches_tracked"] == 0


def test_one_row_of_a_rank_is_not_one_row_in_all() -> None:
    """A rank with one row, or none, takes part where single elements are allowed."""
    model = varied(BatchNorm(4, allow_single_element=True).double())
    given = matrices(6, 4)
    ranks = run_in_threads(3, on_rank, model, given, (1, 0, 5))
    assert_same(ranks, steps(copy.deepcopy(model), given), 1e-12)


def no_rows(line: Collective) -> tuple[Tensor, dict[str, Tensor]]:
    model = nn.BatchNorm1d(3)
    with shared_statistics(model, line):
        out = model(torch.zeros(0, 3, requires_grad=True))
        out.sum().backward()
    assert torch.equal(model.weight.grad, torch.zeros(3))
    return out, dict(model.named_buffers())


def test_no_rows_at_all() -> None:
    model = nn.BatchNorm1d(3)
    model(torch.zeros(0, 3))
    for out, buffers in run_in_threads(2, no_rows):
        assert out.shape == (0, 3)
        assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


def in_evaluation(line: Collective) -> Cost:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), BatchNorm(3, allow_single_element=True)).eval()
    x = torch.full((line.rank, 3), 2.0)
    expected, buffers = model(x), [value.clone() for value in model.buffers()]
    with shared_statistics(model, line):
        assert torch.equal(model(x), expected)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    return line.traffic.now()


def test_evaluation_is_untouched() -> None:
    assert run_in_threads(3, in_evaluation) == [Cost()] * 3


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("planted")


def left(line: Collective) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), BatchNorm(3, allow_single_element=True), Fails())
    own = model[0].forward
    model[0].forward = own  # a user's own attribute comes back
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(RuntimeError, match="planted"), shared_statistics(model, line):
        model(torch.ones(2, 3))
    with shared_statistics(model, line), shared_statistics(model, line):
        assert model[0].forward is not own
        assert "forward" in vars(model[1])
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model[0].forward is own
    assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())


def test_modules_are_as_they_were_after_the_context_and_after_an_error() -> None:
    run_in_threads(2, left)


def hooked(line: Collective) -> int:
    calls = []
    model = nn.Sequential(nn.BatchNorm1d(3))
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with shared_statistics(model, line):
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(line.rank)))
    return len(calls)


def test_hooks_still_run() -> None:
    assert run_in_threads(2, hooked) == [1, 1]


class Custom(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return input


def test_a_forward_of_its_own_is_refused() -> None:
    def job(line: Collective) -> None:
        with shared_statistics(nn.Sequential(nn.BatchNorm1d(2), Custom(3)), line):
            pass

    with pytest.raises(UnsupportedError, match=r"1 \(Custom\) is a BatchNorm with a forward of its own"):
        run_in_threads(2, job)


def test_rows_of_another_width_are_refused() -> None:
    def job(line: Collective) -> None:
        model = nn.BatchNorm1d(3)
        with shared_statistics(model, line):
            model(torch.zeros(4, 1))

    with pytest.raises(ValueError, match=r"BatchNorm of 3 features was given rows \[4, 1\]"):
        run_in_threads(2, job)


def test_one_rank_keeps_torchs_bits() -> None:
    model = nn.BatchNorm1d(4)
    given = matrices(20, 4, torch.float32)
    alone = run_in_threads(1, on_rank, model, given, (20,))[0]
    whole = steps(copy.deepcopy(model), given)
    assert all(torch.equal(a, b) for a, b in zip(alone.outputs, whole.outputs, strict=True))


def bits(line: Collective) -> Tensor:
    """The statistics of one step."""
    rng = torch.Generator().manual_seed(line.rank)
    x = torch.randn(30 + line.rank, 50, generator=rng, dtype=torch.float64) * 100
    model = nn.BatchNorm1d(50, momentum=1.0, dtype=torch.float64)
    with shared_statistics(model, line):
        model(x)
    return torch.stack([model.running_mean, model.running_var])


def test_statistics_have_the_same_bits_on_all_ranks() -> None:
    first, *others = run_in_threads(4, bits)
    assert all(torch.equal(other, first) for other in others)
