"""What one rank of ``split``, ``halo`` and ``pipeline`` takes, phase by phase; and epochs on 4 and 8 GPUs foreseen from it.

Several GPUs are not at hand. P = 4 virtual ranks (threads) take turns on one (``benchmarks/gpu/turns``), through the code
that real ranks run; bytes are counted, not timed. Epochs on several GPUs are predictions of the planner's formulas with
those phases and a link's rate (``benchmarks/gpu/foreseen``), beside what ``polyhop plan --cluster`` foresees without them.
Nothing here is a speed-up.

``POLYHOP_GPU_RATES=FILE`` keeps what was measured, as ``machine`` of a cluster's file reads it.
"""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu.foreseen import LINKS, Device, Foreseer, Measured, Rates, cluster_of, played, rates_file
from benchmarks.gpu.graphs import graph_of
from benchmarks.gpu.virtual import PHASES, Way, measure
from benchmarks.graphs import describe
from benchmarks.harness import Figure
from polyhop.forecast import Training
from polyhop.graph import DenseFeatures, Graph, SharedGraph, Split
from polyhop.nn import GCN, GCNII, GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.plan import save_machine
from polyhop.plan.probe import PROBES, Probe

__all__ = [
    "FORESEEN",
    "FULL",
    "METHOD",
    "NUM_RANKS",
    "Size",
    "figures",
    "layers_like",
    "made_graph",
    "run",
    "shares_of",
    "ways",
]

NUM_RANKS = 4
FORESEEN = (4, 8)
TRAINED = 0.08  # of the nodes: as many as ogbn-products trains on
METHOD = "fennel"  # of all partitioners that need no other library the best


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    graph: str
    features: int
    hidden: int
    fan_outs: tuple[int, ...]
    batch_size: int
    deep_layers: int  # of the pipeline's model
    deep_hidden: int
    probes: tuple[Probe, ...]
    steps: int


