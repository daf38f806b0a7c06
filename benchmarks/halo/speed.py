"""Section ``speed``: epochs with messages in few bits against exact ones, where links set the pace.

For each graph the rate of the links is sought at which the exact run, overlapped, waits for 30, 60 and 80 % of its epoch.
Ranks share this machine's cores; each has a host of the lab. The sides live in the same ranks and take turns. Aims are for
two synthetic and two real graphs on four ranks. Beside them: two ranks; a small graph, where the sum of the weights'
gradients is much of what crosses; one with nearly all rows marginal.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, mean

from benchmarks.halo.graphs import SHAPES, Cut, cut, load_real, make, narrowed
from benchmarks.halo.ideal import ideal
from benchmarks.halo.launches import Phase, phases, save, start, why_no_lab
from benchmarks.halo.workload import EXACT, OURS, SIDES, Job
from benchmarks.harness import Figure
from polyhop.graph import Graph

__all__ = ["run"]

HIDDEN = 128
MOST_MARGINAL = 0.5
FAR = 0.08  # from the share that was sought: such a rate says nothing of it
AIMS = {0.8: 3.0, 0.6: 1.9, 0.3: None}


@dataclass(frozen=True)
class _Case:
    graph: str
    model: str
    num_ranks: int
    shares: tuple[float, ...]
    end: str = ""  # of the names of its figures; the aims are for those without


CASES = (
    _Case("reddit", "gcn", 4, (0.3, 0.6, 0.8)),
    _Case("products", "sage", 4, (0.6, 0.8)),
    _Case("debian-packages", "gcn", 4, (0.3, 0.6, 0.8)),
    _Case("ogbn-arxiv-struct", "sage", 4, (0.6, 0.8)),
    _Case("reddit", "gcn", 2, (0.6, 0.8), "_2ranks"),
    _Case("facebook-pages", "gcn", 4, (0.6, 0.8), "_small"),
    _Case("blurred", "gcn", 4, (0.8,), "_marginal"),
)
QUICK = (_Case("products", "gcn", 2, (0.6,)),)


@dataclass(frozen=True, eq=False)
class _Ran:
    case: _Case
    cut: Cut
    phases: list[Phase]

    @property
    def name(self) -> str:
        return f"{self.case.graph}, {self.case.model}, {self.case.num_ranks} ranks"

    def at(self, share: float) -> Phase | None:
        return next((phase for phase in self.phases if phase.share == share), None)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Ratios of epochs at each share, what is lost against the ideal, and bytes."""
    no_lab = why_no_lab()
    if no_lab:
        print(f"  skipped: {no_lab}", flush=True)
        return
    ran = []
    with tempfile.TemporaryDirectory(prefix="polyhop-halo-") as name:
        for case in QUICK if is_quick else CASES:
            graph = _graph(case.graph, scale=1 / 16 if is_quick else 1.0)
            if graph is None:
                continue
            ran.append(_started(case, cut(case.graph, graph, case.num_ranks), Path(name), is_quick=is_quick))
    judged = [one for one in ran if not one.case.end and one.cut.marginal <= MOST_MARGINAL]
    for share in (0.8, 0.6, 0.3):
        yield from _speedups(share, judged, "", AIMS[share])
        for end in dict.fromkeys(one.case.end for one in ran if one.case.end):
            yield from _speedups(share, [one for one in ran if one.case.end == end], end)
    yield from _ideal(judged or ran)
    yield from _wire(judged or ran)


_loaded: dict[str, Graph] = {}


def _graph(name: str, *, scale: float) -> Graph | None:
    if name not in _loaded:
        is_real = name not in SHAPES
        found = load_real(name) if is_real else make(name, scale=scale)
        if isinstance(found, str):
            print(f"  {name} is left out: {found}", flush=True)
            return None
        _loaded[name] = narrowed(found) if is_real else found
    return _loaded[name]


