"""Training on a graph that nobody stores: the bits of the stored one, 64-bit ids on the wire, memory whatever its size."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError, DatasetError, UnsupportedError
from polyhop.exchange import RowFetch, RowFormat, Seeds
from polyhop.graph import Graph, SharedGraph, materialise, procedural_share
from polyhop.kernels.procedural import Virtual, virtual_degrees, virtual_rows
from polyhop.partition import Partition, share
from polyhop.sample.part import Drawn, PartSampler
from polyhop.sample.wire import Wire
from polyhop.strategies.macro_auto import lowered, most_facts
from polyhop.strategies.macro_plan import memory
from polyhop.trainer import Result, Trainer

SEEDING = threading.Lock()
SMALL = Virtual(4, 1501, 12, num_classes=5, mean_degree=7, num_hot=20, signal=0.5)
LARGE = Virtual(4, (1 << 40) + 3, 12, num_classes=5, mean_degree=7, num_hot=100, signal=0.5)
NUM_TRAIN = 90
OPTIONS = {"max_epochs": 2, "batch_size": 20, "num_neighbors": [4, 3], "seed": 3, "device": "cpu"}


def model_of(graph: Virtual, kind: Any) -> torch.nn.Module:
    with SEEDING:  # ranks are threads here, and torch's generator is one
        torch.manual_seed(7)
        made: torch.nn.Module = kind(
            graph.num_features, 8, num_layers=2, out_channels=graph.num_classes, dropout=0.4
        )
        return made


def share_for(line: Collective, graph: Virtual, stored: Graph | None) -> SharedGraph:
    made = procedural_share(graph, NUM_TRAIN, line.rank, line.num_ranks)
    if stored is None:
        return made
    owner = torch.searchsorted(made.part.bounds[1:], torch.arange(graph.num_nodes), right=True)
    return share(stored, Partition(owner.to(torch.int32), line.num_ranks), line.rank)


def fit(
    line: Collective,
    graph: Virtual,
    kind: Any,
    strategy: str,
    options: dict[str, Any],
    stored: Graph | None = None,
) -> tuple[dict[str, Tensor], list[float], Result]:
    trainer = Trainer(strategy, **{**OPTIONS, "progress": "none", **options})
    model = model_of(graph, kind)
    result = trainer.fit(model, share_for(line, graph, stored), line=line)
    return model.state_dict(), [record["loss"] for record in result.history], result


@pytest.mark.parametrize("kind", [nn.GraphSAGE, nn.GCN, nn.GAT])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("data", {}),
        ("macro", {"macro": 1}),
        ("macro", {"macro": 3}),
        ("macro", {"macro": 2, "sampler": "labor"}),
    ],
    ids=["data", "macro-1", "macro-3", "macro-labor"],
)
def test_bits_are_those_of_the_stored_graph(kind: Any, strategy: str, options: dict[str, Any]) -> None:
    stored = materialise(SMALL, NUM_TRAIN)
    expected = run_in_threads(3, fit, SMALL, kind, strategy, options, stored)
    found = run_in_threads(3, fit, SMALL, kind, strategy, options)
    for (weights, losses, result), (want, want_losses, _) in zip(found, expected, strict=True):
        assert losses == want_losses
        assert all(torch.equal(weights[name], value) for name, value in want.items())
        assert (result.best_val, result.test) == (None, None)  # no such nodes: nothing is evaluated


def test_weights_do_not_depend_on_the_ranks_nor_on_windows() -> None:
    """Ids beyond 2^32 at every hop, from one rank and from three."""
    (alone, losses, _), *_ = run_in_threads(1, fit, LARGE, nn.GraphSAGE, "data", {})
    by_three = run_in_threads(3, fit, LARGE, nn.GraphSAGE, "data", {})
    for weights, its_losses, _ in by_three:
        assert its_losses == pytest.approx(losses, rel=1e-5)
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
    for k in (2, 5, "auto"):
        for (weights, _, _), (want, _, _) in zip(
            run_in_threads(3, fit, LARGE, nn.GraphSAGE, "macro", {"macro": k}), by_three, strict=True
        ):
            assert all(torch.equal(weights[name], value) for name, value in want.items())


def test_the_loss_falls() -> None:
    options = {"max_epochs": 8, "lr": 0.02, "batch_size": 30, "macro": 3}
    (_, losses, _), *_ = run_in_threads(2, fit, LARGE, nn.GraphSAGE, "macro", options)
    assert losses[-1] < 0.7 * losses[0]


def drawn_and_fetched(line: Collective, graph: Virtual, steps: list[int]) -> tuple[list[Drawn], Any, int]:
    """One window of all own train nodes in each of the steps, and the input rows of its last mini-batch."""
    shared = procedural_share(graph, NUM_TRAIN, line.rank, line.num_ranks)
    part, wire = shared.part, Wire(graph.num_nodes)
    assert part.split is not None
    seeds = part.split.train + part.start
    sampler = PartSampler(part, [4, -1, 2], wire, seed=1)
    drawn = sampler.sample_window(line, [seeds] * len(steps), 0, steps)
    layout = RowFormat.of(part, graph.num_nodes, "auto")
    assert (
        wire.id_dtype == layout.facts.id_dtype == (torch.int64 if graph.num_nodes >= 1 << 31 else torch.int32)
    )
    before = line.traffic.now()
    fetched = RowFetch(part, layout, wire).fetch(line, drawn[-1].ids)
    sent = (line.traffic.now() - before).bytes["features"] if line.num_ranks > 1 else 0
    return drawn, fetched, sent


@pytest.mark.parametrize("num_nodes", [(1 << 31) - 1, 1 << 31, LARGE.num_nodes, 1 << 48])
def test_ids_of_any_width_cross_the_wire(num_nodes: int) -> None:
    graph = Virtual(0, num_nodes, 9, mean_degree=6)
    steps = [3, 4, 8]
    got = run_in_threads(3, drawn_and_fetched, graph, steps)
    row_bytes = 4 * 9 + (8 if num_nodes >= 1 << 31 else 4) + 4
    asked = 0
    for rank, (drawn, fetched, _) in enumerate(got):
        part = procedural_share(graph, NUM_TRAIN, rank, 3).part
        assert part.split is not None
        alone = run_in_threads(1, alone_window, graph, part.split.train + part.start, steps)[0]
        for one, other in zip(drawn, alone, strict=True):
            assert torch.equal(one.ids, other.ids)
            for layer, its in zip(one.layers, other.layers, strict=True):
                assert torch.equal(layer.indptr, its.indptr)
                assert torch.equal(layer.indices, its.indices)
        ids = drawn[-1].ids
        assert int(ids.max()) > num_nodes * 0.9
        assert torch.equal(fetched.x, virtual_rows(graph, ids))
        assert torch.equal(fetched.facts.user_ids, ids)
        assert torch.equal(fetched.facts.in_degree, virtual_degrees(graph, ids))
        asked += int(((ids < part.start) | (ids >= part.start + part.num_nodes)).sum())
    assert sum(sent for _, _, sent in got) == row_bytes * asked


def alone_window(line: Collective, graph: Virtual, seeds: Tensor, steps: list[int]) -> list[Drawn]:
    part = procedural_share(graph, NUM_TRAIN, 0, 1).part
    return PartSampler(part, [4, -1, 2], Wire(graph.num_nodes), seed=1).sample_window(
        line, [seeds] * len(steps), 0, steps
    )


def inputs_of_an_epoch(line: Collective, graph: Virtual, fan_outs: list[int], batch: int) -> tuple[int, int]:
    """(most input nodes, most edges) of this rank's mini-batches."""
    part = procedural_share(graph, 1000, line.rank, line.num_ranks).part
    assert part.split is not None
    train = part.split.train
    seeds = Seeds(train + part.start, train + part.start, line, seed=0, batch_size=batch)
    sampler = PartSampler(part, fan_outs, Wire(graph.num_nodes), seed=1)
    drawn = sampler.sample_window(line, seeds.own(0), 0, range(seeds.num_steps))
    edges = [sum(layer.indices.numel() for layer in each.layers) for each in drawn]
    return max(each.ids.numel() for each in drawn), max(edges)


