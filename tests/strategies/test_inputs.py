"""Aggregated inputs train what fan-out -1 in the innermost hop trains, on any ranks; sums are stored and found again."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyhop
from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, PartitionError, UnsupportedError
from polyhop.exchange import PartLoader, RowFetch, RowFormat, Seeds, bucket_sizes
from polyhop.graph import DenseFeatures, Graph, PooledRows, SharedGraph, SparseFeatures
from polyhop.graph.aggregated import AggregatedRows
from polyhop.kernels.keys import Key
from polyhop.nn import GraphSAGE
from polyhop.partition import Partition, open_parts, partition, save_parts, share
from polyhop.sample import MiniBatch, NeighborLoader, NeighbourSampler, full_block
from polyhop.sample.inclusion import inclusion
from polyhop.sample.part import PartSampler
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import Facts, account, estimate
from polyhop.strategies.inputs import AggregatedInputs, aggregated_inputs, summed_once
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]

SEEDING = threading.Lock()
ALL_INNERMOST = [4, 3, -1]
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "sage": lambda f, c: nn.GraphSAGE(f, 6, num_layers=3, out_channels=c, dropout=0.4),
    "gcn": lambda f, c: nn.GCN(f, 6, num_layers=3, out_channels=c, dropout=0.4),
    "gin": lambda f, c: nn.GIN(f, 6, num_layers=3, out_channels=c, dropout=0.4, train_eps=True),
}
BOUNDS = {"64-true": 1e-10, "32-true": 1e-5}


@dataclass
class Trained:
    weights: dict[str, Tensor]
    losses: list[float]
    test: float | None
    steps: int
    sent: Cost


def model_of(name: str, graph: Graph | SharedGraph) -> torch.nn.Module:
    with SEEDING:  # ranks may be threads, and torch's generator is one
        torch.manual_seed(7)
        return MODELS[name](graph.num_features, graph.num_classes)


def trainer(strategy: str, **options: Any) -> Trainer:
    """Twenty steps of Adam: 4 epochs of 5 steps, evaluated once at the end."""
    given = {"max_epochs": 4, "batch_size": 20, "num_neighbors": ALL_INNERMOST, "eval_every": 100, "seed": 3}
    return Trainer(strategy, **{**given, "device": "cpu", "progress": "none", **options})


def fit(graph: Graph | SharedGraph, name: str, line: Collective | None = None, **options: Any) -> Trained:
    model = model_of(name, graph)
    chosen = trainer(options.pop("strategy", "single" if line is None else "data"), **options)
    result = chosen.fit(model, graph, line=line)
    losses = [record["loss"] for record in result.history]
    sent = Cost() if line is None else line.traffic.now()
    return Trained(model.state_dict(), losses, result.test, result.steps, sent)


def fit_share(line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]) -> Trained:
    return fit(share(graph, Partition(owner, line.num_ranks), line.rank), name, line, **options)


def distance(one: Trained, other: Trained) -> float:
    """Largest difference of a weight."""
    return max(float((one.weights[name] - value).abs().max()) for name, value in other.weights.items())


def assert_same(found: Trained, expected: Trained, bound: float) -> None:
    assert found.steps == expected.steps == 20
    assert distance(found, expected) <= bound
    assert found.losses == pytest.approx(expected.losses, abs=bound)
    assert found.test == expected.test


def owners(graph: Graph, num_ranks: int, kind: str) -> Tensor:
    """int32 [N]: ``uneven`` gives rank 0 most, ``empty`` leaves the last rank without nodes."""
    nodes = torch.arange(graph.num_nodes)
    if kind == "uneven":
        return torch.where(nodes % 10 == 9, nodes % num_ranks, 0).int()
    if kind == "empty":
        return (nodes % max(1, num_ranks - 1)).int()
    return partition(graph, num_ranks, kind).owner


# ---------------------------------------------------------------- the same training as with all neighbours


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", MODELS)
def test_one_process_trains_as_with_all_neighbours(
    make_graph: MakeGraph, name: str, precision: str, weighted: bool
) -> None:
    """The graph has loops and isolated nodes. Another innermost fan-out gives other weights, so equality says something."""
    graph = make_graph(weighted=weighted)
    expected = fit(graph, name, precision=precision)
    found = fit(graph, name, precision=precision, aggregate_inputs=True)
    assert_same(found, expected, BOUNDS[precision])
    sampled = fit(graph, name, precision=precision, num_neighbors=[4, 3, 2])
    assert distance(sampled, expected) > 1e-3
    unused = fit(graph, name, precision=precision, num_neighbors=[4, 3, 2], aggregate_inputs=True)
    assert distance(unused, found) == 0


SOON = {("sage", 2), ("gcn", 3), ("sage", 4), ("gcn", 4), ("gin", 4)}


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, num_ranks, marks=() if (name, num_ranks) in SOON else pytest.mark.slow)
        for name in MODELS
        for num_ranks in (2, 3, 4)
    ],
)
def test_ranks_train_as_one_process_with_all_neighbours(
    make_graph: MakeGraph, name: str, num_ranks: int
) -> None:
    graph = make_graph(weighted=name == "gcn")
    for precision, kind in (("64-true", "uneven"), ("32-true", "empty")):
        expected = fit(graph, name, precision=precision)
        options = {"aggregate_inputs": True, "precision": precision}
        found = run_in_threads(num_ranks, fit_share, graph, owners(graph, num_ranks, kind), name, options)
        assert_same(found[0], expected, BOUNDS[precision])
        assert all(distance(each, found[0]) == 0 for each in found)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_same_over_gloo(make_graph: MakeGraph, ranks: Run, num_ranks: int) -> None:
    name = {2: "sage", 3: "gcn", 4: "gin"}[num_ranks]
    graph = make_graph(weighted=True)
    kind = "empty" if num_ranks == 3 else "hash"
    options = {"aggregate_inputs": True, "precision": "64-true"}
    found = ranks(num_ranks, fit_share, graph, owners(graph, num_ranks, kind), name, options)
    assert_same(found[0], fit(graph, name, precision="64-true"), 1e-10)


OPTIONS: dict[str, dict[str, Any]] = {
    "labor": {"sampler": "labor"},
    "cache": {"cache": 3000},
    "per mini-batch": {"per_minibatch_rpc": True},
    "bfloat16": {"feature_dtype": "bfloat16"},
    "two layers wide": {"num_neighbors": [-1, 5, 1]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_other_options_work_with_it(make_graph: MakeGraph, options: dict[str, Any]) -> None:
    """What ranks train does not depend on them; rounded rows are rounded alike everywhere."""
    graph = make_graph()
    given = {"precision": "64-true", **options, "aggregate_inputs": True}
    one = run_in_threads(1, fit_share, graph, owners(graph, 1, "hash"), "sage", given)[0]
    found = run_in_threads(3, fit_share, graph, owners(graph, 3, "hash"), "sage", given)
    assert_same(found[0], one, 1e-10)


def fit_macro(line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any]) -> Trained:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    return fit(held, name, line, strategy="macro", aggregate_inputs=True, **options)


@pytest.mark.parametrize("name", MODELS)
def test_windows_train_the_same_to_the_bit(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph(weighted=name == "gcn")
    owner = owners(graph, 3, "uneven")
    expected = run_in_threads(3, fit_share, graph, owner, name, {"aggregate_inputs": True})
    for k in (1, 3):
        found = run_in_threads(3, fit_macro, graph, owner, name, {"macro": k})
        assert distance(found[0], expected[0]) == 0
        assert found[0].losses == expected[0].losses


def test_fewer_bytes_are_sent(make_graph: MakeGraph) -> None:
    graph = make_graph(2000, num_features=16)
    owner = owners(graph, 3, "hash")
    sent = {}
    for name in ("sage", "gcn"):
        for aggregate in (False, True):
            options = {"aggregate_inputs": aggregate, "max_epochs": 1, "num_neighbors": [5, 5, 5]}
            found = run_in_threads(3, fit_share, graph, owner, name, options)
            sent[name, aggregate] = sum(each.sent.bytes["features"] for each in found)
    assert sent["sage", True] < 0.9 * sent["sage", False]
    assert sent["gcn", True] < 0.6 * sent["gcn", False]  # rows are as narrow as before


def test_features_in_a_file_need_no_memory(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph()
    assert isinstance(graph.x, DenseFeatures)
    np.save(tmp_path / "x.npy", graph.x.values.numpy())
    values = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    mapped = replace(graph, x=DenseFeatures(values, is_mapped=True))
    expected = aggregated_inputs(model_of("sage", graph), graph, ALL_INNERMOST, torch.float32)
    spill = tmp_path / "spill"
    for given, is_in_file in ((spill, True), (None, False)):
        found = aggregated_inputs(
            model_of("sage", graph), mapped, ALL_INNERMOST, torch.float32, spill_dir=given, memory_bytes=9_000
        )
        assert isinstance(found.graph.x, DenseFeatures)
        assert isinstance(expected.graph.x, DenseFeatures)
        assert found.graph.x.is_mapped == is_in_file
        assert torch.equal(found.graph.x.values, expected.graph.x.values)
    assert list(spill.iterdir()) == []  # the file has no name
    plain = fit(graph, "sage", aggregate_inputs=True)
    assert distance(fit(mapped, "sage", aggregate_inputs=True, spill_dir=spill), plain) == 0


# ---------------------------------------------------------------- the mean of many sampled runs


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_first_layer_is_the_mean_of_many_sampled_ones(
    make_graph: MakeGraph, name: str, weighted: bool
) -> None:
    """Before anything non-linear: within 5 standard errors everywhere, while one frozen sample is far outside."""
    graph, runs = make_graph(60, weighted=weighted), 1500
    assert graph.x is not None
    conv = {
        "sage": nn.SAGEConv(8, 4),
        "gcn": nn.GCNConv(8, 4),
        "gin": nn.GINConv(torch.nn.Sequential(torch.nn.Linear(8, 4)), eps=0.2),
    }[name].double()
    seeds = torch.arange(graph.num_nodes)
    sampler = NeighbourSampler(graph, [3], seed=11)
    total = torch.zeros(graph.num_nodes, 4, dtype=torch.float64)
    squares = torch.zeros_like(total)
    with torch.no_grad():
        for run in range(runs):
            batch = sampler.sample(seeds, 0, run)
            rows = graph.x.gather(batch.input_ids)
            assert isinstance(rows, Tensor)
            out = conv(rows.double(), batch.blocks[0])
            total += out
            squares += out * out
        last = out
        stack = nn.Stack([conv, nn.SAGEConv(4, 2)])
        inputs = aggregated_inputs(stack, graph, [3, 3], torch.float64)
        assert isinstance(inputs.graph.x, DenseFeatures)
        exact = conv(*_first_of_all(inputs, graph))
    mean = total / runs
    error = ((squares / runs - mean * mean).clamp(min=0) / runs).sqrt()
    varies = error > 1e-9
    assert int(varies.sum()) > 100  # nodes with more than 3 neighbours
    assert bool(((mean - exact).abs() <= 5 * error + 1e-9).all())
    assert int(((last - exact).abs() > 5 * error + 1e-9).sum()) > 100


def _first_of_all(inputs: AggregatedInputs, graph: Graph) -> tuple[AggregatedRows, Any]:
    assert isinstance(inputs.graph.x, DenseFeatures)
    rows, blocks = inputs.first(inputs.graph.x.values, [full_block(graph)])
    return rows, blocks[0]


@pytest.mark.slow
@pytest.mark.realdata
@pytest.mark.parametrize(("name", "epochs", "seeds"), [("cora", 40, 6), ("tolokers", 12, 6)])
def test_accuracy_is_that_of_sampled_training(data_dir: Path, name: str, epochs: int, seeds: int) -> None:
    """Half a point, and what the seeds leave uncertain."""
    graph = polyhop.load(name, data_dir=data_dir)
    if isinstance(graph.x, SparseFeatures):
        graph = replace(graph, x=DenseFeatures(graph.x.all().dense()))
    found = torch.zeros(2, seeds, dtype=torch.float64)
    for seed in range(seeds):
        for on in (0, 1):
            torch.manual_seed(seed)
            model = nn.GraphSAGE(
                graph.num_features, 32, num_layers=2, out_channels=graph.num_classes, dropout=0.5
            )
            options = {"num_neighbors": [10, 5], "batch_size": 512, "max_epochs": epochs, "eval_every": 4}
            more = {"seed": seed, "weight_decay": 5e-4, "aggregate_inputs": bool(on)}
            found[on, seed] = trainer("single", **options, **more).fit(model, graph).test
    difference = found[1] - found[0]
    uncertain = 2 * float(difference.std()) / seeds**0.5
    assert abs(float(difference.mean())) <= 0.005 + uncertain, found


# ---------------------------------------------------------------- what a strategy is handed


@pytest.mark.parametrize("name", MODELS)
def test_rows_may_come_gathered_or_from_pools(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph()
    model = model_of(name, graph)
    inputs = aggregated_inputs(model, graph, [4, 3, 2], torch.float32)
    assert inputs.num_neighbors == (4, 3)
    assert isinstance(inputs.graph.x, DenseFeatures)
    stored = inputs.graph.x.values
    batch = NeighbourSampler(graph, inputs.num_neighbors, seed=1).sample(torch.arange(20), 0, 0)
    ids = batch.input_ids
    given = [
        (stored[ids], batch.blocks),
        (stored, batch.from_pool().blocks),
        (PooledRows(stored[:50], stored[50:]), batch.from_pool().blocks),
    ]
    for x, drawn in given:
        rows, blocks = inputs.first(x, drawn)
        assert len(blocks) == model.num_layers
        assert all(block.rows is None for block in blocks)
        assert rows.own is None or torch.equal(rows.own, graph.x.gather(ids))  # type: ignore[union-attr]
        assert torch.equal(rows.z, stored[ids][:, -8:])
        first = blocks[0]
        assert (first.num_src, first.num_dst, first.num_edges) == (ids.numel(), ids.numel(), 0)
        assert torch.equal(first.dst_ids(), ids)


def test_the_note_says_what_is_not_used(make_graph: MakeGraph) -> None:
    graph = make_graph()
    note = aggregated_inputs(model_of("sage", graph), graph, [15, 10, 5], torch.float32).note
    assert "mean, rows of 16 columns" in note
    assert "hops drawn 15, 10; the innermost fan-out 5 is not used" in note


def test_a_continued_run_must_agree() -> None:
    on, off = (trainer("single", aggregate_inputs=given).fingerprint() for given in (True, False))
    assert on != off


# ---------------------------------------------------------------- refused, with the reason


class _Foreign(torch.nn.Module):
    num_layers = 3

    def begin(self, x: Any) -> Any: ...
    def layer(self, index: int, block: Any, state: Any) -> Any: ...
    def finish(self, state: Any) -> Any: ...


def _learnable(graph: Graph) -> Graph:
    assert isinstance(graph.x, DenseFeatures)
    return replace(graph, x=DenseFeatures(graph.x.values.clone().requires_grad_()))


REFUSED: dict[str, tuple[Callable[[Graph], tuple[Any, Graph, dict[str, Any]]], str]] = {
    "attention": (
        lambda g: (nn.GAT(8, 6, num_layers=3, out_channels=3), g, {}),
        "GATConv: aggregated inputs are not possible: it weighs neighbours by what it learns",
    ),
    "gcnii": (
        lambda g: (nn.GCNII(8, 6, num_layers=3, out_channels=3), g, {}),
        "GCNII: .*before the first layer",
    ),
    "learnable features": (
        lambda g: (model_of("sage", g), _learnable(g), {}),
        "features or edge weights are learnable",
    ),
    "another library's model": (lambda g: (_Foreign(), g, {}), "_Foreign: .*no model of polyhop.nn"),
    "one layer": (
        lambda g: (nn.GraphSAGE(8, 3, num_layers=1), g, {"num_neighbors": [3]}),
        "a model of one layer has no other",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_in_one_process(make_graph: MakeGraph, make: Any, message: str) -> None:
    model, graph, options = make(make_graph())
    with pytest.raises(UnsupportedError, match=message):
        aggregated_inputs(model, graph, options.get("num_neighbors", [4, 3, 2]), torch.float32)
    if not isinstance(model, _Foreign):
        with pytest.raises(UnsupportedError, match=message):
            trainer("single", aggregate_inputs=True, **options).fit(model, graph)


def test_sparse_features_are_refused(make_graph: MakeGraph) -> None:
    graph = make_graph(sparse=True)
    with pytest.raises(UnsupportedError, match=r"its features are sparse.*dense rows of 8 columns"):
        fit(graph, "gcn", aggregate_inputs=True)


def test_the_full_graph_has_no_hop_to_save() -> None:
    with pytest.raises(ConfigError, match="samples none: give one fan-out per layer"):
        trainer("single", aggregate_inputs=True, num_neighbors=None, batch_size=None)


def refused(line: Collective, graph: Graph, owner: Tensor, what: str) -> str:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    model = nn.GAT(8, 6, num_layers=3, out_channels=3) if what == "attention" else model_of("gin", graph)
    options = {"feature_dtype": "int8"} if what == "int8" else {}
    try:
        trainer("data", aggregate_inputs=True, **options).fit(model, held, line=line)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("attention", "GATConv: .*changes at every step"),
        ("int8", "feature_dtype='int8'.*share one scale"),
        ("sparse", "its features are sparse"),
    ],
)
def test_refused_on_every_rank(make_graph: MakeGraph, what: str, message: str) -> None:
    graph = make_graph(sparse=what == "sparse")
    for text in run_in_threads(2, refused, graph, owners(graph, 2, "hash"), what):
        assert re.search(message, text), text


# ---------------------------------------------------------------- stored with the parts


def fit_stored(line: Collective, folder: Path, name: str, options: dict[str, Any]) -> Trained:
    held = open_parts(folder).share(line.rank, line.num_ranks)
    return fit(held, name, line, **{"aggregate_inputs": True, **options})


@pytest.fixture
def stored(make_graph: MakeGraph, tmp_path: Path) -> Path:
    """A folder of four parts, the last without nodes."""
    graph = make_graph()
    save_parts(graph, Partition(owners(graph, 4, "empty"), 4), tmp_path / "parts")
    return tmp_path / "parts"


def times(folder: Path) -> dict[str, int]:
    """When each kept file was written, in nanoseconds."""
    return {
        f"{path.parent.name}/{path.name}": path.stat().st_mtime_ns for path in folder.glob("*/*aggregate*")
    }


def test_stored_sums_are_found_again_by_any_number_of_ranks(make_graph: MakeGraph, stored: Path) -> None:
    expected = fit(make_graph(), "sage")
    first = run_in_threads(4, fit_stored, stored, "sage", {})
    written = times(stored)
    assert len(written) == 4 * 2
    assert all("aggregate-mean-float32" in name for name in written)
    for num_ranks in (4, 2, 1):
        again = run_in_threads(num_ranks, fit_stored, stored, "sage", {})
        assert_same(again[0], expected, 1e-5)
        assert times(stored) == written
        if num_ranks == 4:
            assert distance(again[0], first[0]) == 0
            sums = [sum(each.sent.bytes.get("features", 0) for each in run) for run in (first, again)]
            assert sums[0] > sums[1]  # the halo was not fetched to be summed
    run_in_threads(2, fit_stored, stored, "gcn", {})
    run_in_threads(2, fit_stored, stored, "sage", {"precision": "64-true"})
    assert len(times(stored)) == 3 * 4 * 2
    assert {name: when for name, when in times(stored).items() if "mean-float32" in name} == written
    open_parts(stored).check()  # the folder is as it was


def stored_in(line: Collective, folder: Path, where: str) -> tuple[str, bool, Tensor, Tensor]:
    """The kind of store that stored rows are in, whether it is mapped, this rank's nodes and their rows."""
    held = open_parts(folder).share(line.rank, line.num_ranks, features=where)
    inputs = aggregated_inputs(model_of("sage", held), held, ALL_INNERMOST, torch.float32, line=line)
    assert isinstance(inputs.graph, SharedGraph)
    x = inputs.graph.x
    assert x is not None
    assert inputs.graph.num_features == x.num_features == 16
    rows = x.gather(torch.arange(x.num_rows))
    assert isinstance(rows, Tensor)
    return type(x).__name__, getattr(x, "is_mapped", False), held.part.user_ids, rows


