"""The training loop: everything that happens in a step, an epoch and an interruption, top to bottom.

It is handed a Session (what changes), Options (what was asked) and Tools (what it may call); it knows no strategy, no
file and no metric. Losses stay on the device until they are settled: at the end of an epoch, before a checkpoint, or after
_SETTLE_STEPS steps; a loss that is not finite is named by its step there, before anything is saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyhop.errors import DivergedError, Interrupted
from polyhop.kernels.keys import Key, Purpose
from polyhop.trace import Trace
from polyhop.train.quick import quick_step
from polyhop.train.state import Session

__all__ = ["Options", "StopAsked", "Tools", "train"]

_SETTLE_STEPS = 64
_CHECKPOINT_EVERY_S = 60.0
_CHECKPOINT_STEPS = 50  # of a strategy whose ranks all keep something
_END = object()


@dataclass(frozen=True)
class Options:
    max_epochs: int
    seed: int
    clip: float | None = None
    eval_every: int = 1
    patience: int | None = None
    checkpoint_every: int | None = None  # steps; None = about once a minute


@dataclass(frozen=True)
class Tools:
    set_lr: Callable[[int], float]  # global step from 0 -> the rate it set
    evaluate: Callable[[], dict[str, float]]  # "val", "test", ...; empty if there is nothing to score
    save: Callable[[], str | None]  # write a checkpoint; where, or None if the run keeps none
    on_step: Callable[[int, int, int], None]  # epoch from 1, step from 1, steps in the epoch
    on_epoch: Callable[[dict[str, Any]], bool]  # the record of an epoch; True = stop
    stop: Callable[[], str | None]  # name of the signal that asked to stop
    trace: Trace


class StopAsked(Exception):  # noqa: N818 (a request, not an error)
    """Raise it from ``Tools.evaluate``, between chunks, once a signal has arrived."""


def train(session: Session, options: Options, tools: Tools) -> None:
    """Run until ``max_epochs``, early stopping, or a signal (Interrupted, after saving)."""
    _Loop(session, options, tools).run()


class _Loop:
    def __init__(self, session: Session, options: Options, tools: Tools) -> None:
        self.session, self.options, self.tools = session, options, tools
        self.parameters = [p for group in session.optimizer.param_groups for p in group["params"]]
        self.take_step = quick_step(session.optimizer)
        self.losses: list[Tensor] = []  # not yet settled
        self.clock = self.saved_at = time.perf_counter()
        self.began_s = session.state.seconds  # when the epoch's first step did, or this process

    def run(self) -> None:
        state = self.session.state
        while state.epoch < self.options.max_epochs and not state.has_stopped:
            with closing(_closable(self.session.step.batches(state.epoch, state.step))) as batches:
                self._steps(batches)
            self._end_epoch()
            if self._is_checkpoint_due():
                self._save()

    def _steps(self, batches: Iterator[Any]) -> None:
        """The rest of the current epoch's steps."""
        state, num_steps = self.session.state, self.session.step.num_steps
        self.session.model.train()
        while True:
            with self.tools.trace.span("wait", step=state.global_step):
                batch = next(batches, _END)
            if batch is _END:
                return
            with self.tools.trace.span("compute", step=state.global_step):
                self._step(batch)
            self.tools.on_step(state.epoch + 1, state.step, num_steps)
            if self.tools.stop() is not None:
                self._leave()
            if state.step < num_steps and self._is_checkpoint_due():
                self._save()

    def _step(self, batch: Any) -> None:
        state = self.session.state
        key = Key(self.options.seed, state.epoch, state.step)
        _seed_torch(key, self.parameters[0].device)
        self.tools.set_lr(state.global_step)
        for parameter in self.parameters:
            parameter.grad = None
        self.losses.append(self.session.step.gradients(batch, key))
        if self.options.clip is not None:
            clip = getattr(
                self.session.step, "clip", None
            )  # of a step whose ranks train weights of their own
            if clip is None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.options.clip)
            else:
                clip(self.options.clip)
        self.take_step()
        state.step += 1
        state.global_step += 1
        if len(self.losses) >= _SETTLE_STEPS:
            self._settle()

    def _settle(self) -> None:
        """Bring losses to the host, add them up one by one (so that a resumed epoch has the same sum), check them."""
        state, now = self.session.state, time.perf_counter()
        state.seconds += now - self.clock
        self.clock = now
        if not self.losses:
            return
        values = torch.stack(self.losses).tolist()
        self.losses.clear()
        for offset, value in enumerate(values, start=state.global_step - len(values) + 1):
            if not math.isfinite(value):
                raise DivergedError(
                    f"the loss is {value} at step {offset} (epoch {state.epoch + 1}): nothing was saved since; "
                    "try a smaller lr, clip=1.0, or look for extreme values in the features"
                )
            state.loss_sum += value

    def _end_epoch(self) -> None:
        """Evaluate, judge, report; then the epoch counts as done."""
        state, options = self.session.state, self.options
        self._settle()
        trained = state.seconds - self.began_s
        is_last = state.epoch + 1 >= options.max_epochs
        scores: dict[str, float] = {}
        if is_last or (state.epoch + 1) % options.eval_every == 0:
            scores = self._evaluate()
        self._settle()
        record = {
            "epoch": state.epoch + 1,
            "step": state.global_step,
            "loss": state.loss_sum / max(state.step, 1),
        }
        record |= {"lr": self.tools.set_lr(state.global_step - 1), **scores, "seconds": state.seconds}
        record["train_seconds"] = trained  # of that epoch, evaluation apart
        self.began_s = state.seconds
        state.epoch, state.step, state.loss_sum = state.epoch + 1, 0, 0.0
        if scores:
            self._judge(scores)
        if self.tools.on_epoch(record):
            state.has_stopped = True
        if self.tools.stop() is not None and state.epoch < options.max_epochs and not state.has_stopped:
            self._leave()

    def _evaluate(self) -> dict[str, float]:
        try:
            with self.tools.trace.span("evaluate", step=self.session.state.global_step):
                return self.tools.evaluate()
        except StopAsked:
            self._leave()
            raise AssertionError("unreachable") from None

    def _judge(self, scores: dict[str, float]) -> None:
        """Keep the best weights; count evaluations without a gain. Without validation nodes the newest are the best."""
        state = self.session.state
        val = scores.get("val")
        if val is None:
            state.best_test, state.best_epoch, state.best_step = (
                scores.get("test"),
                state.epoch,
                state.global_step,
            )
            return
        if not math.isnan(val) and (state.best_val is None or val > state.best_val):
            state.best_val, state.best_test, state.since_best = val, scores.get("test"), 0
            state.best_epoch, state.best_step = state.epoch, state.global_step
            self.session.keep_best()
            return
        state.since_best += 1
        if self.options.patience is not None and state.since_best >= self.options.patience:
            state.has_stopped = True

    def _is_checkpoint_due(self) -> bool:
        every = self.options.checkpoint_every
        if every is None and hasattr(self.session.step, "gather_state"):
            every = _CHECKPOINT_STEPS  # all ranks save together, and their clocks differ
        if every is not None:
            return self.session.state.global_step % every == 0
        return time.perf_counter() - self.saved_at >= _CHECKPOINT_EVERY_S

    def _save(self) -> str | None:
        self._settle()
        with self.tools.trace.span("checkpoint", step=self.session.state.global_step):
            where = self.tools.save()
        self.saved_at = time.perf_counter()
        return where

    def _leave(self) -> None:
        """Save and raise Interrupted."""
        where = self._save()
        at = f"stopped by {self.tools.stop()} after step {self.session.state.global_step}"
        if where is None:
            raise Interrupted(f"{at}; nothing was saved, because the run has no folder (run_dir)")
        raise Interrupted(f"{at}; saved in {where}: continue with resume='auto'")


def _seed_torch(key: Key, device: torch.device) -> None:
    """Make what modules draw from torch's own generators a function of the step.

    torch.manual_seed would also format a stack trace per call where CUDA is not in use: a millisecond.
    """
    seed = key.at(Purpose.DROPOUT, site=-1) >> 1
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def _closable(batches: Iterator[Any]) -> Any:
    """The iterator, with a ``close`` even if it has none."""
    return batches if hasattr(batches, "close") else (batch for batch in batches)
