"""A cluster, whether or not it is there: hosts of one kind, what each can do, what joins them, what they cost.

Read from ``cluster.yaml`` or ``.json``; ``extends: NAME`` starts from a preset (``clusters.json``), and every other field
that is given takes its place. Ranks keep step with the slowest, so hosts are all of one kind: describe the slowest.

Legend: R ranks of a host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError, unknown
from polyhop.plan.machine import ANY_MODEL, Link, Machine, load_machine

__all__ = ["HERE", "PRESETS", "Cluster", "machine_of", "presets", "read_cluster"]

PRESETS = Path(__file__).with_name("clusters.json")
HERE = "here"  # in place of a file of figures: those of this host


@dataclass(frozen=True)
class Cluster:
    """Field by field what a file says; rates are of a whole host where they are of processors, of one GPU where of GPUs."""

    hosts: int = 1
    ranks: int = 0  # of a host; 0: one for each GPU, else one for each core
    cores: int = 1  # of a host, those of hyperthreads not counted
    memory_gb: float = 16.0
    cpu_tflops: float = 0.1  # float32, all cores
    cpu_memory_gb_s: float = 20.0
    cpu_cache_mb: float = 32.0
    gpus: int = 0
    gpu_tflops: float = 0.0  # float32
    gpu_memory_gb: float = 0.0
    gpu_memory_gb_s: float = 0.0
    gpu_cache_mb: float = 6.0
    pcie_gb_s: float = 12.0  # between a GPU and its host
    inside_gb_s: float = 5.0  # between ranks of a host: what one sends, and receives
    inside_us: float = 50.0  # of a round of messages
    network_gbit_s: float = 10.0  # of a host
    network_us: float = 100.0
    dollars_per_hour: float | None = None  # of a host
    # A file of 'polyhop env --calibrate --out', or "here": instead of rates of processors. Beside GPUs one of 'scripts/bench
    # gpu --only ranks': instead of shares of their rates.
    machine: str | None = None
    name: str = ""
    date: str = ""  # of the price
    source: str = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name))
        if self.gpus:
            _need(self, ("gpu_tflops", "gpu_memory_gb", "gpu_memory_gb_s"))
        if self.gpus and self.ranks not in (0, self.gpus):
            raise ConfigError(
                f"cluster: {self.ranks} ranks on hosts of {self.gpus} GPUs; expected a rank for each GPU: leave out ranks"
            )

    @property
    def ranks_per_host(self) -> int:
        return self.ranks or self.gpus or self.cores

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def inside(self) -> Link:
        """Of a rank to the others of its host."""
        return Link(1e9 * self.inside_gb_s, 1e-6 * self.inside_us)

    @property
    def network(self) -> Link:
        """Of a host: its ranks share it."""
        return Link(1e9 * self.network_gbit_s / 8, 1e-6 * self.network_us)

    @property
    def rank_bytes(self) -> float:
        """Memory of a rank: its GPU's, else its share of the host's."""
        return 1e9 * (self.gpu_memory_gb if self.gpus else self.memory_gb / self.ranks_per_host)

    def hosts_of(self, num_ranks: int) -> int:
        """Hosts that so many ranks fill, the last one perhaps in part."""
        return -(-num_ranks // self.ranks_per_host)

    def dollars(self, num_ranks: int, seconds: float) -> float | None:
        """Of so many ranks' hosts for so long; None: no price was given."""
        if self.dollars_per_hour is None:
            return None
        return self.hosts_of(num_ranks) * self.dollars_per_hour * seconds / 3600

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, given: Mapping[str, Any], where: str = "cluster") -> Cluster:
        """Of the fields of a file. ConfigError says which one is wrong, what it is, and what was expected."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in (*known, "extends"):
                raise ConfigError(f"{where}: {unknown('field', str(name), ('extends', *known))}")
        if isinstance(given.get("hosts"), list | dict):
            raise ConfigError(
                f"{where}: hosts is a list; expected their number. Ranks keep step with the slowest, so hosts are of one "
                "kind here: describe the slowest kind"
            )
        base = {} if "extends" not in given else _preset(given["extends"], where)
        own = {name: _as_text(value) for name, value in given.items() if name != "extends"}
        if own.get("machine") is not None:
            base = {**base, **_figures(machine_of(str(own["machine"]), where), {**base, **own}, where)}
        if not base:
            _all_there(own, where)
        try:
            return cls(**{**base, **own})
        except ConfigError as error:
            raise ConfigError(str(error).replace("cluster:", f"{where}:", 1)) from None

    def of(self, hosts: int) -> Cluster:
        """The same with so many hosts."""
        return replace(self, hosts=hosts)


_TEXTS = ("name", "date", "source", "machine")
_WHOLE = ("hosts", "cores")
_MAY_BE_ZERO = (
    "ranks",
    "gpus",
    "gpu_tflops",
    "gpu_memory_gb",
    "gpu_memory_gb_s",
    "inside_us",
    "network_us",
)
_ENDLESS = 1e300
_ALWAYS = ("cores", "memory_gb", "cpu_tflops", "cpu_memory_gb_s", "network_gbit_s")


def _as_text(value: Any) -> Any:
    """A date, which YAML makes of ``2025-06-01``, as it was written; all else as it is."""
    return value.isoformat() if isinstance(value, date) else value


def _check(name: str, value: Any) -> None:
    if name in _TEXTS or (name == "dollars_per_hour" and value is None):
        if value is not None and not isinstance(value, str | float | int):
            raise ConfigError(f"cluster: {name} is {value!r}; expected text")
        return
    is_whole = name in (*_WHOLE, "ranks", "gpus")
    kinds = int if is_whole else int | float
    least = "0 or more" if name in (*_MAY_BE_ZERO, "dollars_per_hour") else "more than 0"
    what = f"a {'whole number' if is_whole else 'number'}, {least}"
    if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) < _ENDLESS:
        raise ConfigError(f"cluster: {name} is {value!r}; expected {what}")
    if value < 0 or (value == 0 and least == "more than 0"):
        raise ConfigError(f"cluster: {name} is {value!r}; expected {what}")


def _need(made: Cluster, names: tuple[str, ...]) -> None:
    for name in names:
        if not getattr(made, name):
            raise ConfigError(
                f"cluster: hosts with {made.gpus} GPUs and no {name}; give it, or extend a preset"
            )


def _all_there(own: Mapping[str, Any], where: str) -> None:
    missing = [name for name in _ALWAYS if name not in own]
    if missing:
        raise ConfigError(
            f"{where}: no {', '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}, or extends: one of "
            f"{', '.join(presets())}, or machine: figures of 'polyhop env --calibrate --out FILE'"
        )


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Kinds of hosts that are known by name."""
    found: dict[str, dict[str, Any]] = json.loads(PRESETS.read_text(encoding="utf-8"))["presets"]
    return found