@pytest.mark.parametrize("fan_outs", [[4, 3], [-1, 5], [20, 20]])
def test_memory_is_made_ready_for_what_a_mini_batch_may_read(fan_outs: list[int]) -> None:
    graph = Virtual(0, 10**9, 16, num_hot=10**6)
    shared, batch, num_ranks = procedural_share(graph, 1000, 0, 3), 100, 3
    layout = RowFormat.of(shared.part, graph.num_nodes, "auto")
    given = {"num_steps": 10, "num_epochs": 1, "pool_row_bytes": 100, "is_delta": True, "is_overlapped": True}
    known = most_facts(shared, fan_outs, batch, layout, num_ranks, memory_bytes=1e9, **given)
    found = run_in_threads(num_ranks, inputs_of_an_epoch, graph, fan_outs, batch)
    nodes = max(most for most, _ in found)
    assert nodes <= known.reuse.distinct(1) <= 2.5 * nodes
    assert known.reuse.distinct(8) == pytest.approx(8 * known.reuse.distinct(1), rel=1e-6)
    assert known.block_bytes >= 4 * max(edges for _, edges in found)
    assert lowered(known, 10).k == 10
    tight = replace(known, memory_bytes=memory(known, 3))
    assert lowered(tight, 10).k == 3


# Prints the peak memory of a process whose threads are the ranks, before and after training, and the losses.
MEASURED = """
import json, resource, sys, torch
import polyhop.nn, polyhop.trainer
from polyhop.comm import run_in_threads
from polyhop.datasets import procedural_recipe
from polyhop.graph import procedural_share
from polyhop.trainer import Trainer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def fit(line):
    graph = procedural_share(*procedural_recipe(sys.argv[1]), line.rank, line.num_ranks)
    torch.manual_seed(0)
    model = polyhop.nn.GraphSAGE(256, 16, num_layers=2, out_channels=graph.num_classes)
    given = {"macro": 4, "num_neighbors": [5, 5], "batch_size": 100, "max_epochs": 3, "lr": 0.01, "progress": "none"}
    result = Trainer("macro", memory=sys.argv[2], device="cpu", **given).fit(model, graph, line=line)
    return [record["loss"] for record in result.history]

before = peak()
losses = run_in_threads(2, fit)
print(json.dumps({"before": before, "after": peak(), "losses": losses[0]}))
"""


