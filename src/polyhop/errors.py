"""Every way polyhop can fail.

PolyhopError
├── InputError (also ValueError)      what the user gave is wrong; the message says what to do
│   ├── GraphError                    ids, shapes, dtypes, splits, edges
│   ├── DatasetError                  a name, file or object that cannot become a graph
│   ├── PartitionError                parts that contradict the graph, the ranks or each other; a damaged partition folder
│   └── ConfigError                   an option or a combination of options
├── UnsupportedError                  a valid request that this layer, strategy or machine cannot serve
├── KernelError                       the native library is missing, mismatched or refused its arguments
├── LaunchError                       ranks that cannot be started or cannot meet
├── PeerError                         another rank was lost, or failed
├── CheckpointError                   a checkpoint that cannot be written or read
├── DivergedError                     the loss or the weights stopped being finite
└── Interrupted                       training was asked to stop (SIGTERM); the state was saved
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DatasetError",
    "DivergedError",
    "GraphError",
    "InputError",
    "Interrupted",
    "KernelError",
    "LaunchError",
    "PartitionError",
    "PeerError",
    "PolyhopError",
    "UnsupportedError",
    "unknown",
]


class PolyhopError(Exception):
    """Root of all errors raised on purpose."""


class InputError(PolyhopError, ValueError):
    """Something the user gave is wrong."""


class GraphError(InputError):
    """A graph whose arrays contradict each other."""


class DatasetError(InputError):
    """A name, file or object that cannot become a graph."""


class PartitionError(InputError):
    """Parts that contradict the graph, the ranks or each other, or a partition folder that is damaged."""


class ConfigError(InputError):
    """An option, or a combination of options, that cannot be obeyed."""


class UnsupportedError(PolyhopError):
    """A valid request that this layer, strategy or machine cannot serve."""


class KernelError(PolyhopError):
    """The native library is missing, mismatched, or refused its arguments."""


class LaunchError(PolyhopError):
    """Ranks that cannot be started, or cannot meet: a wrong address, a busy port, a rank that never came."""


class PeerError(PolyhopError):
    """Another rank was lost or failed, so this one cannot go on."""


class CheckpointError(PolyhopError):
    """A checkpoint that cannot be written or read."""


class DivergedError(PolyhopError):
    """The loss or the weights stopped being finite numbers."""


class Interrupted(PolyhopError):  # noqa: N818 (a request obeyed, not a fault)
    """Training was asked to stop; its state was saved."""


def unknown(what: str, given: str, known: Iterable[str]) -> str:
    """Message for an unknown name: what was given, the nearest known name, all of them."""
    names = sorted(known)
    near = get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}.{hint} Known: {', '.join(names) or 'none'}."
