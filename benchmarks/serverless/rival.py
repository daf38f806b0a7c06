"""A race to the same accuracy on two real ranks: ``serverless`` against ``macro``, which samples mini-batches.

The target is fixed before: the best validation accuracy of exact training (strategy ``single``, same model and epochs), less
a point. Seconds count training and evaluation after every epoch, which both sides do alike, from the moment ranks are ready;
functions start while the first epoch waits for them. A rank is half of a c5.xlarge (2 vCPU); a function is paid for 1769 MB.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.graphs import describe
from benchmarks.halo.graphs import load_real, make
from benchmarks.harness import Figure, busy_cores
from benchmarks.serverless.running import gnn
from polyhop import launch
from polyhop.graph import Graph
from polyhop.partition import open_parts, partition, save_parts
from polyhop.serverless.prices import Prices
from polyhop.serverless.value import functions_cost, servers_cost
from polyhop.trainer import Trainer

__all__ = ["Finish", "finish", "on_rank", "race"]

NUM_RANKS, HIDDEN, WITHIN = 2, 64, 0.01
KIND, SHARE = "c5.xlarge", 0.5  # of a server for each rank
FUNCTION_MB = 1769
COMMON: dict[str, Any] = {"lr": 0.01, "seed": 1, "device": "cpu", "progress": "none"}
SIDES: dict[str, dict[str, Any]] = {
    "serverless pipe": {"strategy": "serverless", "functions": 1, "intervals": 8},
    "serverless 0": {"strategy": "serverless", "functions": 1, "intervals": 8, "staleness": 0},
    "macro": {"strategy": "macro", "num_neighbors": [10, 10], "batch_size": 512},
}


@dataclass(frozen=True)
class Finish:
    """When a side reached the target; None: never."""

    seconds: float | None
    epochs: int
    best: float  # validation accuracy
    functions: int  # of each rank

    def dollars(self, prices: Prices) -> float | None:
        if self.seconds is None:
            return None
        cost = SHARE * servers_cost(prices.server(KIND), NUM_RANKS, self.seconds)
        return cost + functions_cost(prices, FUNCTION_MB, NUM_RANKS * self.functions, self.seconds)


def finish(history: list[dict[str, Any]], target: float, functions: int) -> Finish:
    reached = next((each for each in history if each["val"] >= target), None)
    best = max(each["val"] for each in history)
    if reached is None:
        return Finish(None, len(history), best, functions)
    return Finish(reached["seconds"], reached["epoch"], best, functions)


def race(prices: Prices, *, is_quick: bool) -> Iterator[Figure]:
    """Ratios above 1 are for ``serverless``."""
    real = load_real("amazon-computers")
    graph = make("blurred", scale=1 / 4) if isinstance(real, str) else real
    epochs = {
        "single": 10 if is_quick else 100,
        "serverless": 10 if is_quick else 100,
        "macro": 5 if is_quick else 30,
    }
    model = gnn(graph, HIDDEN, 2, dropout=0.5, seed=1)
    exact = Trainer("single", max_epochs=epochs["single"], **COMMON).fit(model, graph)
    target = max(each["val"] for each in exact.history) - WITHIN
    print(
        f"  {describe(graph)}; exact training reaches {target + WITHIN:.4f}, target {target:.4f}", flush=True
    )
    found: dict[str, Finish] = {}
    for side, options in SIDES.items():
        load = busy_cores()
        history = _ran(graph, {**COMMON, **options, "max_epochs": epochs[options["strategy"]]})
        found[side] = finish(history, target, options.get("functions", 0))
        print(f"  {side:16} {found[side]}; load before {load:.1f} cores", flush=True)
    yield from figures(found, target, graph.name, prices)


def figures(found: dict[str, Finish], target: float, graph: str, prices: Prices) -> Iterator[Figure]:
    """Nothing is told of a side that did not reach the target, but that."""
    told = ", ".join(
        f"{side} {'never' if one.seconds is None else f'{one.seconds:.1f} s'} ({one.epochs} epochs, best {one.best:.4f}"
        f"{'' if one.seconds is None else f', ${one.dollars(prices):.2e}'})"
        for side, one in found.items()
    )
    details = f"{graph}, {NUM_RANKS} ranks, 1 core each shared with its function, to {target:.4f}: {told}"
    macro = found["macro"]
    ours = [one for side, one in found.items() if side != "macro" and one.seconds is not None]
    if not ours or macro.seconds is None:
        yield Figure(
            "serverless_vs_macro_reached", float(bool(ours)) - float(macro.seconds is not None), "", details
        )
        return
    best = min(ours, key=lambda one: one.seconds or 0.0)
    yield Figure("serverless_vs_macro_speed", macro.seconds / (best.seconds or 1.0), "x", details)
    mine, theirs = best.dollars(prices), macro.dollars(prices)
    assert mine is not None
    assert theirs is not None
    yield Figure("serverless_vs_macro_dollars", theirs / mine, "x", details)


def _ran(graph: Graph, options: dict[str, Any]) -> list[dict[str, Any]]:
    """History of a run on ranks that are processes."""
    with tempfile.TemporaryDirectory(prefix="polyhop-rival-") as name:
        folder = Path(name)
        method = "metis" if _has_metis() else "fennel"
        save_parts(graph, partition(graph, NUM_RANKS, method), folder / "parts")
        given = (str(folder), json.dumps(options))
        launch.run(on_rank, given, launch.Launch(num_ranks=NUM_RANKS, threads=1))
        history: list[dict[str, Any]] = json.loads((folder / "history.json").read_text())
        return history


def _has_metis() -> bool:
    from importlib.util import find_spec

    return find_spec("pymetis") is not None


def on_rank(context: launch.RankContext, folder: str, options: str) -> None:
    """Train; rank 0 writes what every epoch came to."""
    line = context.comm
    held = open_parts(Path(folder) / "parts").share(line.rank, line.num_ranks)
    given = json.loads(options)
    model = gnn(held, HIDDEN, 2, dropout=0.5, seed=1)
    result = Trainer(given.pop("strategy"), **given).fit(model, held, line=line)
    if line.rank == 0:
        (Path(folder) / "history.json").write_text(json.dumps(result.history))
