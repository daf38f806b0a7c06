"""polyhop: graph neural networks on graphs that are too large or too slow for one device.

    import polyhop
    graph = polyhop.load("debian-packages")
    model = polyhop.nn.GraphSAGE(graph.num_features, 128, num_layers=2, out_channels=graph.num_classes)
    result = polyhop.Trainer(max_epochs=20).fit(model, graph)

Names are imported when first used: ``import polyhop`` alone loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyhop import errors, launch, nn, partition
    from polyhop.datasets import load
    from polyhop.graph import Block, Graph, Split
    from polyhop.sample import NeighborLoader
    from polyhop.trainer import Result, Trainer

__all__ = [
    "Block",
    "Graph",
    "NeighborLoader",
    "Result",
    "Split",
    "Trainer",
    "__version__",
    "errors",
    "launch",
    "load",
    "nn",
    "partition",
]

__version__ = "0.1.0"

_HOMES = {
    "Block": "polyhop.graph",
    "Graph": "polyhop.graph",
    "NeighborLoader": "polyhop.sample",
    "Result": "polyhop.trainer",
    "Split": "polyhop.graph",
    "Trainer": "polyhop.trainer",
    "load": "polyhop.datasets",
}
_MODULES = ("errors", "launch", "nn", "partition")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"polyhop.{name}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polyhop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
