"""Section ``codec``: how fast rows are packed and unpacked, what bounds it, and what choosing widths costs and loses.

The assigner is watched in a run of four ranks (threads) on a real or synthetic graph: the very programmes it solves are
timed, and solved again exactly: of the time model "rounds" by the exact sweep, of "slowest", which training uses, by HiGHS,
whose lower bound counts where it does not finish.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.halo.graphs import cut, load_real, make, narrowed
from benchmarks.halo.running import Running
from benchmarks.halo.workload import WARM, Job
from benchmarks.harness import Figure, alternate
from polyhop.comm import Collective, run_in_threads
from polyhop.exchange import assigner, widths
from polyhop.kernels import dequantise_rows, quantise_rows
from polyhop.partition import share

__all__ = ["lower_bound", "run"]

COLUMNS = (64, 128, 256)
NUM_RANKS, PERIOD = 4, 50  # epochs between choices, by default
OFTEN = 5  # epochs between choices here, so that there are several: they begin after epochs 3, 8 and 13
LIMIT_S = 10.0  # of HiGHS, for each programme
SMALL, LARGE = 1 << 20, 32 << 20  # bytes of float32 in the second-level cache, and outside of all


def run(*, is_quick: bool) -> Iterator[Figure]:
    """GB of float32 a second and core for 2, 4, 8 bits; the assigner's share of the time; its distance to the optimum."""
    memory = _copied(repeats=3 if is_quick else 11)
    for bits in (2, 4, 8):
        yield from _rates(bits, memory, repeats=3 if is_quick else 11)
    yield from _chosen(is_quick=is_quick)


# Packing


def _rates(bits: int, memory: float, repeats: int) -> Iterator[Figure]:
    """The slowest of the widths out of the cache; the best repetition, since other work on a core only slows it."""
    packed, raised = {}, {}
    for size in (SMALL, LARGE):
        for columns in COLUMNS:
            packed[size, columns], raised[size, columns] = _rate(bits, columns, size, repeats)
    for name, rates in (("pack", packed), ("unpack", raised)):
        slowest = min(rates[LARGE, columns] for columns in COLUMNS)
        cached = min(rates[SMALL, columns] for columns in COLUMNS)
        moved = slowest * (1 + bits / 32)  # floats one way, codes the other
        bound = "memory" if moved > 0.7 * memory and cached > 1.2 * slowest else "instructions"
        each = ", ".join(f"{c} {rates[LARGE, c]:.2f}" for c in COLUMNS)
        details = (
            f"columns {each}; in the cache, calls not counted, {cached:.2f}; {moved:.2f} GB/s moved, a copy moves "
            f"{memory:.1f}; bound by {bound}"
        )
        yield Figure(f"{name}_gb_per_s_{bits}bit", slowest, "GB/s", details, at_least=2.0)


def _copied(repeats: int) -> float:
    """GB/s read and written by a plain copy outside of the caches, by CPU time as all rates here."""
    source = torch.ones(LARGE)
    target = torch.zeros_like(source)
    found = alternate({"copy": lambda: target.copy_(source)}, repeats=repeats, counts_cpu=True)
    return 2 * 4 * LARGE / min(found["copy"].seconds) / 1e9