def _preset(name: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(name, str):
        raise ConfigError(
            f"{where}: extends is {name!r}; expected the name of a preset: {', '.join(presets())}"
        )
    if name not in presets():
        raise ConfigError(f"{where}: {unknown('preset', str(name), presets())}")
    return {"name": name, **presets()[name]}


def read_cluster(path: Path | str) -> Cluster:
    """Of a file that a user wrote, YAML or JSON; of the name of a preset, one host of it."""
    if str(path) in presets():
        return Cluster.from_json({"extends": str(path)})
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cluster: {file} cannot be read ({getattr(error, 'strerror', None) or error}); expected a file such as "
            f"'extends: p4d.24xlarge' and 'hosts: 16', or a preset: {', '.join(presets())}"
        ) from error
    given = _parsed(text, file)
    if not isinstance(given, dict):
        raise ConfigError(f"cluster: {file} has no fields; expected 'name: value' lines, such as 'hosts: 16'")
    return Cluster.from_json(_beside(given, file), f"cluster: {file}")


def _parsed(text: str, file: Path) -> Any:
    if file.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"cluster: {file} is not JSON ({error})") from error
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of a date that there is not
        raise ConfigError(f"cluster: {file} is not YAML ({' '.join(str(error).split())})") from error


def _beside(given: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """A file of figures is looked for beside the file that names it."""
    machine = given.get("machine")
    if machine is None or machine == HERE:
        return given
    return {**given, "machine": str(file.parent / str(machine))}


def machine_of(name: str, where: str = "cluster") -> Machine:
    """The figures that a cluster names."""
    found = load_machine() if name == HERE else load_machine(Path(name))
    if found is None:
        raise ConfigError(
            f"{where}: machine: here, and this host was not measured: run 'polyhop env --calibrate'"
        )
    return found


def _figures(machine: Machine, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of the hosts; of hosts with GPUs only where figures are from: their sizes and links are the file's."""
    if given.get("gpus"):
        if ANY_MODEL not in machine.laws:
            raise ConfigError(
                f"{where}: machine has figures of processors, and these hosts have GPUs; leave out one of the two, or give "
                "a file of 'scripts/bench gpu --only ranks' (POLYHOP_GPU_RATES=FILE)"
            )
        return {"source": machine.source}
    return {
        "name": machine.name,
        "cores": machine.cores,
        "memory_gb": machine.memory_bytes / 1e9,
        "inside_gb_s": machine.link.bytes_per_s / 1e9,
        "inside_us": 1e6 * machine.link.latency_s,
        "source": machine.source,
    }
