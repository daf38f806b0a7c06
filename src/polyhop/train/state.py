"""Where a run stands, and what it came to: the records that loop, checkpoints and trainer share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from polyhop.errors import CheckpointError, ConfigError
from polyhop.strategies import Step

__all__ = ["Result", "Session", "State"]


@dataclass
class State:
    """Everything besides tensors that a continuation needs; the one mutable record of a run.

    ``step == num_steps`` means that an epoch's steps are done but not yet its evaluation.
    """

    epoch: int = 0  # epochs completed, which is also the index of the current one
    step: int = 0  # steps completed in the current epoch
    global_step: int = 0
    loss_sum: float = 0.0  # of the current epoch's steps
    best_val: float | None = None
    best_epoch: int | None = None
    best_step: int | None = None  # global step of the best weights
    best_test: float | None = None
    since_best: int = 0  # evaluations since the best one
    has_stopped: bool = False  # early: no need to go on
    seconds: float = 0.0  # of training and evaluation, over all continuations

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> State:
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in record.items() if name in known})


@dataclass(frozen=True)
class Result:
    """What ``Trainer.fit`` came to. ``best_val`` and ``test`` are of the weights that the model is left with."""

    metric: str  # accuracy | roc_auc | f1_micro
    best_val: float | None  # None: no validation nodes
    test: float | None  # None: no test nodes
    best_epoch: int | None
    epochs: int
    steps: int
    seconds: float
    is_early_stopped: bool
    run_dir: str | None
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)  # as in metrics.jsonl
    summary: dict[str, Any] = field(
        default_factory=dict, repr=False
    )  # what the strategy adds, such as its bill

    def to_json(self) -> dict[str, Any]:
        """All but the history, which metrics.jsonl has, and a summary that is empty."""
        left_out = {"history"} if self.summary else {"history", "summary"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}


class Session:
    """All that changes in a run: weights, optimiser, strategy buffers, best weights, State. Saved and restored as one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step
        self.state = State()
        self.best: dict[str, Tensor] | None = None
        if hasattr(
            step, "attach"
        ):  # its ranks train weights of their own, and bring them together to be saved
            step.attach(optimizer)

    def keep_best(self) -> None:
        """Remember the present weights as the best."""
        if self.best is None:
            self.best = {name: value.detach().clone() for name, value in _weights(self.model).items()}
            return
        for name, value in _weights(self.model).items():
            self.best[name].copy_(value.detach())

    def restore_best(self) -> None:
        """Give the model its best weights back, if any were kept."""
        if self.best is not None:
            self.model.load_state_dict(self.best)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor to save, by file."""
        files = {"model": _weights(self.model), "optimizer": _optimizer_tensors(self.model, self.optimizer)}
        if self.best is not None:
            files["best"] = self.best
        if buffers := self.step.state():
            files["strategy"] = buffers
        return files

    def restore(self, files: dict[str, dict[str, Tensor]], state: State) -> None:
        """Put everything back as it was saved."""
        self.model.load_state_dict(files["model"])
        _restore_optimizer(self.model, self.optimizer, files["optimizer"])
        self.step.restore(files.get("strategy", {}))
        self.state, self.best = state, None
        if "best" in files:
            now = _weights(self.model)
            self.best = {name: value.to(now[name].device) for name, value in files["best"].items()}

    def first_not_finite(self) -> str | None:
        """Name of a weight that is NaN or infinite, None if all are well."""
        for name, value in _weights(self.model).items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                return name
        return None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise CheckpointError(
            f"{type(model).__name__} keeps state that is no tensor and cannot be saved: {', '.join(strange)}"
        )
    return state


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The optimiser's parameters with their names in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = sum(id(p) not in names for p in parameters)
    if strangers:
        raise ConfigError(
            f"the optimiser holds {strangers} parameters that the model does not: they cannot be saved"
        )
    return [(names[id(p)], p) for p in parameters]


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as tensors named ``<parameter>/<slot>``."""
    flat: dict[str, Tensor] = {}
    for name, parameter in _named(model, optimizer):
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor | int | float):
                raise CheckpointError(
                    f"optimiser state {slot!r} of {name} is a {type(value).__name__}: not a tensor or number"
                )
            flat[f"{name}/{slot}"] = (
                value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            )
    return flat


def _restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, flat: dict[str, Tensor]) -> None:
    """Put tensors of ``_optimizer_tensors`` back, in place of whatever state there is."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        name, _, slot = key.rpartition("/")
        by_parameter.setdefault(name, {})[slot] = value
    named = _named(model, optimizer)
    missing = set(by_parameter) - {name for name, _ in named}
    if missing:
        raise CheckpointError(
            f"the checkpoint has optimiser state of unknown parameters: {', '.join(sorted(missing))}"
        )
    order = {name: index for index, (name, _) in enumerate(named)}
    state = {order[name]: slots for name, slots in by_parameter.items()}
    # load_state_dict places each slot as the optimiser wants it (device, and the step count's own format).
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