def _rate(bits: int, columns: int, size: int, repeats: int) -> tuple[float, float]:
    """GB/s of float32 in, and out, by CPU time of one thread."""
    h = torch.randn(size // 4 // columns, columns)
    each = torch.full((len(h),), bits, dtype=torch.uint8)
    message, out = quantise_rows(h, each, 7), torch.empty_like(h)
    again = max(1, LARGE // size // 4)
    row, one = h[:1], each[:1]
    short, alone = quantise_rows(row, one, 7), out[:1]
    sides = {
        "pack": lambda: [quantise_rows(h, each, 7) for _ in range(again)],
        "unpack": lambda: [dequantise_rows(message, each, columns, out=out) for _ in range(again)],
        "pack call": lambda: [quantise_rows(row, one, 7) for _ in range(1000)],
        "unpack call": lambda: [dequantise_rows(short, one, columns, out=alone) for _ in range(1000)],
    }
    found = {
        name: min(each.seconds) for name, each in alternate(sides, repeats=repeats, counts_cpu=True).items()
    }
    rates = []
    for name in ("pack", "unpack"):
        call = found[f"{name} call"] / 1000 if size == SMALL else 0.0
        rates.append(size / (found[name] / again - call) / 1e9)
    return rates[0], rates[1]


# The assigner


@dataclass
class _Watched:
    """Stands in for ``solve`` and for an assigner's thread: notes what is solved, and the CPU-seconds of each choice."""

    solve: Any
    choose: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    solving_s: float = 0.0
    choices_s: dict[int, float] = field(default_factory=dict)  # of all ranks, by epoch
    solved: dict[tuple[Any, ...], tuple[Sequence[Any], dict[str, Any], float, Any]] = field(
        default_factory=dict
    )
    calls: int = 0

    def solving(self, channels: Sequence[Any], lam: float, **more: Any) -> Any:
        start = time.thread_time()
        found = self.solve(channels, lam, **more)
        with self.lock:
            self.solving_s += time.thread_time() - start
            self.calls += 1
            # Each programme is kept once, whoever solves it.
            name = tuple((c.src, c.dst, c.num_columns, c.beta.size, float(c.beta.sum())) for c in channels)
            self.solved[name] = (channels, more, lam, found)
        return found

    def choosing(self) -> Any:
        """In the place of the method: telling, gathering, solving and telling again."""

        def choose(own: Any, squares: Any, weights: Any, key: Any) -> None:
            start = time.thread_time()
            self.choose(own, squares, weights, key)
            with self.lock:
                self.choices_s[key.epoch] = self.choices_s.get(key.epoch, 0.0) + time.thread_time() - start

        return choose


def _chosen(*, is_quick: bool) -> Iterator[Figure]:
    real = None if is_quick else load_real("amazon-computers")
    graph = make("products", scale=1 / 16) if real is None or isinstance(real, str) else narrowed(real)
    made = cut(graph.name, graph, NUM_RANKS)
    watched = _Watched(widths.solve, assigner.Assigner._choose)
    setattr(assigner, "solve", watched.solving)  # noqa: B010 (it is the assigner's own name for it)
    setattr(assigner.Assigner, "_choose", watched.choosing())  # noqa: B010
    try:
        seconds = run_in_threads(NUM_RANKS, _trained, made)
    finally:
        setattr(assigner, "solve", watched.solve)  # noqa: B010
        setattr(assigner.Assigner, "_choose", watched.choose)  # noqa: B010
    assert watched.calls, "the assigner solves by its own name for widths.solve"
    epoch_s, choice_s = median(seconds[0]), median(watched.choices_s.values())
    num_choices = len(watched.choices_s)
    details = (
        f"a choice takes {1000 * choice_s:.1f} ms of CPU of {NUM_RANKS} ranks (median of {num_choices}; "
        f"{1000 * watched.solving_s / num_choices:.1f} of them its {watched.calls // num_choices} programmes), every "
        f"{PERIOD} epochs of {1000 * epoch_s:.0f} ms of CPU of all ranks; {made}"
    )
    yield Figure("assigner_share", choice_s / (PERIOD * epoch_s), "share", details, at_most=0.01)
    yield from _distances(list(watched.solved.values()))


def _trained(line: Collective, made: Any) -> list[float]:
    """CPU-seconds of all ranks of three epochs; nothing is chosen in the first two."""
    torch.set_num_threads(1)
    job = Job("", "", {}, "gcn", 128)
    options = {"bits": "adaptive", "bits_period": OFTEN}
    side = Running(share(made.graph, made.partition, line.rank), line, job, options)
    for _ in range(WARM):
        side.train()
    found = []
    for _ in range(3):
        line.barrier()
        start = time.process_time()
        side.train()
        line.barrier()
        found.append(time.process_time() - start)
    side.step.close()
    return found


def _distances(solved: Sequence[Any]) -> Iterator[Figure]:
    """What is lost against the best choice: of the model with an exact sweep, and of the one in use against its bound."""
    rounds, slowest = [], []
    for channels, more, lam, (_, found) in solved:
        given = {**more, "model": "rounds"}
        hull, exact = (
            widths.solve(channels, lam, **{**given, "method": m})[1].objective for m in ("hull", "exact")
        )
        rounds.append(hull / exact - 1 if exact > 0 else 0.0)
        bound = lower_bound(channels, lam, more) if more["model"] == "slowest" else None
        if bound is not None:
            slowest.append(found.objective / bound - 1 if bound > 0 else 0.0)
    details = (
        f"{len(solved)} programmes; model rounds, hull against exact sweep: worst {100 * max(rounds):.3f} %"
    )
    if slowest:
        details += f"; model slowest, against HiGHS: worst {100 * max(slowest):.3f} %"
    yield Figure("assigner_vs_exact", max([*rounds, *slowest]), "share", details, at_most=0.01)


def lower_bound(channels: Sequence[Any], lam: float, more: dict[str, Any]) -> float | None:
    """No choice of widths has a smaller objective of model "slowest": by HiGHS, the optimum where it gets there in time.

    None where there is no scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix
    except ImportError:
        return None
    kinds, size = sorted(more["widths"]), more["num_ranks"]
    low, high = (
        widths.cost(channels, widths.uniform(channels, b), lam, num_ranks=size, widths=kinds, model="slowest")
        for b in (kinds[0], kinds[-1])
    )
    per_v, per_s = lam / (low.variance - high.variance), (1 - lam) / (high.seconds - low.seconds)
    prices, times, ends = [], [], []
    for each in channels:
        own = widths.groups(each.beta, more["group_size"])
        for beta, rows in zip(own.beta, own.sizes, strict=True):
            prices += [per_v * beta / (2**b - 1) ** 2 for b in kinds]
            times += [each.theta * rows * widths.row_bytes(each.num_columns, b) for b in kinds]
            ends += [(each.src, size + each.dst)] * len(kinds)
    n = len(prices)
    at, both = np.arange(n), np.array(ends)
    busy = coo_matrix((np.tile(times, 2), (both.T.ravel(), np.tile(at, 2))), shape=(2 * size, n + 1)).tolil()
    busy[:, n] = -1.0
    one = coo_matrix((np.ones(n), (at // len(kinds), at)), shape=(n // len(kinds), n + 1))
    found = milp(
        [*prices, per_s],
        integrality=np.append(np.ones(n), 0),
        bounds=Bounds(0, np.append(np.ones(n), np.inf)),
        constraints=[LinearConstraint(busy.tocsr(), -np.inf, 0), LinearConstraint(one.tocsr(), 1, 1)],
        options={"time_limit": LIMIT_S, "mip_rel_gap": 1e-4},
    )
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else -math.inf
    return float(bound - per_v * high.variance - per_s * low.seconds)