@pytest.mark.parametrize("where", ["memory", "mapped", "disk"])
def test_stored_rows_are_kept_as_the_features_are(make_graph: MakeGraph, stored: Path, where: str) -> None:
    graph = make_graph()
    whole = aggregated_inputs(model_of("sage", graph), graph, ALL_INNERMOST, torch.float32).graph.x
    assert isinstance(whole, DenseFeatures)
    for num_ranks in (4, 2):
        for kind, is_mapped, ids, rows in run_in_threads(num_ranks, stored_in, stored, where):
            assert kind == ("DiskFeatures" if where == "disk" else "DenseFeatures")
            assert is_mapped == (where == "mapped" and num_ranks == 4)
            assert torch.equal(rows, whole.values[ids])


def test_only_the_rank_that_lacks_its_sums_computes(stored: Path) -> None:
    first = run_in_threads(4, fit_stored, stored, "gin", {})
    written = times(stored)
    for path in (stored / "part-00001").glob("aggregate*"):
        path.unlink()
    again = run_in_threads(4, fit_stored, stored, "gin", {})
    changed = {name for name, when in times(stored).items() if written[name] != when}
    assert changed == {f"part-00001/aggregate-sum-float32.{end}" for end in ("npy", "json")}
    assert distance(again[0], first[0]) == 0


