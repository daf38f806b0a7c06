"""Every option of a run, checked before anything starts. ``Trainer`` is this record with three verbs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError, unknown

__all__ = ["Config", "parse_bytes"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "cosine", "linear", "step"),
    "precision": ("32-true", "64-true", "bf16-mixed"),
    "sampler": ("uniform", "labor"),
    "metric": ("accuracy", "f1_micro", "roc_auc"),
    "feature_dtype": ("auto", "float32", "bfloat16", "int8"),
    "feature_store": ("auto", "memory", "mapped", "disk"),
    "halo": ("exact", "stale", "sampled", "skipping", "sequential"),
    "chunk_order": ("shuffled", "paired", "fixed"),
    "layer_costs": ("auto", "counted", "measured"),
    "shared_rows": ("auto", "send", "recompute"),
    "progress": ("auto", "rich", "plain", "json", "none"),
}
_BITS = ("1", "2", "4", "8", "16", "32", "adaptive", "delta", "random")
_FREE_ON_RESUME = {
    *("max_epochs", "device", "run_dir", "resume", "checkpoint_every", "keep_checkpoints", "progress"),
    *(
        "callbacks",
        "num_workers",
        "prefetch",
        "memory",
        "spill_dir",
        "cache",
        "cache_ranks",
        "device_cache",
        "functions",
        "function_launcher",
        "function_command",
        "function_host",
        "function_name",
        "function_endpoint",
        "function_region",
        "function_memory",
        "prices",
        "server_kind",
        "per_minibatch_rpc",
        "delta",
    ),
    *("feature_store", "overlap", "recompute", "split_groups", "layer_costs"),
}
_ENDING_SCHEDULES = ("cosine", "linear")  # their course depends on max_epochs
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


Callback = Callable[[dict[str, Any]], bool | None]
"""Called with each epoch's record; True = stop training."""


