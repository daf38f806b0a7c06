"""What rank 0 has, every rank has after; what every rank has, rank 0 has in the user's order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.comm import Collective, run_in_threads
from polyhop.train.state import Session, State
from polyhop.train.together import gather_rows_at_first, share_session, share_value

Run = Callable[..., list[Any]]

SEEDING = threading.Lock()


@pytest.fixture(params=["threads", "gloo"])
def run(request: pytest.FixtureRequest, ranks: Run) -> Run:
    return ranks if request.param == "gloo" else run_in_threads


class Buffered:
    """A step with a buffer of its own."""

    num_steps = 1
    is_stop_agreed = False

    def __init__(self, value: float) -> None:
        self.history = torch.full((3,), value)

    def state(self) -> dict[str, Tensor]:
        return {"history": self.history}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.history = tensors["history"]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
}


def step_once(session: Session, seed: int) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    session.optimizer.zero_grad()
    session.model(x).square().sum().backward()
    session.optimizer.step()


def session_of(rank: int, optimizer: str) -> Session:
    """Every rank begins with other weights; rank r has gone r + 2 steps of its own, rank 0 four."""
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    session = Session(model, OPTIMIZERS[optimizer](model), Buffered(float(rank)))
    for step in range(4 if rank == 0 else rank + 2):
        step_once(session, 100 * rank + step)
        if step == 1:
            session.keep_best()
    session.state = State(
        epoch=4 - rank, step=rank, global_step=40 + rank, best_val=0.1 + rank / 3, loss_sum=1 / 3
    )
    return session


def flat(session: Session) -> dict[str, Tensor]:
    return {
        f"{file}/{name}": value.detach().clone()
        for file, tensors in session.tensors().items()
        for name, value in tensors.items()
    }


def shared(line: Collective, optimizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The session after sharing, the same one step later, and where the run stands."""
    session = session_of(line.rank, optimizer)
    share_session(session, line)
    at_once = flat(session)
    step_once(session, 7)
    return at_once, flat(session), session.state.to_json()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_rank_has_the_session_of_the_first(optimizer: str) -> None:
    assert_shared(run_in_threads(3, shared, optimizer), optimizer)


def test_every_rank_has_the_session_of_the_first_over_gloo(ranks: Run) -> None:
    assert_shared(ranks(3, shared, "fused adamw"), "fused adamw")


def assert_shared(found: list[Any], optimizer: str) -> None:
    expected = session_of(0, optimizer)
    began, state = flat(expected), expected.state.to_json()
    step_once(expected, 7)
    later = flat(expected)
    assert any(name.startswith("best/") for name in began)
    assert any(name.startswith("optimizer/") for name in began) == (optimizer != "sgd")
    assert not torch.equal(began["best/0.weight"], began["model/0.weight"])
    assert torch.equal(began["strategy/history"], torch.zeros(3))
    for at_once, one_later, where in found:
        assert where == state
        for got, whole in ((at_once, began), (one_later, later)):
            assert got.keys() == whole.keys()
            for name, value in whole.items():
                assert got[name].dtype == value.dtype, name
                assert torch.equal(got[name], value), name


def test_best_weights_that_the_first_has_not_are_forgotten() -> None:
    def forget(line: Collective) -> bool:
        session = session_of(line.rank, "sgd")
        if line.rank == 0:
            session.best = None
        share_session(session, line)
        return session.best is None

    assert run_in_threads(2, forget) == [True, True]


def values_of(line: Collective, values: list[Any]) -> list[Any]:
    return [share_value(value if line.rank == 0 else f"rank {line.rank}", line) for value in values]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_value_of_the_first(run: Run, num_ranks: int) -> None:
    values = [None, 3, 0.1, "été", "", [], {"a": [1, {"b": None}]}, float("inf"), "x" * 100_000]
    assert run(num_ranks, values_of, values) == [values] * num_ranks


NODES = 20
ROWS = torch.randn(NODES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gathered(line: Collective, owner: Tensor, dtype: torch.dtype) -> Tensor:
    """Own rows in an order of their own. A rank without nodes knows neither width nor dtype."""
    ids = (owner == line.rank).nonzero()[:, 0].flip(0)
    rows = ROWS[ids].to(dtype) if ids.numel() else torch.empty(0)
    return gather_rows_at_first(rows, ids, NODES, line)


OWNERS = {
    "even": torch.arange(NODES) % 3,
    "first empty": torch.arange(NODES) % 2 + 1,
    "last empty": torch.arange(NODES) % 2,
    "all on the last": torch.full((NODES,), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_rows_come_to_the_first_in_the_users_order(run: Run, owner: Tensor, dtype: torch.dtype) -> None:
    first, *others = run(3, gathered, owner, dtype)
    assert first.dtype == dtype
    assert torch.equal(first, ROWS.to(dtype))
    assert [list(rest.shape) for rest in others] == [[0, 3]] * 2


def test_one_rank_has_its_own_rows() -> None:
    assert torch.equal(run_in_threads(1, gathered, torch.zeros(NODES), torch.float32)[0], ROWS.float())
