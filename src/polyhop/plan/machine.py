"""What one host can do in a second: measured once, kept in a file of the user's cache, and read by whoever foresees times.

Rates are of one core while the other cores are busy too, which is how ranks meet them. Laws of computing (``law``) are kept
by the kind of model that they were measured on. ``past``: how many times as long as foreseen epochs of each strategy took
(``learn``).
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError
from polyhop.plan.files import replaced_whole
from polyhop.plan.law import Law

__all__ = [
    "ANY_MODEL",
    "Link",
    "Machine",
    "cache_folder",
    "host_name",
    "load_machine",
    "machine_file",
    "save_machine",
    "signature_of_host",
]

ANY_MODEL = "any model"  # a law for all that were not timed, of machines that are not at hand

_FILE = "machine.json"
_VERSION = 2


@dataclass(frozen=True)
class Link:
    """Between ranks, all of which send and receive at once."""

    bytes_per_s: float  # that a rank sends, and receives
    latency_s: float  # of a round of messages between all ranks


@dataclass(frozen=True)
class Machine:
    """One host."""

    name: str
    cores: int
    memory_bytes: float
    cache_bytes: float  # the largest that cores share
    gather_bytes_per_s: float  # input rows read at random and put together
    stream_bytes_per_s: float  # rows copied in order
    node_s: float  # to sample: of a node that is asked for, looked up, renumbered
    edge_s: float  # of a drawn edge
    message_s: float  # processor time of a message, both ends
    byte_s: float  # of a byte, both ends
    quantise_s: float  # of a value that is rounded to few bits, and of one that is restored
    process_bytes: float  # of a rank before it holds anything
    disk_bytes_per_s: float
    thread_gain: float  # speed of all cores in one process over one of them
    link: Link  # between ranks of this host
    laws: Mapping[str, Law] = field(default_factory=dict)
    past: Mapping[str, Sequence[float]] = field(default_factory=dict)
    gpus: int = 0
    gpu_memory_bytes: float = 0.0
    source: str = ""  # when and by what it was measured

    def with_law(self, kind: str, law: Law) -> Machine:
        return replace(self, laws={**self.laws, kind: law})

    def to_json(self) -> dict[str, Any]:
        laws = {kind: law.to_json() for kind, law in self.laws.items()}
        return asdict(self) | {"laws": laws}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Machine:
        laws = {kind: Law.from_json(law) for kind, law in given["laws"].items()}
        link = Link(given["link"]["bytes_per_s"], given["link"]["latency_s"])
        return cls(**{**given, "link": link, "laws": laws})


def cache_folder() -> Path:
    """``$POLYHOP_CACHE``, or ``polyhop`` in the user's cache."""
    given = os.environ.get("POLYHOP_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyhop"


def machine_file() -> Path:
    return cache_folder() / _FILE


def signature_of_host() -> dict[str, Any]:
    """What must be the same for figures to hold: another processor, torch or set of kernels is measured anew."""
    import torch

    from polyhop.kernels import native

    status = native.status()
    return {
        "host": _host(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "kernels": status["cpu"],
        "version": _VERSION,
    }


def host_name() -> str:
    """For people; with the processor, since images of hosts share their names."""
    processor = _processor()
    return f"{platform.node()} ({processor})" if processor else platform.node()


def _host() -> str:
    """The same whatever name a container or a network namespace gives it."""
    try:
        return Path("/etc/machine-id").read_text().strip() or platform.node()
    except OSError:
        return platform.node()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def load_machine(path: Path | None = None) -> Machine | None:
    """What was measured on this host; None where nothing was, or where it was another host.

    A file that is given and cannot be used is a ConfigError; the one of the cache is then as good as absent.
    """
    file = path or machine_file()
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        found = Machine.from_json(about["machine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if path is None:
            return None
        raise ConfigError(f"{file}: not a file of 'polyhop env --calibrate': {error}") from error
    return found if path is not None or about.get("measured_on") == signature_of_host() else None


def save_machine(machine: Machine, path: Path | None = None) -> Path:
    """Written whole or not at all."""
    file = path or machine_file()
    text = json.dumps({"measured_on": signature_of_host(), "machine": machine.to_json()}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced_whole(file) as beside:
            beside.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror or error}); set POLYHOP_CACHE"
        ) from error
    return file