def _started(case: _Case, made: Cut, folder: Path, *, is_quick: bool) -> _Ran:
    print(f"  {made}; {case.model}", flush=True)
    job = Job(
        str(save(made, folder)),
        str(folder / "answers"),
        SIDES,
        case.model,
        HIDDEN,
        turns=1 if is_quick else 3,
        shares=case.shares,
        tries=2 if is_quick else 4,
    )
    ran = _Ran(case, made, phases(*start(job, case.num_ranks, f"{case.graph}-{case.model}-{case.num_ranks}")))
    for phase in ran.phases:
        rate = f"{phase.mbit:.0f} Mbit/s" if phase.mbit else "no limit"
        print(
            f"   {rate} ({8 * phase.bytes_per_s / 1e6:.0f} measured), exact waits {100 * phase.waiting():.0f} %, load "
            f"{phase.load:.1f} before; ideal {ideal(phase)}",
            flush=True,
        )
        for side in phase.epochs:
            print(f"    {side:15}{phase.told(side)}", flush=True)
    return ran


def _speedups(share: float, ran: Sequence[_Ran], end: str, aim: float | None = None) -> Iterator[Figure]:
    """Ours against exact (held against the aim), exact without overlap, and naive: geometric means over the graphs."""
    found = []
    for one in ran:
        phase = one.at(share)
        if phase is not None and abs(phase.waiting() - share) > FAR:
            print(
                f"  {one.name} is left out at {100 * share:.0f} %: the exact run waited {100 * phase.waiting():.0f} %",
                flush=True,
            )
        elif phase is not None:
            found.append((one, phase))
    if not found:
        return
    waits = "; ".join(
        f"{one.name}: {100 * phase.waiting():.0f} % at {phase.mbit:.0f} Mbit/s (bytes over bandwidth "
        f"{100 * phase.on_the_link():.0f} %, without a limit waits {100 * one.phases[0].waiting():.0f} %)"
        for one, phase in found
    )
    at = round(100 * share)
    yield Figure(
        f"share_{at}{end}", mean(phase.waiting() for _, phase in found), "share", f"waiting, exact: {waits}"
    )
    cores = len(os.sched_getaffinity(0))
    load = max(phase.load for _, phase in found)
    busy = f"; other work on the machine, load {load:.1f}" if load > cores else ""
    for over, name in ((EXACT, ""), ("plain", "_vs_plain"), ("naive", "_vs_naive")):
        each = "; ".join(
            f"{one.name}, {100 * one.cut.marginal:.0f} % marginal: {phase.speedup(over):.2f} "
            f"({phase.median(over):.2f} s over {phase.median(OURS):.2f} s)"
            for one, phase in found
        )
        ratio = geometric_mean(phase.speedup(over) for _, phase in found)
        yield Figure(
            f"speedup_{at}{name}{end}", ratio, "x", each + busy, at_least=aim if over == EXACT else None
        )


def _ideal(ran: Sequence[_Ran]) -> Iterator[Figure]:
    found = [
        (f"{one.name} at {round(100 * share)} %", ideal(phase))
        for one in ran
        for share in (0.8, 0.6)
        if (phase := one.at(share)) is not None
    ]
    if found:
        details = "; ".join(f"{name}: {each}" for name, each in found)
        yield Figure("fraction_of_ideal", mean(e.fraction for _, e in found), "share", details, at_least=0.85)
        yield Figure("fraction_of_ideal_least", min(e.fraction for _, e in found), "share")


def _wire(ran: Sequence[_Ran]) -> Iterator[Figure]:
    """Bytes of rows between layers, forward and backward, all of the messages: exact over ours; the least of the graphs."""
    bytes_of = {
        one.name: [one.phases[-1].sent(side, "hidden") / 1e6 for side in (EXACT, OURS)] for one in ran
    }
    ratios = {name: exact / ours for name, (exact, ours) in bytes_of.items()}
    each = "; ".join(
        f"{name}: {ratios[name]:.2f} ({a:.2f} MB over {b:.2f})" for name, (a, b) in bytes_of.items()
    )
    sums = ", ".join(f"{one.phases[-1].sent(OURS, 'gradients') / 1e6:.2f}" for one in ran)
    details = f"{each}; beside them MB of gradients of the weights, on every side: {sums}"
    yield Figure("wire_ratio", min(ratios.values()), "x", details, at_least=7.0)