@dataclass(frozen=True)
class Config:
    """Options of training, evaluation and the run folder. Impossible values and combinations raise ConfigError."""

    strategy: str = "single"  # or "auto": the one that is expected to be fastest here
    _: KW_ONLY
    max_epochs: int = 100
    optimizer: str | Callable[[Any], Any] = "adam"  # adam | adamw | sgd | model -> torch optimiser
    lr: float = 0.01
    weight_decay: float = 0.0
    momentum: float = 0.0  # sgd only
    schedule: str | None = None  # constant | cosine | linear | step
    warmup: int = 0  # steps of linear rise before the schedule's course
    decay_every: int | None = None  # epochs between drops of schedule="step"
    decay: float = 0.1  # factor of each drop
    clip: float | None = None  # largest norm of the whole gradient
    precision: str = "32-true"  # 32-true | 64-true | bf16-mixed
    num_neighbors: Sequence[int] | None = None  # from the seeds outward, -1 = all; None = full graph
    batch_size: int | None = None  # seeds per mini-batch; None = 1024
    sampler: str = "uniform"  # uniform | labor
    labor_dependence: int = (
        1  # steps over which LABOR's draws turn from one to the next, up to 64; 1 = each draws anew
    )
    num_workers: int = 1  # threads that sample and gather ahead
    prefetch: int = 2  # mini-batches held ready
    eval_every: int = 1  # epochs between evaluations; the last epoch is always evaluated
    patience: int | None = None  # evaluations without a better validation metric before stopping
    metric: str | None = None  # accuracy | roc_auc | f1_micro; None = the graph's own
    feature_dtype: str = "auto"  # of rows sent between ranks: auto (as stored) | float32 | bfloat16 | int8
    feature_store: str = "auto"  # of input rows: auto (as opened) | memory | mapped | disk
    cache: int | str | None = None  # bytes of other ranks' rows that each rank keeps; None = none
    cache_ranks: int = (
        1  # of strategy "data": neighbouring ranks that share one cache, its rows striped over them
    )
    device_cache: int | str | None = (
        None  # bytes of own rows kept where computing is: by each rank of strategy "split" (None = none), or by "single" on
        # a device, which then draws mini-batches, too (None = as fits half of its free memory, 0 = the CPU draws them)
    )
    per_minibatch_rpc: bool = False  # the DistDGL-like baseline of strategy "data"
    aggregate_inputs: bool = (
        False  # the first layer's sums over all neighbours, stored once: the last fan-out is not used
    )
    macro: int | str = (
        "auto"  # mini-batches of a window of strategy "macro"; "auto" = chosen from what is measured
    )
    delta: bool = True  # windows keep rows for later ones
    share_variates: bool = (
        False  # LABOR with the same variates all over a window: fewer rows, dependent steps
    )
    bits: int | str = (
        32  # of a value between layers: 1 | 2 | 4 | 8 | 16 | 32, in strategy "halo" also adaptive | delta | random
    )
    split_depth: int | str | None = (
        None  # layers that strategy "split" splits, from the inputs; None = all; "auto" = the fastest
    )
    split_sums: bool = False  # strategy "split" sends sums of rows where they are fewer bytes than the rows
    split_groups: int = (
        1  # groups of ranks (hosts) that strategy "split" gives a slice of every mini-batch each
    )
    bits_lambda: float = 0.5  # of adaptive bits: 0 only time counts, 1 only variance
    bits_group: int = 100  # messages that share a width
    bits_period: int = 50  # epochs between choices of widths
    halo: str = "exact"  # rows of other parts: exact | stale | sampled | skipping | sequential
    halo_smoothing: float = 0.0  # of a stale halo: weight of what was there before
    halo_share: float = 0.1  # of a sampled halo: rows that cross
    halo_drift: float = 0.05  # of a skipping halo: relative change up to which rows are not sent again
    halo_age: int = 10  # of a skipping halo: steps after which they are in any case
    naive_halo: bool = (
        False  # the baseline of strategy "halo": everything crosses, unmapped, nothing overlaps
    )
    link_costs: str | Path | None = (
        None  # of adaptive bits: file of what messages cost; read, or measured and written
    )
    halo_sums: bool = True  # sums of rows cross where that makes fewer messages than the rows
    overlap: bool = True  # strategy "halo" computes while rows are on their way
    recompute: bool = False  # "halo" and "pipeline" compute layers again in the backward pass, for memory
    stages: int | None = (
        None  # of layers in strategy "pipeline"; None = one for each rank; fewer: ranks of a stage share the graph
    )
    chunks: int | None = None  # pieces of the graph in strategy "pipeline"; None = 4 for each rank
    chunk_order: str = "shuffled"  # of an epoch: shuffled | paired (each drawn order and its reverse) | fixed
    history_period: int = 1  # epochs between refreshes of what chunks read of those after them
    history_gamma: float = 1.0  # factor of gradients between chunks: 1 | 2
    layer_costs: str = (
        "auto"  # by which stages of strategy "pipeline" are balanced: counted | measured | auto
    )
    shared_rows: str = (
        "auto"  # what a model gives to all layers (GCNII's h0), in strategy "pipeline": send | recompute
    )
    history_gradients: bool = False  # of the epoch before, where the order of chunks cuts off this one's
    history_sweeps: int | str = (
        "auto"  # forward passes before an epoch, each of which makes one more layer of history exact
    )
    history_bound: float | None = None  # relative error of history above which chunks go together; None = any
    functions: int | str = (
        2  # of each graph server of strategy "serverless"; "auto" = as many as are worth most, as it goes
    )
    intervals: int = 16  # into which each graph server cuts its part
    staleness: int | None = (
        None  # epochs that an interval may be ahead of the last; None = it waits for what it reads
    )
    pipe_epochs: int | None = (
        None  # the first and the last that are exact, whatever the staleness; None = a fifth
    )
    weight_steps: int = 1  # an epoch of strategy "serverless"; more: without waiting for all intervals
    function_launcher: str = "local"  # of those functions: local | command | aws | ray
    function_command: str | None = None  # that runs a function: ssh, srun, docker run -i, ip netns exec
    function_host: str | None = None  # address of this host at which functions and other ranks reach it
    function_name: str | None = None  # of AWS Lambda: name or ARN
    function_endpoint: str | None = None  # of AWS Lambda; None = the region's
    function_region: str | None = None  # of AWS Lambda; None = as boto3 finds it
    function_memory: int | None = None  # MB; None = as it was made on AWS, else as orders say
    prices: str | Path | None = (
        None  # table by which strategy "serverless" bills a run; None = the one that ships
    )
    server_kind: str | None = None  # of those prices, as which each of its ranks is billed
    fuse_loss: bool = True  # the last dense piece and its gradient are one task of a function
    rematerialise: bool = (
        True  # functions compute again for gradients what they computed before, instead of having it sent
    )
    extrapolate: bool | None = (
        None  # old rows, gradients and weights go on as they last changed; None: where staleness >= 1
    )
    allow_approximate: bool = (
        False  # strategy "auto" may choose ways whose weights are not those of one process
    )
    foresee: bool = (
        True  # a run with a folder whose strategy is given keeps a plan all the same, to compare it with
    )
    edge_functions: bool = (
        False  # functions compute attention weights too (GAT): many more bytes, less work for servers
    )
    stream: bool = True  # functions compute the first rows of a large task while the others are on their way
    exact_layers: bool = False  # all chunks through a layer before any goes on: no history, stages wait
    seed: int = 0
    device: str = "auto"
    run_dir: str | Path | None = None  # None = write nothing; "auto" = runs/<date>-<graph>-<model>
    resume: str | Path | None = None  # None | "auto" | a run folder or checkpoint folder
    checkpoint_every: int | None = None  # steps; None = about once a minute; always at the end and on SIGTERM
    keep_checkpoints: int = 2  # newest ones kept, besides the best
    progress: str = "auto"  # auto | rich | plain | json | none
    memory: int | str | None = (
        None  # bytes of working memory of evaluation, prediction and windows; None = 2GiB
    )
    spill_dir: str | Path | None = None  # folder for hidden rows (memory-mapped) beyond `memory`
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            given = getattr(self, name)
            if given is None or (name == "optimizer" and callable(given)):
                continue
            if given not in known:
                raise ConfigError(unknown(name, str(given), known))
        self._check_numbers()
        self._check_combinations()
        if self.num_neighbors is not None:
            object.__setattr__(self, "num_neighbors", _fan_outs(self.num_neighbors))
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", 1024)

    def _check_numbers(self) -> None:
        at_least_one = ("eval_every", "keep_checkpoints", "prefetch", "batch_size", "patience")
        others = (
            "decay_every",
            "checkpoint_every",
            "split_groups",
            "stages",
            "chunks",
            "history_period",
            "intervals",
            "weight_steps",
        )
        for name in (*at_least_one, *others):
            _require(self, name, int, lambda v: v >= 1, "a whole number of at least 1")
        _require(self, "labor_dependence", int, lambda v: 1 <= v <= 64, "a whole number in 1 .. 64")
        for name in ("max_epochs", "warmup", "num_workers", "staleness", "pipe_epochs"):
            _require(self, name, int, lambda v: v >= 0, "a whole number of at least 0")
        _require(self, "seed", int, lambda v: 0 <= v < 2**63, "a whole number from 0 to 2^63 - 1")
        for name in ("lr", "clip"):
            _require(self, name, float, lambda v: 0 < v < float("inf"), "a positive number")
        for name in ("weight_decay", "momentum"):
            _require(self, name, float, lambda v: 0 <= v < float("inf"), "a number of at least 0")
        _require(self, "decay", float, lambda v: 0 < v <= 1, "a number in (0, 1]")
        for name in ("bits_group", "halo_age"):
            _require(self, name, int, lambda v: v >= 1, "a whole number of at least 1")
        _require(self, "bits_period", int, lambda v: v >= 2, "a whole number of at least 2")
        for name in ("bits_lambda", "halo_share"):
            _require(self, name, float, lambda v: 0 <= v <= 1, "a number in 0 .. 1")
        _require(self, "halo_smoothing", float, lambda v: 0 <= v < 1, "a number in 0 .. 1, less than 1")
        _require(self, "halo_drift", float, lambda v: 0 <= v < float("inf"), "a number of at least 0")
        _require(self, "history_gamma", float, lambda v: v in (1, 2), "1 or 2")
        _require(self, "history_bound", float, lambda v: 0 <= v < float("inf"), "a number of at least 0")
        if str(self.bits) not in _BITS:
            raise ConfigError(unknown("bits", str(self.bits), _BITS))
        if self.macro != "auto":
            _require(self, "macro", int, lambda v: v >= 1, "a whole number of at least 1, or 'auto'")
        if self.functions != "auto":
            _require(self, "functions", int, lambda v: v >= 1, "a whole number of at least 1, or 'auto'")
        if self.split_depth != "auto":
            _require(self, "split_depth", int, lambda v: v >= 1, "a whole number of at least 1, or 'auto'")
        if self.history_sweeps != "auto":
            _require(self, "history_sweeps", int, lambda v: v >= 0, "a whole number of at least 0, or 'auto'")
        if self.memory is not None:
            parse_bytes(self.memory)
        for name in ("cache", "device_cache"):
            self._budget(name)

    def _check_combinations(self) -> None:
        if self.labor_dependence > 1 and self.sampler != "labor":
            raise ConfigError(
                f"labor_dependence={self.labor_dependence} (--batch-dependence) turns the draws of LABOR from step to step: "
                f"give sampler='labor', this is {self.sampler!r}"
            )
        if self.aggregate_inputs and self.num_neighbors is None:
            raise ConfigError(
                "aggregate_inputs saves the innermost hop of sampling, and training on the full graph samples none: give "
                "one fan-out per layer, such as num_neighbors=[15, 10] (--fanout 15,10)"
            )
        if self.split_groups > 1 and self.strategy not in ("split", "auto"):
            raise ConfigError(
                f"split_groups={self.split_groups} with strategy {self.strategy!r}: groups split slices of a mini-batch, "
                "which strategy 'split' alone does: give --strategy split, or leave split_groups out"
            )
        if self.history_gradients and self.history_gamma != 1:
            raise ConfigError(
                f"history_gradients with history_gamma={self.history_gamma:g}: both make up for gradients that the order of "
                "chunks cuts off, the one by those of the epoch before, the other by counting the rest twice: give one"
            )
        if self.history_sweeps not in (0, "auto") and self.history_period > 1:
            raise ConfigError(
                f"history_sweeps={self.history_sweeps} with history_period={self.history_period}: sweeps make history anew "
                "before every epoch, a period keeps it for several: give one"
            )
        if self.stages is not None and self.strategy not in ("pipeline", "auto"):
            raise ConfigError(
                f"stages={self.stages} with strategy {self.strategy!r}: strategy 'pipeline' alone has stages of layers: "
                "give --strategy pipeline, or leave stages out"
            )
        if self.device_cache_bytes and self.strategy not in ("split", "single", "auto"):
            raise ConfigError(
                f"device_cache={self.device_cache} with strategy {self.strategy!r}: ranks load their own rows alone in "
                "strategy 'split': give --strategy split, or leave device_cache out (cache keeps rows of other ranks)"
            )
        if self.schedule == "step" and self.decay_every is None:
            raise ConfigError("schedule='step' needs decay_every=EPOCHS, the number of epochs between drops")
        if self.resume == "auto" and self.run_dir is None:
            raise ConfigError("resume='auto' needs run_dir=FOLDER, the run to continue")
        if self.resume == "auto" and self.run_dir == "auto":
            raise ConfigError("resume='auto' needs the run's own folder: run_dir='auto' would make a new one")
        if self.momentum and self.optimizer != "sgd":
            warnings.warn("momentum is for optimizer='sgd' only: ignored", UserWarning, stacklevel=4)
        if self.batch_size is not None and self.num_neighbors is None:
            warnings.warn(
                "batch_size is ignored: training is on the full graph, because num_neighbors is not given "
                "(for mini-batches give one fan-out per layer, such as num_neighbors=[15, 10])",
                UserWarning,
                stacklevel=4,
            )
        if self.cache_bytes and self.num_neighbors is None:
            warnings.warn(
                f"cache={self.cache} is ignored: on the full graph every rank holds the input rows that it reads from the "
                "start (for mini-batches give one fan-out per layer, such as num_neighbors=[15, 10])",
                UserWarning,
                stacklevel=4,
            )

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def cache_bytes(self) -> int:
        return self._budget("cache")

    @property
    def device_cache_bytes(self) -> int:
        return self._budget("device_cache")

    @property
    def device_room(self) -> int | None:
        """Bytes of a device that draws mini-batches for input rows; None = as it fits, 0 = the CPU draws them."""
        return None if self.device_cache is None else self.device_cache_bytes

    def _budget(self, name: str) -> int:
        """Bytes of a cache, which may be none."""
        given = getattr(self, name)
        return 0 if given is None or str(given) == "0" else parse_bytes(given, name)

    def resolved(self) -> dict[str, Any]:
        """Every option as JSON values, for config.json."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "callbacks"}

    def fingerprint(self) -> dict[str, Any]:
        """The options that decide the weights: a continuation must agree in all of them."""
        free = _FREE_ON_RESUME - ({"max_epochs"} if self.schedule in _ENDING_SCHEDULES else set())
        free = free if self.share_variates else free | {"macro"}
        return {name: value for name, value in self.resolved().items() if name not in free}


def _require(config: Config, name: str, kind: type, is_good: Callable[[Any], bool], expected: str) -> None:
    value = getattr(config, name)
    if value is None:
        return
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not is_good(value):
        raise ConfigError(f"{name}={value!r}: expected {expected}")


def _fan_outs(given: Sequence[int]) -> tuple[int, ...]:
    fan_outs = tuple(given)
    if not fan_outs or not all(type(f) is int and (f >= 1 or f == -1) for f in fan_outs):
        raise ConfigError(
            f"num_neighbors={list(given)}: expected one fan-out of at least 1, or -1 for all, per layer"
        )
    return fan_outs


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    if callable(value):
        return (
            f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
    return value


def parse_bytes(given: int | str, name: str = "memory") -> int:
    """Bytes of 2_000_000, "500MB", "2GiB" or "1.5 G"."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(given), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{name}={given!r}: expected bytes, as a number or such as '500MB' or '2GiB'")
    unit = match[2].upper()
    scale = _BINARY_UNITS[unit] if match[3] and unit else _UNITS[unit]
    return round(float(match[1]) * scale)