@pytest.mark.parametrize("what", ["x", "edge_weight"])
def test_sums_are_made_again_when_what_they_are_made_from_changed(
    make_graph: MakeGraph, tmp_path: Path, what: str
) -> None:
    graph = make_graph(weighted=True)
    assert isinstance(graph.x, DenseFeatures)
    assert graph.edge_weight is not None
    if what == "x":
        other = replace(graph, x=DenseFeatures(graph.x.values * 1.5))
    else:
        other = replace(graph, edge_weight=graph.edge_weight.flip(0))
    shared, folder = partition(graph, 2, "hash"), tmp_path / "parts"
    save_parts(graph, shared, folder)
    run_in_threads(2, fit_stored, folder, "gcn", {})
    written = times(folder)
    save_parts(other, shared, tmp_path / "other")
    shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)
    found = run_in_threads(2, fit_stored, folder, "gcn", {"precision": "32-true"})
    assert all(written[name] != when for name, when in times(folder).items())
    assert distance(found[0], fit(other, "gcn")) <= 1e-5
    assert distance(found[0], fit(graph, "gcn")) > 1e-3


def fit_changed(line: Collective, folder: Path, what: str) -> Trained:
    """Train on features or weights that the folder does not hold."""
    held = open_parts(folder).share(line.rank, line.num_ranks)
    part = held.part
    assert isinstance(part.x, DenseFeatures)
    if what == "x":
        part = replace(part, x=DenseFeatures(part.x.values * 1.5))
    else:
        weights = ("edge_weight", "in_weight", "loop_weight")
        part = replace(part, **{name: getattr(part, name) * 3 for name in weights})
    return fit(replace(held, part=part), "gcn", line, aggregate_inputs=True)


