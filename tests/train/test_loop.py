"""The loop alone, with a step made of plain numbers: order of events, early stopping, divergence, interruption."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.errors import DivergedError, Interrupted
from polyhop.kernels.keys import Key
from polyhop.trace import Trace
from polyhop.train import loop
from polyhop.train.loop import Options, StopAsked, Tools, train
from polyhop.train.state import Session


class Counting:
    """A step of ``num_steps`` whose loss is the weight; it notes its keys."""

    num_steps = 3

    def __init__(self, model: nn.Module) -> None:
        self.model, self.keys = model, []
        self.losses: dict[int, float] = {}
        self.drawn: list[float] = []
        self.is_open = False

    def batches(self, epoch: int, start: int = 0) -> Iterator[int]:
        self.is_open = True
        try:
            yield from range(start, self.num_steps)
        finally:
            self.is_open = False

    def gradients(self, batch: int, key: Key) -> Tensor:
        assert batch == key.step
        self.keys.append((key.epoch, key.step))
        self.drawn.append(float(torch.rand(())))
        loss = self.model.weight.sum()
        loss.backward()
        return torch.tensor(self.losses.get(len(self.keys), float(loss.detach())))

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        pass


class Bench:
    """A loop with everything around it recorded."""

    def __init__(self, scores: list[dict[str, float]] | None = None, **options: Any) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        self.step = Counting(model)
        self.session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), self.step)
        self.scores = scores
        self.options = Options(**{"max_epochs": 4, "seed": 7, **options})
        self.records: list[dict[str, Any]] = []
        self.saved: list[int] = []
        self.evaluated: list[int] = []
        self.signal: str | None = None
        self.trace = Trace()
        self.stop_after: int | None = None
        self.wish = False

    def evaluate(self) -> dict[str, float]:
        self.evaluated.append(self.session.state.epoch + 1)
        if self.signal == "in evaluation":
            raise StopAsked
        if self.scores is None:
            return {}
        return self.scores[len(self.evaluated) - 1]

    def on_step(self, epoch: int, step: int, num_steps: int) -> None:
        if self.session.state.global_step == self.stop_after:
            self.signal = "SIGTERM"

    def on_epoch(self, record: dict[str, Any]) -> bool:
        self.records.append(record)
        return self.wish

    def save(self) -> str:
        self.saved.append(self.session.state.global_step)
        return f"step-{self.session.state.global_step}"

    def run(self) -> None:
        tools = Tools(
            set_lr=lambda step: 0.01,
            evaluate=self.evaluate,
            save=self.save,
            on_step=self.on_step,
            on_epoch=self.on_epoch,
            stop=lambda: self.signal,
            trace=self.trace,
        )
        train(self.session, self.options, tools)


def test_every_step_of_every_epoch_once() -> None:
    bench = Bench()
    bench.run()
    assert bench.step.keys == [(e, s) for e in range(4) for s in range(3)]
    assert [record["epoch"] for record in bench.records] == [1, 2, 3, 4]
    assert [record["step"] for record in bench.records] == [3, 6, 9, 12]
    assert bench.records[0]["loss"] == pytest.approx((1.0 + 0.99 + 0.98) / 3)
    assert bench.trace.counts()["compute"] == 12


def test_evaluates_when_due_and_at_the_end() -> None:
    bench = Bench([{"val": 0.1}] * 9, max_epochs=7, eval_every=3)
    bench.run()
    assert bench.evaluated == [3, 6, 7]
    assert [("val" in record) for record in bench.records] == [False, False, True, False, False, True, True]


def test_early_stopping_and_best_weights() -> None:
    vals = [0.1, 0.5, 0.5, 0.4, 0.9]
    bench = Bench([{"val": v, "test": v + 0.05} for v in vals], max_epochs=9, patience=2)
    bench.run()
    state = bench.session.state
    assert (state.epoch, state.best_epoch, state.best_val, state.best_test) == (4, 2, 0.5, 0.55)
    assert state.has_stopped
    bench.session.restore_best()
    assert bench.session.model.weight.item() == pytest.approx(1 - 6 * 0.01)  # the weights after epoch 2


def test_not_a_number_is_never_the_best() -> None:
    bench = Bench([{"val": v} for v in (math.nan, 0.2, math.nan)], max_epochs=3)
    bench.run()
    assert bench.session.state.best_val == 0.2


def test_without_validation_nodes_the_newest_counts() -> None:
    bench = Bench([{"test": t} for t in (0.9, 0.8)], max_epochs=2)
    bench.run()
    assert (bench.session.state.best_test, bench.session.best) == (0.8, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_loss_is_named_by_its_step_and_nothing_is_saved_after(bad: float) -> None:
    bench = Bench(checkpoint_every=2)
    bench.step.losses[5] = bad
    with pytest.raises(DivergedError, match=rf"loss is {bad} at step 5 \(epoch 2\)"):
        bench.run()
    assert bench.saved == [2, 4]


def test_a_bad_loss_in_a_long_epoch_stops_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.step.num_steps = 1000
    bench.step.losses[10] = math.nan
    with pytest.raises(DivergedError, match="step 10 "):
        bench.run()
    assert len(bench.step.keys) == loop._SETTLE_STEPS
    assert not bench.step.is_open  # the loader was closed


def test_checkpoints_by_steps_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(checkpoint_every=4)
    bench.run()
    assert bench.saved == [4, 8, 12]
    monkeypatch.setattr(loop, "_CHECKPOINT_EVERY_S", 0.0)
    bench = Bench(max_epochs=2)
    bench.run()
    assert bench.saved == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("after", range(1, 12))
def test_interrupted_anywhere_and_continued_is_undisturbed(after: int) -> None:
    vals = [{"val": v} for v in (0.1, 0.5, 0.5, 0.4)]
    whole, bench = Bench(vals), Bench(vals)
    whole.run()
    bench.stop_after = after
    with pytest.raises(Interrupted, match=rf"SIGTERM after step {after}; saved in step-{after}"):
        bench.run()
    assert bench.saved == [after]
    bench.signal, bench.stop_after = None, None
    bench.run()
    assert bench.step.keys == whole.step.keys
    assert bench.step.drawn == whole.step.drawn  # what torch's generator gives depends on the step alone
    state, expected = bench.session.state.to_json(), whole.session.state.to_json()
    del state["seconds"], expected["seconds"]
    assert state == expected
    kept = [{k: v for k, v in r.items() if k not in ("seconds", "train_seconds")} for r in bench.records]
    assert kept == [
        {k: v for k, v in r.items() if k not in ("seconds", "train_seconds")} for r in whole.records
    ]


def test_a_signal_during_evaluation_saves_before_it_and_evaluates_again() -> None:
    bench = Bench([{"val": 0.5}] * 9, max_epochs=2)
    bench.signal = None
    bench.on_step = lambda epoch, step, num: setattr(bench, "pending", step == 3 and epoch == 1)
    real = bench.evaluate

    def evaluate() -> dict[str, float]:
        if getattr(bench, "pending", False):
            bench.pending, bench.signal = False, "in evaluation"
        return real()

    bench.evaluate = evaluate
    with pytest.raises(Interrupted, match="after step 3"):
        bench.run()
    assert (bench.session.state.epoch, bench.session.state.step, bench.records) == (0, 3, [])
    bench.signal = None
    bench.run()
    assert bench.evaluated == [1, 1, 2]
    assert bench.step.keys == [(e, s) for e in range(2) for s in range(3)]


def test_a_signal_after_the_last_step_lets_the_run_end() -> None:
    bench = Bench([{"val": 0.5}] * 4)
    bench.on_epoch = lambda record: (
        setattr(bench, "signal", "SIGTERM" if record["epoch"] == 4 else None) or False
    )
    bench.run()
    assert bench.session.state.epoch == 4


def test_a_callback_can_stop() -> None:
    bench = Bench()
    bench.wish = True
    bench.run()
    assert (bench.session.state.epoch, bench.session.state.has_stopped) == (1, True)


def test_clipping_bounds_the_gradient() -> None:
    bench = Bench(clip=1e-3, max_epochs=1)
    bench.run()
    assert bench.session.model.weight.item() == pytest.approx(1 - 3 * 0.01 * 1e-3)
