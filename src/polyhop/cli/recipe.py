"""What a run was made from: graph and model as plain values, in ``command.json``, so that ``predict`` can rebuild both."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.errors import ConfigError, InputError, unknown

if TYPE_CHECKING:
    from torch import nn

    from polyhop.graph import Graph

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
    split: int | str = 0
    model: str = "sage"
    hidden: int = 256
    layers: int = 2
    dropout: float = 0.5
    more: dict[str, Any] = field(default_factory=dict)  # heads, norm, jk

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

        return load(source or self.source, data_dir=self.data_dir, split=self.split)

    def build(self, graph: Graph, seed: int = 0) -> nn.Module:
        """The model for this graph, its weights drawn from the seed."""
        import torch

        from polyhop import nn

        if graph.num_features == 0 or graph.num_classes == 0:
            raise InputError(
                f"graph {graph.name!r} has {graph.num_features} features and {graph.num_classes} classes: "
                "training needs both (see 'polyhop data')"
            )
        torch.manual_seed(seed)
        made: nn.Model = getattr(nn, MODELS[self.model][0])(
            graph.num_features,
            self.hidden,
            num_layers=self.layers,
            out_channels=graph.num_classes,
            dropout=self.dropout,
            **self.more,
        )
        return made

    def save(self, run_dir: Path) -> None:
        """Write it into a run folder that does not hold one yet."""
        run_dir.mkdir(parents=True, exist_ok=True)
        if not (run_dir / _FILE).exists():
            (run_dir / _FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

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