@pytest.mark.parametrize("what", ["x", "edge_weight"])
def test_what_is_not_from_the_folder_is_recognised(make_graph: MakeGraph, tmp_path: Path, what: str) -> None:
    graph, folder = make_graph(weighted=True), tmp_path / "parts"
    assert isinstance(graph.x, DenseFeatures)
    assert graph.edge_weight is not None
    save_parts(graph, partition(graph, 4, "hash"), folder)
    run_in_threads(4, fit_stored, folder, "gcn", {})
    if what == "x":
        other = replace(graph, x=DenseFeatures(graph.x.values * 1.5))
    else:
        other = replace(graph, edge_weight=graph.edge_weight * 3)
    found = run_in_threads(2, fit_changed, folder, what)
    assert distance(found[0], fit(other, "gcn")) <= 1e-5
    assert distance(found[0], fit(graph, "gcn")) > 1e-4


def test_a_damaged_file_is_named(stored: Path) -> None:
    run_in_threads(2, fit_stored, stored, "sage", {})
    file = stored / "part-00002" / "aggregate-mean-float32.npy"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(PartitionError, match=rf"{file}: its content changed.*computed again"):
        run_in_threads(2, fit_stored, stored, "sage", {})
    file.unlink()
    file.with_suffix(".json").unlink()
    run_in_threads(2, fit_stored, stored, "sage", {})


