"""What a run was made from: graph and model as plain values, in ``command.json``, so that ``predict`` can rebuild both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.errors import ConfigError, InputError, unknown

if TYPE_CHECKING:
    from torch import nn

    from polyhop.graph import Graph, SharedGraph

__all__ = ["MODELS", "Recipe"]

_FILE = "command.json"
_BASIC = ("norm", "jk")

# Name on the command line -> (class in polyhop.nn, arguments it takes besides widths, layers and dropout)
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "deepgcn": ("DeepGCN", ("norm",)),
    "gat": ("GAT", ("heads", *_BASIC)),
    "gcn": ("GCN", _BASIC),
    "gcnii": ("GCNII", ()),
    "gin": ("GIN", _BASIC),
    "sage": ("GraphSAGE", _BASIC),
}


@dataclass(frozen=True)
class Recipe:
    """A graph to load and a model to build for it."""

    source: str  # what polyhop.load takes: a name, a path, synth:...
    data_dir: str | None = None
    nodes: str | None = None  # the node table of a file of edges
    split: int | str = 0
    model: str = "sage"
    hidden: int = 256
    layers: int = 2
    dropout: float = 0.5
    more: dict[str, Any] = field(default_factory=dict)  # heads, norm, jk
    num_features: int = 0  # of the graph it was trained on; 0 = not loaded yet
    num_classes: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(unknown("model", self.model, MODELS))
        taken = MODELS[self.model][1]
        for name in self.more:
            if name not in taken:
                fit = [model for model, (_, known) in MODELS.items() if name in known]
                raise ConfigError(
                    f"--{name} is not an option of --model {self.model}; it is one of {', '.join(fit)}"
                )

    def load(self, source: str | None = None) -> Graph:
        """The graph; or another one, read in the same way."""
        from polyhop.datasets import load

        nodes = self.nodes if source is None else None
        return load(source or self.source, data_dir=self.data_dir, nodes=nodes, split=self.split)

    def fitted(self, graph: Graph | SharedGraph) -> Recipe:
        """This recipe with the widths of the graph to train on."""
        return self.of_widths(graph.num_features, graph.num_classes, graph.name)

    def of_widths(self, num_features: int, num_classes: int, name: str) -> Recipe:
        """The same of a graph that need not be loaded."""
        if num_features == 0 or num_classes == 0:
            raise InputError(
                f"graph {name!r} has {num_features} features and {num_classes} classes: "
                "training needs both (see 'polyhop data')"
            )
        return replace(self, num_features=num_features, num_classes=num_classes)

    def build(self, seed: int = 0) -> nn.Module:
        """The model for a graph that it was fitted to, its weights drawn from the seed."""
        import torch

        from polyhop import nn

        more = dict(self.more)
        if more.get("norm") == "layer" and "jk" in MODELS[self.model][1]:
            more["norm_kwargs"] = {
                "mode": "node"
            }  # PyG's default looks at all rows together, which blocks do not allow
        torch.manual_seed(seed)
        made: nn.Model = getattr(nn, MODELS[self.model][0])(
            self.num_features,
            self.hidden,
            num_layers=self.layers,
            out_channels=self.num_classes,
            dropout=self.dropout,
            **more,
        )
        return made

    @contextmanager
    def kept_in(self, run_dir: Path) -> Iterator[None]:
        """Write it into the run folder before training, so that a killed run has it too; a continued run keeps its own.

        If training does not get as far as starting a run, the folder is left as it was found.
        """
        if (run_dir / "config.json").exists():
            yield
            return
        from polyhop.train.files import replace_file

        made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run folder {run_dir} cannot be made: {error.strerror or error}") from error
        before = set(run_dir.iterdir())
        try:
            replace_file(run_dir / _FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())
            yield
        except BaseException:
            if not (run_dir / "config.json").exists():
                (run_dir / _FILE).unlink(missing_ok=True)
                _remove_beginnings(run_dir, before, made)
            raise

    @classmethod
    def read(cls, run_dir: Path) -> Recipe:
        """The recipe of a run folder."""
        path = run_dir / _FILE
        if not path.is_file():
            raise InputError(
                f"{run_dir} is not a run of 'polyhop train': it has no {_FILE}. "
                "For a run made in Python, build the model there and call Trainer.predict"
            )
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} is damaged: {error}") from error


def _remove_beginnings(run_dir: Path, before: set[Path], made: list[Path]) -> None:
    """Remove what a run leaves that ended before it began, then the folders ``made`` for it that are empty.

    What was there ``before`` stays.
    """
    for path in {run_dir / ".lock", run_dir / "metrics.jsonl", *run_dir.glob("trace-rank*.jsonl")} - before:
        path.unlink(missing_ok=True)
    with suppress(OSError):
        (run_dir / "checkpoints").rmdir()
    with suppress(OSError):
        for path in made:
            path.rmdir()