def test_memory_does_not_know_the_size_of_the_graph() -> None:
    """10^9 nodes and 1.02 TB of rows, two ranks in one process, nine windows: pools of 40 MB each and what steps take."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", MEASURED),
            *("synth:procedural?nodes=1e9&features=256&classes=4&signal=0.5&train=1200", "40MB"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["after"] - told["before"] < 300e6, told
    assert told["losses"][-1] < told["losses"][0]


def one_rank(line: Collective, verb: str) -> None:
    graph = procedural_share(SMALL, NUM_TRAIN, line.rank, line.num_ranks)
    model = model_of(SMALL, nn.GraphSAGE)
    trainer = Trainer("macro", **OPTIONS, progress="none")
    if verb == "predict":
        trainer.predict(model, graph, line=line)
    elif verb == "evaluate":
        trainer.evaluate(model, graph, "train", line=line)
    else:
        changed = {
            "cache": {"cache": "1MB"},
            "sums": {"aggregate_inputs": True},
            "full": {"num_neighbors": None},
        }
        Trainer("macro", **{**OPTIONS, "batch_size": None, **changed[verb]}, progress="none").fit(
            model, graph, line=line
        )


@pytest.mark.parametrize("verb", ["predict", "evaluate", "cache", "sums", "full"])
def test_what_needs_all_edges_is_refused_with_the_reason(verb: str) -> None:
    errors = (UnsupportedError, ConfigError)
    with pytest.raises(errors, match=r"computed when read|procedural|fan-out per layer"):
        run_in_threads(1, one_rank, verb)


def test_it_cannot_be_loaded_whole() -> None:
    import polyhop

    with pytest.raises(DatasetError, match=re.escape("cannot be loaded whole (1,000,000,000 nodes")):
        polyhop.load("synth:procedural?nodes=1e9&features=256")
    with pytest.raises(DatasetError, match="option 'node'"):
        polyhop.load("synth:procedural?node=1e9")
