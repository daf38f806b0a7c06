"""A run comes back from its folder as it was left, and only as itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.errors import CheckpointError, DivergedError
from polyhop.train.config import Config
from polyhop.train.folder import RunFolder
from polyhop.train.run import Run
from polyhop.train.state import Session


class Idle:
    """A step that keeps nothing."""

    num_steps = 1

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        assert tensors == {}


def session_of(value: float) -> Session:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.1), Idle())


@contextmanager
def run_in(path: Path, value: float = 1.0, identity: str = "a", **options: Any) -> Iterator[Run]:
    folder = RunFolder(path, may_continue=True)
    try:
        yield Run(Config(run_dir=path, **options), session_of(value), folder, {"model": identity})
    finally:
        folder.close()


def advance(run: Run) -> None:
    """One epoch of one step, whose weights are the best so far."""
    state = run.session.state
    state.epoch, state.global_step = state.epoch + 1, state.global_step + 1
    state.best_val, state.best_step, state.best_epoch = 0.5, state.global_step, state.epoch
    run.session.keep_best()
    run.record({"epoch": state.epoch, "step": state.global_step})


def test_without_a_folder_only_the_history_is_kept() -> None:
    run = Run(Config(), session_of(1.0), None, {})
    run.resume()
    advance(run)
    assert run.save() is None
    result = run.finish("accuracy")
    assert (result.run_dir, result.best_val, result.steps) == (None, 0.5, 1)
    assert result.history == [{"epoch": 1, "step": 1}]


def test_a_saved_run_is_continued(tmp_path: Path) -> None:
    with run_in(tmp_path, 3.0) as run:
        run.resume()
        advance(run)
        where = run.save()
        advance(run)  # after the checkpoint: forgotten
    with run_in(tmp_path, 0.0, resume="auto") as again:
        again.resume()
        assert again.session.state.global_step == 1
        assert again.session.model.weight.tolist() == [[3.0, 3.0]]
        assert again.history == [{"epoch": 1, "step": 1}]
        assert again.notes == [f"continued from {where} (epoch 2, step 1)"]


def test_another_runs_checkpoint_is_refused(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        run.resume()
        advance(run)
        run.save()
    with (
        run_in(tmp_path, identity="b", resume="auto") as other,
        pytest.raises(CheckpointError, match=r"made by another run.*\n  model: "),
    ):
        other.resume()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    with run_in(tmp_path, float("nan")) as run:
        run.resume()
        with pytest.raises(DivergedError, match="weight weight is not finite after step 0: not saved"):
            run.save()


def test_finish_saves_what_is_not_on_disk_and_leaves_the_best_weights(tmp_path: Path) -> None:
    with run_in(tmp_path, 2.0) as run:
        run.resume()
        advance(run)
        run.save()
        saved = sorted((tmp_path / "checkpoints").rglob("*"))
        nn.init.constant_(run.session.model.weight, 9.0)
        result = run.finish("accuracy")
        assert sorted((tmp_path / "checkpoints").rglob("*")) == saved  # the state was there already
        assert run.session.model.weight.tolist() == [[2.0, 2.0]]
    assert json.loads((tmp_path / "result.json").read_text()) == result.to_json()
    with run_in(tmp_path, 0.0, resume="auto") as again:
        again.resume()
        advance(again)
        again.finish("accuracy")
        assert sorted((tmp_path / "checkpoints").rglob("*")) != saved