FULL = Size("products?scale=0.1", 100, 256, (15, 10, 5), 1024, 16, 128, PROBES[:7], 8)
QUICK = replace(FULL, graph="products?scale=0.05", steps=3)


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``ranks_<way>_<phase>_s`` and what is sent and held; ``foreseen_<way>_<4|8>_<link>_s``."""
    yield from figures(QUICK if is_quick else FULL, "cuda")


def figures(size: Size, device: str) -> Iterator[Figure]:
    """The same on any device; on a processor to see that it works."""
    graph, told = made_graph(size), _Clock()
    print("  " + describe(graph), flush=True)
    partitions = {parts: partition(graph, parts, METHOD, seed=0) for parts in FORESEEN}
    shares = shares_of(graph, partitions[NUM_RANKS])
    cache = 5e7 if device == "cuda" else math.inf
    foreseer = Foreseer(graph, partitions, Device(device, size.probes, cache), size.fan_outs, size.batch_size)
    told("graph, parts and statistics")
    kept, ratios, failed = list[tuple[Training, Rates]](), list[float](), list[str]()
    for way in ways(size):
        try:
            measured, how = _measured(shares, way, device)
            told(f"{way.name}: ranks")
            yield from _phases(measured, how, device)
            rates = foreseer.rates(measured, layers_like(way, size))
            kept.append((foreseer.training(way), rates))
            for figure, ratio in _foreseen(foreseer, measured, rates):
                ratios.append(ratio)
                yield figure
            told(f"{way.name}: forecasts")
        except Exception:  # one way that fails must not cost the figures of the others
            traceback.print_exc()
            failed.append(way.name)
    if kept:
        _keep(kept)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        details = f"geometric mean of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f}: seconds foreseen from measured "
        details += "phases over those that 'polyhop plan --cluster' foresees from device laws"
        yield Figure("foreseen_over_plan", mean, "share", details)
    yield Figure("ranks_failed", len(failed), "ways", ", ".join(failed), at_most=0)


def ways(size: Size) -> list[Way]:
    """What is trained on the ranks."""
    drawn = {"num_neighbors": list(size.fan_outs), "batch_size": size.batch_size, "prefetch": 0, "seed": 3}
    depth = len(size.fan_outs)

    def sage(graph: Graph | SharedGraph) -> nn.Module:
        return GraphSAGE(
            size.features, size.hidden, num_layers=depth, out_channels=graph.num_classes, dropout=0.5
        )

    def gcn(graph: Graph | SharedGraph) -> nn.Module:
        return GCN(size.features, size.hidden, num_layers=3, out_channels=graph.num_classes, dropout=0.5)

    def deep(graph: Graph | SharedGraph) -> nn.Module:
        return _deep(size, size.deep_layers, graph.num_classes)

    bits = {"bits": "adaptive"}
    return [
        Way("split", "split", sage, drawn, steps=size.steps),
        Way("halo", "halo", gcn, steps=size.steps),
        # Widths are chosen for the first time before the eleventh step.
        Way("halo_adaptive", "halo", gcn, bits, bits, warm_steps=12, steps=size.steps),
        Way(
            "pipeline", "pipeline", deep, {"chunks": 4 * NUM_RANKS, "seed": 3}, steps=max(2, size.steps // 2)
        ),
    ]


def layers_like(way: Way, size: Size) -> nn.Module | None:
    """A shallow model with the layers of a deep one, whose law is the same."""
    return _deep(size, 4, 47) if way.strategy == "pipeline" else None


def _deep(size: Size, num_layers: int, num_classes: int) -> nn.Module:
    # Without dropout: with it an epoch begins with a sweep, and tasks of two kinds would be mixed.
    return GCNII(
        size.features, size.deep_hidden, num_layers=num_layers, out_channels=num_classes, dropout=0.0
    )


def made_graph(size: Size) -> Graph:
    graph = graph_of(size.graph)
    made = torch.Generator().manual_seed(3)
    train = torch.randperm(graph.num_nodes, generator=made)[: max(1, int(TRAINED * graph.num_nodes))]
    x = torch.randn(graph.num_nodes, size.features, generator=made)
    none = torch.zeros(0, dtype=torch.int64)
    return replace(graph, x=DenseFeatures(x), split=Split(train.sort().values, none, none))


def shares_of(graph: Graph, parts: Partition) -> list[SharedGraph]:
    """Of every rank, cut out at once."""
    with ThreadPoolExecutor(parts.num_parts) as pool:
        return list(pool.map(lambda rank: share(graph, parts, rank), range(parts.num_parts)))


def _measured(shares: Sequence[SharedGraph], way: Way, device: str) -> tuple[Measured, str]:
    """With rows on the device, as nccl has them; where that fails, by way of the host, and said so."""
    gc.collect()
    try:
        return Measured(way, measure(shares, way, device=device, rows_on=device)), ""
    except Exception:
        if device == "cpu":
            raise
        traceback.print_exc()
    torch.cuda.empty_cache()
    found = measure(shares, way, device=device, rows_on="cpu")
    return Measured(way, found), "; rows went by way of the host, and their copies are in compute"


def _phases(measured: Measured, how: str, device: str) -> Iterator[Figure]:
    """Of the busiest rank; what others took is in the details."""
    way, ranks = measured.way, measured.ranks
    busiest, num = ranks[measured.busiest], len(ranks)
    began, ended = min(each.wall[0] for each in ranks), max(each.wall[1] for each in ranks)
    own = sum(each.step_s for each in ranks) * len(busiest.costs)
    turns = f"{num} virtual ranks in turns on one device, each alone while its clock runs, links take no time{how}"
    details = f"of a step, rank {measured.busiest}, the busiest; mean {_ms(sum(each.step_s for each in ranks) / num)}; "
    details += (
        f"{turns}; clocks of all ranks are {own / (ended - began):.2f} of the wall's {ended - began:.2f} s"
    )
    print(f"  {way.name}: {_ms(busiest.step_s)} a step of the busiest rank; {turns}", flush=True)
    yield Figure(f"ranks_{way.name}_step_s", busiest.step_s, "s", details)
    for phase in PHASES:
        if not measured.most(phase):
            continue
        each = ", ".join(_ms(one.phases[phase]) for one in ranks)
        details = f"of a step, of the busiest rank; mean {_ms(measured.mean(phase))}; ranks {each}"
        if phase == "compute":
            spans = {name: value for name, value in busiest.spans.items() if name in _INSIDE}
            details += "".join(f"; {name} {_ms(value)}" for name, value in spans.items())
        yield Figure(f"ranks_{way.name}_{phase}_s", busiest.phases[phase], "s", details)
    most = max(ranks, key=lambda each: sum(each.sent.values()))
    details = "a step, the rank that sends most; " + ", ".join(
        f"{kind} {value:,.0f}" for kind, value in sorted(most.sent.items())
    )
    mean = sum(sum(each.sent.values()) for each in ranks) / num
    yield Figure(f"ranks_{way.name}_sent_bytes", measured.sent_bytes, "B", f"{details}; mean {mean:,.0f}")
    if device == "cuda":
        held = [each.num_bytes / 2**30 for each in ranks]
        details = "allocated at most in a rank's turns, messages under way left out; ranks "
        yield Figure(
            f"ranks_{way.name}_memory_gib", max(held), "GiB", details + ", ".join(f"{x:.2f}" for x in held)
        )


_INSIDE = ("forward", "backward", "sum")  # spans of strategies that lie in compute


def _foreseen(foreseer: Foreseer, measured: Measured, rates: Rates) -> Iterator[tuple[Figure, float]]:
    """Beside what device laws say."""
    way = measured.way
    off = ", ".join(f"{phase} {value:.2f}" for phase, value in rates.off.items())
    for num_ranks in FORESEEN:
        for link in LINKS:
            formula = foreseer.by_formula(way, rates, num_ranks, link)
            is_played = way.strategy == "pipeline" and num_ranks == len(measured.ranks)
            ours = played(measured, link) if is_played else formula.epoch_s
            plan = foreseer.of_devices(way, num_ranks, link)
            ratio = ours / plan.epoch_s
            cluster = cluster_of(link)
            assumed = [
                f"an epoch on {num_ranks} GPUs like this one, foreseen, not run: {cluster.inside_gb_s:g} GB/s and "
                f"{cluster.inside_us:g} us between them ({LINKS[link]})",
                f"plan --cluster foresees {_ms(plan.epoch_s)}, ratio {ratio:.2f}",
                f"{_shares(formula.parts)}; {formula.sent_bytes * rates.bytes_off:,.0f} B sent by the busiest",
                f"measured over the rates' own {off}; bytes counted over expected {rates.bytes_off:.3f}",
            ]
            if is_played:
                assumed.append(f"schedule played with measured tasks; by formula {_ms(formula.epoch_s)}")
            elif num_ranks == len(measured.ranks):
                assumed.append("phases as measured")
            else:
                assumed.append(f"{num_ranks} real parts, looked at and not run: rows exact, computing by law")
            print(
                f"  {way.name:14} {num_ranks} GPUs {link:7} {_ms(ours):>9} from measured phases, "
                f"{_ms(plan.epoch_s):>9} from device laws, {ratio:.2f}",
                flush=True,
            )
            yield Figure(f"foreseen_{way.name}_{num_ranks}_{link}_s", ours, "s", "; ".join(assumed)), ratio


def _keep(found: Sequence[tuple[Training, Rates]]) -> None:
    """Where the user wants it."""
    file = os.environ.get("POLYHOP_GPU_RATES")
    if not file:
        return
    source = f"measured {time.strftime('%Y-%m-%d')} by virtual ranks on {_name()}"
    save_machine(replace(rates_file(found), source=source), Path(file))
    print(f"  rates kept in {Path(file).name}", flush=True)


def _name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a processor"


def _shares(parts: object) -> str:
    assert isinstance(parts, dict)
    return ", ".join(f"{name} {_ms(value)}" for name, value in parts.items())


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


class _Clock:
    """Says what took how long, so that a slow machine's log tells where it went."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, what: str) -> None:
        now = time.perf_counter()
        print(f"    {what}: {now - self._last:.1f} s", flush=True)
        self._last = now
