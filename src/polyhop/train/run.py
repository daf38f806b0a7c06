"""Run: a training session tied to its folder, so that it can be stopped, continued and read afterwards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from polyhop.errors import CheckpointError, DivergedError
from polyhop.train import checkpoint, fingerprint
from polyhop.train.config import Config
from polyhop.train.folder import RunFolder
from polyhop.train.state import Result, Session, State

__all__ = ["Run"]


class Run:
    """A session tied to its folder: resume, record, save, finish. Without a folder only the history is kept.

    ``about``: what config.json tells people beside the options.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        folder: RunFolder | None,
        identity: dict[str, Any],
        about: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.session, self.folder, self.identity = config, session, folder, identity
        self._about = about or {}
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._saved: State | None = None  # the state that is safe on disk
        self._store: checkpoint.Checkpoints | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the run is written down; on every rank alike."""
        return self.config.run_dir is not None or self.config.resume is not None

    def resume(self) -> None:
        """Continue from where the options say, and make the folder ready."""
        if self.folder is None:
            return
        self._store = checkpoint.Checkpoints(self.folder.checkpoints, keep=self.config.keep_checkpoints)
        self._store.clean()
        found = self._find()
        if found is not None:
            self._restore(found)
        self.history = self.folder.rewind(self.session.state.global_step)
        self.folder.write_config(
            {
                **self.config.resolved(),
                **self._about,
                "identity": self.identity,
                "torch": str(torch.__version__),
            }
        )

    def _find(self) -> checkpoint.Checkpoint | None:
        assert self._store is not None
        given = self.config.resume
        if given is None:
            return None
        if given == "auto":
            return self._store.newest()
        return checkpoint.find_checkpoint(Path(given))

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        lines = fingerprint.differences(found.record["identity"], self.identity)
        if lines:
            listed = "".join(f"\n  {line}" for line in lines[:8])
            raise CheckpointError(
                f"{found.path} was made by another run, so it cannot be continued:{listed}\n"
                "Give the same model, graph and options, or start afresh in another run_dir"
            )
        if found.record["threads"] != torch.get_num_threads():
            warnings.warn(
                f"the run used {found.record['threads']} threads, this one {torch.get_num_threads()}: "
                "sums may round differently, so the weights may not be bit-identical",
                RuntimeWarning,
                stacklevel=4,
            )
        self.session.restore(found.tensors, State.from_json(found.record["state"]))
        state = self.session.state
        self._saved = State.from_json(found.record["state"])
        self.notes.append(f"continued from {found.path} (epoch {state.epoch + 1}, step {state.global_step})")

    def record(self, record: dict[str, Any]) -> None:
        self.history.append(record)
        if self.folder is not None:
            self.folder.append_metrics(record)

    def save(self) -> str | None:
        """Write a checkpoint of the present state, unless there is no folder or the state is already on disk."""
        session = self.session
        if hasattr(session.step, "gather_state") and self.is_kept:
            session.step.gather_state()  # with the other ranks, which have nothing to write
        if self._store is None:
            self._saved = State.from_json(session.state.to_json())
            return None
        if (broken := session.first_not_finite()) is not None:
            raise DivergedError(
                f"weight {broken} is not finite after step {session.state.global_step}: not saved; "
                "try a smaller lr or clip=1.0"
            )
        state = session.state.to_json()
        record = {"state": state, "identity": self.identity, "threads": torch.get_num_threads()}
        is_best = session.state.best_step == session.state.global_step
        where = self._store.save(session.state.global_step, session.tensors(), record, is_best=is_best)
        self._saved = State.from_json(state)
        return str(where)

    def finish(self, metric: str, summary: dict[str, Any] | None = None) -> Result:
        """The last checkpoint, the best weights, the result; ``summary``: what the strategy adds to it."""
        state = self.session.state
        if self._saved != state or hasattr(self.session.step, "gather_state"):
            self.save()
        self.session.restore_best()
        result = Result(
            metric=metric,
            best_val=state.best_val,
            test=state.best_test,
            best_epoch=state.best_epoch,
            epochs=state.epoch,
            steps=state.global_step,
            seconds=state.seconds,
            is_early_stopped=state.has_stopped,
            run_dir=None if self.folder is None else str(self.folder.path),
            history=self.history,
            summary=summary or {},
        )
        if self.folder is not None:
            self.folder.write_model(self.session.model.state_dict())
            self.folder.write_result(result.to_json())
        return result
