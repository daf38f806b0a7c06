"""What the ledger says of memory is what tensors take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.graph import Block, Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.strategies import Team, halo, place
from polyhop.strategies.halo_memory import Ledger, Means, ledger, note, row_bytes
from polyhop.strategies.halo_probe import Kept, LayerSizes
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()
WIDE = 48
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, WIDE, num_layers=3, out_channels=c, dropout=0.5),
    "sage": lambda f, c: nn.GraphSAGE(f, WIDE, num_layers=3, out_channels=c, dropout=0.5),
    "sage-max": lambda f, c: nn.GraphSAGE(f, WIDE, num_layers=2, out_channels=c, aggr="max"),
    "gcn-batch": lambda f, c: nn.GCN(f, WIDE, num_layers=3, out_channels=c, dropout=0.5, norm="batch"),
    "gat": lambda f, c: nn.GAT(f, WIDE, num_layers=3, out_channels=c, heads=2, dropout=0.4),
    "gin": lambda f, c: nn.GIN(f, WIDE, num_layers=3, out_channels=c),
    "gcnii": lambda f, c: nn.GCNII(f, WIDE, num_layers=4, out_channels=c, dropout=0.3),
    "deepgcn": lambda f, c: nn.DeepGCN(f, WIDE, num_layers=8, out_channels=c, dropout=0.3),
}


def built(
    line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]
) -> tuple[Any, Any]:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    with SEEDING:
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes)
    chosen = Trainer("halo", device="cpu", progress="none", **options)
    config = halo.Config(**{f.name: getattr(chosen, f.name) for f in fields(halo.Config)})
    team = Team(line)
    whole = halo.hold(held, place("cpu", "32-true"), team, config)
    assert held.split is not None
    step = halo.build(
        model, held, config, train_ids=held.split.train, whole=whole, loss=cross_entropy_sum, team=team
    )
    model.train()
    return step, model


def measured(
    line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]
) -> tuple[Ledger, dict[str, float], list[str]]:
    """What is said, and what one step shows of it."""
    step, model = built(line, graph, owner, name, options)
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *tensors(step._x)]}
    seen: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.gradients(0, Key(3))
    optimiser = torch.optim.Adam(model.parameters())
    optimiser.step()
    kept = [v for state in optimiser.state.values() for v in state.values() if v.numel() > 1]
    weights = [*model.parameters(), *(p.grad for p in model.parameters()), *kept]
    channels = step._channels.channels
    found = {
        "activations": float(sum(seen.values())),
        "weights": float(sum(t.numel() * t.element_size() for t in weights)),
        "inputs": float(sum(t.numel() * t.element_size() for t in tensors(step._x))),
        "edges": float(edges(step._blocks)),
        "halo": float(max((c.lists.num_halo * c.num_columns * 4 for c in channels), default=0)),
    }
    if options.get("halo") == "sequential":
        found["halo"] = float(max(c.halo_held.peak for c in channels))
    said = step.memory
    notes = step.notes
    step.close()
    return said, found, notes


def tensors(rows: Any) -> list[Tensor]:
    return [rows] if isinstance(rows, Tensor) else [v for v in vars(rows).values() if isinstance(v, Tensor)]


def edges(found: Any, seen: dict[int, int] | None = None) -> int:
    """Bytes of all that hangs on blocks, what layers made of them included."""
    seen = {} if seen is None else seen
    if isinstance(found, Tensor):
        seen[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    elif isinstance(found, (tuple, list)):
        for each in found:
            edges(each, seen)
    elif isinstance(found, dict):
        edges(list(found.values()), seen)
    elif isinstance(found, Block) or type(found).__name__ in ("Sums", "Shard", "Transposed", "GcnScales"):
        edges([value for name, value in vars(found).items() if name != "channel"], seen)
    return sum(seen.values())


@pytest.mark.parametrize("name", MODELS)
def test_the_ledger_is_what_tensors_take(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph(num_nodes=1500)
    for kind in ("hash", "block"):
        owner = partition(graph, 3, kind).owner
        for said, found, _ in run_in_threads(3, measured, graph, owner, name, {}):
            for part, value in found.items():
                assert getattr(said, part) == pytest.approx(value, rel=0.15), (kind, part)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_the_ledger_of_a_sequential_halo(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph(num_nodes=1500)
    owner = partition(graph, 4, "hash").owner
    plain = run_in_threads(4, measured, graph, owner, name, {"halo_sums": False})
    found_of = run_in_threads(4, measured, graph, owner, name, {"halo": "sequential"})
    for (said, found, _), (usual, _, _) in zip(found_of, plain, strict=True):
        for part, value in found.items():
            assert getattr(said, part) == pytest.approx(value, rel=0.15), part
        assert said.inputs <= usual.inputs  # no row of the halo stays; nor where rows were summed


def test_a_recomputed_step_keeps_less(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=1500)
    owner = partition(graph, 2, "hash").owner
    plain = run_in_threads(2, measured, graph, owner, "deepgcn", {})
    again = run_in_threads(2, measured, graph, owner, "deepgcn", {"recompute": True})
    for (said, found, _), (less, shown, _) in zip(plain, again, strict=True):
        assert less.activations < 0.75 * said.activations
        assert (
            shown["activations"] < 0.1 * found["activations"]
        )  # of the layers nothing: their inputs are held outside


def test_what_each_part_is() -> None:
    sizes = LayerSizes(10, 20, wanted=[0, 5, 7], leaving=[0, 4, 3], num_edges=100, columns=16)
    plain = replace(sizes, columns=0)
    saved, given = Kept(per_central=8, per_marginal=4, per_halo=2, per_edge=1), Kept(per_central=1)
    around = Kept(constant=1000)
    means = Means(num_parameters=50)
    found = ledger([plain, sizes], [saved, saved, around], [given] * 2, means, edges=11, inputs=22)
    one = 80 + 80 + 24 + 100
    assert found == Ledger(11, 22, 12 * 16 * 4, 1000 + 2 * one, 50 * 4 * 4, 19 * 16 * 4 + 200)
    assert found.total == 11 + 22 + 768 + 1000 + 2 * one + 800 + 1216 + 200
    small = ledger(
        [plain, sizes],
        [saved, saved, around],
        [given] * 2,
        replace(means, bits=4, recompute=True),
        edges=0,
        inputs=0,
    )
    assert small.activations == 1000 + 20 + one
    assert small.halo == 12 * 64 + 12 * 12
    assert small.buffers == 19 * 12 + 200
    shards = ledger(
        [plain, sizes], [saved, saved, around], [given] * 2, replace(means, depth=1), edges=0, inputs=0
    )
    assert shards.halo == 2 * 7 * 64
    assert shards.buffers == 2 * (7 + 4) * 64 + 200


@pytest.mark.parametrize(("bits", "expected"), [(32, 64), (16, 32), (8, 20), (4, 12), (2, 8), (1, 6)])
def test_row_bytes(bits: int, expected: int) -> None:
    assert row_bytes(16, bits, 4) == expected


def said(line: Collective) -> str:
    return note(Ledger(1e6 * (1 + line.rank), 2e6, 3e6, 4e6, 5e6, 6e6), line)


def test_the_note_is_of_the_rank_that_needs_most() -> None:
    for text in run_in_threads(3, said):
        assert text == (
            "needs up to 23.0 MB a rank (edges 3.0, inputs 2.0, halo 3.0, activations 4.0, weights 5.0, buffers 6.0)"
        )


def test_a_run_shows_it(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=200)
    found = run_in_threads(2, measured, graph, partition(graph, 2, "hash").owner, "sage", {})
    assert all(any("MB a rank" in text for text in notes) for _, _, notes in found)