def test_entries_say_what_rows_were_made_from(stored: Path) -> None:
    run_in_threads(2, fit_stored, stored, "sage", {})
    entries = [json.loads(path.read_text()) for path in sorted(stored.glob("*/aggregate-*.json"))]
    assert len({entry["made_from"] for entry in entries}) == 1
    assert entries[3]["values"] == 0  # the part without nodes


# ---------------------------------------------------------------- what is sent


SEED, BATCH = 5, 24


def load_epoch(line: Collective, graph: Graph, owner: Tensor, name: str, fan_outs: list[int]) -> Any:
    """Traffic of every step of an epoch, and the format of stored rows."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    inputs = aggregated_inputs(model_of(name, graph), held, fan_outs, torch.float32, line=line)
    assert isinstance(inputs.graph, SharedGraph)
    part = inputs.graph.part
    assert part.split is not None
    wire = Wire(graph.num_nodes, part.edge_weight is not None)
    sampler = PartSampler(part, inputs.num_neighbors, wire, seed=SEED)
    train = part.split.train
    seeds = Seeds(part.user_ids[train], train + part.start, line, seed=SEED, batch_size=BATCH)
    layout = RowFormat.of(part, graph.num_nodes, "auto")
    costs, before = [], line.traffic.now()
    for _ in PartLoader(line, sampler, RowFetch(part, layout, wire), seeds, prefetch=0).batches(2):
        after = line.traffic.now()
        costs.append(after - before)
        before = after
    return costs, layout


def batches_of(
    graph: Graph, owner: Tensor, num_ranks: int, fan_outs: list[int], step: int
) -> list[MiniBatch]:
    assert graph.split is not None
    loader = NeighborLoader(graph, fan_outs, graph.split.train, BATCH, seed=SEED)
    seeds = loader.order(2)[step * BATCH : (step + 1) * BATCH]
    sampler = NeighbourSampler(graph, fan_outs, seed=SEED)
    return [sampler.sample(seeds[owner[seeds] == rank], 2, step) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_account_equals_the_counters(make_graph: MakeGraph, name: str, num_ranks: int) -> None:
    """One hop less, and rows as wide as they are stored."""
    graph = make_graph(weighted=name == "gcn")
    shared = partition(graph, num_ranks, "hash")
    found = run_in_threads(num_ranks, load_epoch, graph, shared.owner, name, [4, -1, 3])
    wire, width = Wire(graph.num_nodes, graph.edge_weight is not None), 8 if name == "gcn" else 16
    for step in range(len(found[0][0])):
        batches = batches_of(graph, shared.owner, num_ranks, [4, -1], step)
        for rank, (costs, layout) in enumerate(found):
            assert layout.codec.num_columns == width
            expected = account(batches, shared.new_ids, shared.bounds, wire, layout, [4, -1], rank)
            assert dict(costs[step].bytes) == dict(expected.bytes), (step, rank)
            assert dict(costs[step].messages) == dict(expected.messages), (step, rank)


def test_estimate_is_within_a_tenth(make_graph: MakeGraph) -> None:
    graph, kept = make_graph(num_nodes=3000, seed=1), [5, 4]
    assert graph.split is not None
    shared = partition(graph, 3, "hash")
    found = run_in_threads(3, load_epoch, graph, shared.owner, "sage", [*kept, 3])
    train = graph.split.train
    start = torch.zeros(graph.num_nodes, 3, dtype=torch.float64)
    start[train, shared.owner[train].long()] = BATCH / train.numel()
    hops = inclusion(full_block(graph), start, kept, is_symmetric=True)
    facts = Facts(
        shared.owner.long(),
        [[hop[:, rank] for hop in hops] for rank in range(3)],
        graph.in_degree,
        kept,
        Wire(graph.num_nodes),
        found[0][1],
        bucket_sizes(list(GraphSAGE(8, 8, num_layers=3, out_channels=3).parameters())),
    )
    for rank, (costs, _) in enumerate(found):
        full = costs[:-1]  # the last batch is short
        measured = sum((cost for cost in full), Cost()) * (1 / len(full))
        predicted = estimate(facts, rank)
        for kind in ("ids", "features", "sizes"):
            assert predicted.bytes[kind] == pytest.approx(measured.bytes[kind], rel=0.1), (rank, kind)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_a_full_graph_is_summed_once(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph(num_nodes=200)
    model, block = model_of(name, graph).double(), full_block(graph)
    x = graph.x.all().double()
    rows, first = summed_once(model, x, block)
    assert isinstance(rows, AggregatedRows)
    assert first.num_edges == 0
    assert first.num_src == first.num_dst == graph.num_nodes
    key = Key(3)
    torch.testing.assert_close(
        model(rows, (first, block, block), key=key), model(x, block, key=key), rtol=0, atol=1e-12
    )
    assert rows.own is None or rows.own.data_ptr() != x.data_ptr()  # x, and the halo with it, can go


def test_what_changes_with_learning_is_not_summed_once(make_graph: MakeGraph) -> None:
    graph = make_graph(num_nodes=50)
    x, block = graph.x.all(), full_block(graph)
    model = nn.GAT(graph.num_features, 4, num_layers=2, out_channels=graph.num_classes)
    rows, first = summed_once(model, x, block)
    assert rows is x
    assert first is block
