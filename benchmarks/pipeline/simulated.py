"""Section ``simulated``: the 16 cases that GNNPipe's authors logged (8 GPUs, 32 layers), played through and chosen between.

``simulated_geomean_16``: their graph-parallel epochs over the pipeline's as simulated from their component times.
``auto_vs_best_shape``: a shape is chosen for each case from what can be known before: computing, how much longer it takes
in chunks, rows across cuts, and link rates that are the same for all; then the logged epoch of the shape that was chosen is
held against the best logged one. Fed with figures that are in the file, so any machine will do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.harness import Figure
from benchmarks.pipeline.logged import CASES, GRAPHS, NUM_CHUNKS, NUM_STAGES, Case, replayed
from polyhop.strategies.pipeline_shape import Links, Shape, Work, choose_shape

__all__ = ["LINKS", "choice_of", "run", "work_of"]

NUM_LAYERS = 32
# graph -> rows that 2 and 8 parts read of one another, per node; times that computing takes in chunks (of four models, mean
# of the least and the most); input columns, classes
FACTS = {
    "squirrel": (0.823, 2.220, 2.09, 2089, 5),
    "physics": (0.651, 0.992, 2.785, 8415, 5),
    "flickr": (0.843, 2.154, 1.79, 500, 7),
    "reddit": (0.962, 2.607, 1.13, 602, 41),
}
GBIT = 1e9 / 8
LINKS = Links(parts=30 * GBIT, stages=52 * GBIT, near_parts=90 * GBIT, ranks_per_host=4)
"""Of two machines with four GPUs each, as the logs have them: exchanges of graphs across both, stages, two parts on one."""
SLOW, FAST = 0.7, 1.4  # rates with which choices are made again


@dataclass(frozen=True)
class Choice:
    """``shapes``: all, the chosen one first; milliseconds."""

    case: Case
    shapes: tuple[Shape, ...]

    @property
    def logged(self) -> float:
        return _logged(self.case, self.shapes[0])

    @property
    def best(self) -> float:
        return min(_logged(self.case, shape) for shape in self.shapes)


def work_of(case: Case) -> Work:
    """What is known of a case before it runs. Seconds are the authors' milliseconds."""
    nodes, hidden = GRAPHS[case.graph]
    two, eight, chunked, inputs, classes = FACTS[case.graph]
    kernels = 2 if case.model in ("graphsage", "resgcn+") else 1  # matrices of a layer
    return Work(
        nodes,
        [hidden] * NUM_LAYERS,
        hidden * (2 if case.model == "gcnii" else 1),
        compute_s=NUM_STAGES * case.compute_ms / 1000 / chunked,
        replicas={2: two, 8: eight},
        num_weights=hidden * (inputs + classes) + kernels * (NUM_LAYERS - 1) * hidden * hidden,
        num_chunks=NUM_CHUNKS,
        chunked=chunked,
        slowest=case.slowest_ms / case.compute_ms,
    )


def choice_of(case: Case, links: Links = LINKS) -> Choice:
    return Choice(case, choose_shape(NUM_STAGES, work_of(case), links, keeps_step=True))


def _logged(case: Case, shape: Shape) -> float:
    return {1: case.graph_parallel_ms, 4: case.hybrid_ms, 8: case.epoch_ms}[shape.layout.num_stages]


def run(*, is_quick: bool) -> Iterator[Figure]:
    """The gain in geometric mean, the largest error, and what choosing costs."""
    gains, errors, worst = [], {}, {}
    for case in CASES:
        found, name = replayed(case), f"{case.graph} {case.model}"
        choice = choice_of(case)
        gains.append(case.graph_parallel_ms / found)
        errors[name] = found / case.epoch_ms - 1
        worst[name] = choice.logged / choice.best
        told = ", ".join(
            f"{shape.name} {1000 * shape.seconds:.0f} foreseen ({_logged(case, shape):.0f} logged)"
            for shape in choice.shapes
        )
        print(
            f"  {name:19} graph parallel {case.graph_parallel_ms:5.0f} ms; pipeline {case.epoch_ms:5.0f} logged, "
            f"{found:5.0f} simulated ({100 * errors[name]:+.1f} %): {gains[-1]:.2f} x; chosen first: {told}",
            flush=True,
        )
    slower = sum(gain < 1 for gain in gains)
    details = (
        f"{', '.join(f'{case.graph} {case.model} {gain:.2f}' for case, gain in zip(CASES, gains, strict=True))}; slower in "
        f"{slower} of {len(gains)}"
    )
    yield Figure("simulated_geomean_16", geometric_mean(gains), "x", details, at_least=1.41)
    details = ", ".join(f"{name} {100 * error:+.1f} %" for name, error in errors.items())
    yield Figure(
        "simulated_error_16",
        max(map(abs, errors.values())),
        "off",
        f"of the logged epoch, the largest: {details}",
        at_most=0.15,
    )
    details = ", ".join(f"{name} {value:.2f}" for name, value in worst.items())
    yield Figure(
        "auto_vs_best_shape",
        max(worst.values()),
        "x",
        f"logged epoch of the shape that was chosen over the best of graph parallel, hybrid, pipeline, the worst: {details}",
        at_most=1.05,
    )
    for factor, end in ((SLOW, "slow"), (FAST, "fast")):
        yield _again(factor, end)


def _again(factor: float, end: str) -> Figure:
    """The same where the rates that choices are made with are wrong."""
    assert LINKS.near_parts is not None
    links = Links(
        factor * LINKS.parts, factor * LINKS.stages, factor * LINKS.near_parts, LINKS.ranks_per_host
    )
    choices = [choice_of(case, links) for case in CASES]
    names = [f"{one.case.graph} {one.case.model}" for one in choices if one.logged > 1.05 * one.best]
    details = f"links thought to be {factor:g} times as fast; more than 5 % off: {', '.join(names) or 'none'}"
    return Figure(
        f"auto_vs_best_shape_{end}_links", max(one.logged / one.best for one in choices), "x", details
    )
