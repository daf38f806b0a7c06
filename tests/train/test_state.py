"""A session comes back exactly as it was saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polyhop.errors import CheckpointError, ConfigError
from polyhop.train.state import Session, State


class Buffered:
    """A step with a buffer of its own."""

    num_steps = 1

    def __init__(self) -> None:
        self.history = torch.zeros(2)

    def state(self) -> dict[str, Tensor]:
        return {"history": self.history}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.history = tensors["history"]


def session_of(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return Session(model, make(model), Buffered())


def advance(session: Session, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step + session.state.global_step))
        session.optimizer.zero_grad()
        session.model(x).square().sum().backward()
        session.optimizer.step()
        session.step.history += x.sum()
    session.state.global_step += steps


OPTIMIZERS = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters()),
    "groups": lambda m: torch.optim.Adam(
        [{"params": m[2].parameters(), "lr": 1.0}, {"params": m[0].parameters()}]
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_and_restored_goes_on_bit_for_bit(name: str) -> None:
    undisturbed, saved, resumed = (session_of(OPTIMIZERS[name]) for _ in range(3))
    advance(undisturbed, 3)
    advance(undisturbed, 4)
    advance(saved, 3)
    saved.keep_best()
    files = {stem: {k: v.clone() for k, v in tensors.items()} for stem, tensors in saved.tensors().items()}
    advance(resumed, 1)  # whatever it did before is forgotten
    resumed.restore(files, State.from_json(saved.state.to_json()))
    advance(resumed, 4)
    for (key, a), b in zip(
        undisturbed.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), key
    assert torch.equal(undisturbed.step.history, resumed.step.history)
    resumed.restore_best()
    for a, b in zip(files["model"].values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_best_weights_are_a_copy() -> None:
    session = session_of(OPTIMIZERS["sgd"])
    for _ in range(2):
        session.keep_best()
        before = {k: v.clone() for k, v in session.model.state_dict().items()}
        advance(session, 2)
        assert not torch.equal(session.model[0].weight, before["0.weight"])
        session.restore_best()
        assert all(torch.equal(v, before[k]) for k, v in session.model.state_dict().items())


def test_broken_weights_are_named() -> None:
    session = session_of(OPTIMIZERS["sgd"])
    assert session.first_not_finite() is None
    with torch.no_grad():
        session.model[2].bias[1] = float("inf")
    assert session.first_not_finite() == "2.bias"


def test_what_cannot_be_saved_is_said() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return {"anything": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    odd = Odd(2, 2)
    with pytest.raises(CheckpointError, match=r"no tensor.*_extra_state"):
        Session(odd, torch.optim.SGD(odd.parameters()), Buffered()).tensors()
    model, stranger = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="2 parameters that the model does not"):
        Session(model, torch.optim.SGD(stranger.parameters()), Buffered()).tensors()


def test_state_ignores_fields_it_does_not_know() -> None:
    assert State.from_json({**State(epoch=3).to_json(), "from_the_future": 1}) == State(epoch=3)
