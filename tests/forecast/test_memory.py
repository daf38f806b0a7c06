"""What a rank is foreseen to hold: what layers keep is what autograd keeps, items make up the whole, more of anything takes
more, and a real run has about as much."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.datasets.synth import generate
from polyhop.forecast import Question, Training, labelled, look_at, of_given, predictions
from polyhop.forecast.footprint import LayerRows, evaluated, stepped
from polyhop.forecast.live import Live
from polyhop.forecast.memory import _in_windows, windows_memory
from polyhop.forecast.training import Inputs
from polyhop.graph import Block, Graph, SparseFeatures, SparseRows
from polyhop.kernels.keys import Key
from polyhop.nn import GAT, GCN, GCNII, GIN, GraphSAGE
from polyhop.partition import partition
from polyhop.plan import Law, Limits, Link, Machine, Memory, rank
from polyhop.planner import inputs_of, training_of
from polyhop.trainer import Trainer

FEATURES, CLASSES = 24, 5
MACHINE = Machine(
    "host", 2, 8e9, 3e7, 1e10, 1e10, 1e-7, 3e-9, 1.5e-4, 3e-10, 1.6e-10, 3e8, 4e8, 1.5, Link(1e9, 1e-4)
)
MODELS = {
    "gcn": lambda width, layers: GCN(FEATURES, width, layers, CLASSES, dropout=0.5),
    "sage": lambda width, layers: GraphSAGE(FEATURES, width, layers, CLASSES, dropout=0.5),
    "gat": lambda width, layers: GAT(FEATURES, width, layers, CLASSES, dropout=0.5, heads=2),
    "gin": lambda width, layers: GIN(FEATURES, width, layers, CLASSES),
    "gcnii": lambda width, layers: GCNII(FEATURES, width, layers, CLASSES, dropout=0.5),
}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return generate(f"sbm:?nodes=3000&classes={CLASSES}&p_in=0.01&p_out=0.001&features={FEATURES}&seed=3")


def training(model: nn.Module, nodes: int = 700, edges: int = 5600) -> Training:
    return Training(model, Inputs(FEATURES), nodes, edges, nodes // 2)


def foreseen(
    graph: Graph, way: str, ranks: int = 2, model: str = "gcn", width: int = 32, layers: int = 2, **more: Any
) -> Memory:
    fan_outs = more.pop("fan_outs", None)
    size = more.pop("batch_size", 256) if fan_outs else None
    question = asked_of(graph, MODELS[model](width, layers), ranks, fan_outs, size)
    if ranks == 1:
        return next(iter(predictions(question))).memory
    return of_given(question, way, more).memory


def asked_of(
    graph: Graph, net: nn.Module, ranks: int, fan_outs: list[int] | None = None, size: int | None = None
) -> Question:
    trainer = Trainer("auto", num_neighbors=fan_outs, batch_size=size)
    asked = training_of(net, graph, trainer, inputs_of(graph), labelled(graph).numel())
    sight = look_at(graph, partition(graph, ranks, "hash"), asked)
    law = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6)
    return Question(asked, sight, ranks, MACHINE, Link(1e9, 1e-4), law, 1.0)


# Live bytes


def test_live_bytes_are_those_that_are_held() -> None:
    with Live() as live:
        first = torch.zeros(1000)
        second = first + 1
        assert live.now == 8000
        view = second[:10]
        del first, second
        assert live.now == 4000
        del view
    assert (live.now, live.most) == (0, 8000)


def test_known_tensors_and_weights_do_not_count() -> None:
    known = torch.zeros(100)
    with Live([known], sizes=[4 * 7]) as live:
        same = known.view(10, 10)
        weight = torch.zeros(7)
        assert live.now == 0
    assert same.numel() + weight.numel() == 107


# What layers keep


def saved_by_hooks(model: Any, rows: int, edges: int) -> float:
    """Bytes that autograd keeps of a forward pass on the full graph, inputs, weights and edges left out."""
    made = torch.Generator().manual_seed(0)
    degree = edges // rows
    block = Block(
        torch.arange(0, edges + 1, degree), torch.randint(rows, (edges,), generator=made).int(), rows,
        src_ids=torch.arange(rows), in_degree=torch.full((rows,), degree + 1, dtype=torch.int32),
    )  # fmt: skip
    x = torch.rand(rows, FEATURES)
    model.train()
    model(x, block, key=Key(0))  # derives what it needs of the edges
    derived = [t for value in block._cache.values() for t in tensors(value)]
    known = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *tensors(block), *derived)}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(x, block, key=Key(0, 0, 1))
    found[logits.untyped_storage().data_ptr()] = logits
    return float(sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in known))


def tensors(held: Any) -> list[Tensor]:
    if isinstance(held, Tensor):
        return [held]
    return [value for value in getattr(held, "__dict__", {}).values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gat"])
def test_activations_are_what_autograd_saves(name: str) -> None:
    model = MODELS[name](32, 3)
    rows = LayerRows(700, 700, 5600)
    found = stepped(training(model), [rows] * 3, 350)
    assert found.activations == pytest.approx(saved_by_hooks(model, 700, 5600), rel=0.1)


def test_attention_keeps_no_less_than_autograd_saves() -> None:
    """Its functions keep tensors of their own, which hooks do not see."""
    model = MODELS["gat"](32, 3)
    found = stepped(training(model), [LayerRows(700, 700, 5600)] * 3, 350)
    assert found.activations >= 0.9 * saved_by_hooks(model, 700, 5600)


@pytest.mark.parametrize("name", list(MODELS))
def test_many_rows_are_foreseen_from_few(name: str) -> None:
    """What is found on some hundred rows holds for ten times as many, which are run here."""
    model = MODELS[name](32, 2)
    few = training(model, 1400, 11200)
    exact = stepped(few, [LayerRows(1400, 1400, 11200)] * 2, 700)
    line = stepped(few, [LayerRows(14000, 14000, 112000)] * 2, 7000)
    assert line.most == pytest.approx(10 * exact.most, rel=0.05)
    assert line.activations == pytest.approx(10 * exact.activations, rel=0.05)


def test_a_probe_leaves_the_model_and_the_generator_alone() -> None:
    model = MODELS["gcn"](16, 2)
    model.eval()
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.random.get_rng_state()
    stepped(training(model), [LayerRows(700, 700, 5600)] * 2, 350)
    evaluated(training(model), LayerRows(700, 700, 5600), is_copied=True)
    assert not model.training
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(state, torch.random.get_rng_state())


# Accounts

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("halo", {}),
    ("halo", {"recompute": True}),
    ("pipeline", {"stages": 2, "chunks": 1}),
    ("pipeline", {"stages": 2, "chunks": 8}),
    ("serverless", {}),
    ("data", {"fan_outs": [5, 5]}),
    ("macro", {"fan_outs": [5, 5], "macro": 2}),
    ("split", {"fan_outs": [5, 5]}),
    ("pushpull", {"fan_outs": [5, 5]}),
]


@pytest.mark.parametrize(("way", "more"), WAYS)
def test_items_add_up(graph: Graph, way: str, more: dict[str, Any]) -> None:
    found = foreseen(graph, way, **more)
    assert found.training == pytest.approx(sum(found.items.values()))
    assert all(value >= 0 for value in found.items.values())
    assert 0 < found.on_device < found.training - MACHINE.process_bytes
    assert found.most == max(found.training, found.evaluation, found.start)
    assert found.needed > found.most > MACHINE.process_bytes


@pytest.mark.parametrize(("way", "more"), [each for each in WAYS if "fan_outs" in each[1]])
def test_lines_between_ranks_count(graph: Graph, way: str, more: dict[str, Any]) -> None:
    assert foreseen(graph, way, **more).items["channels"] == foreseen(graph, "halo").items["channels"] > 0
    assert "channels" not in foreseen(graph, "single", ranks=1, fan_outs=[5, 5]).items


def test_narrow_models_have_a_margin_too(graph: Graph) -> None:
    found = foreseen(graph, "data", width=2, fan_outs=[2, 2], batch_size=16)
    assert found.spread == pytest.approx(4e7)
    assert found.spread > 0.4 * (found.most - MACHINE.process_bytes)


def test_mini_batches_of_windows_have_sparse_rows_of_their_own(graph: Graph) -> None:
    """All of two windows; dense rows are read in the pool."""
    ends = torch.arange(0, 20 * graph.num_nodes + 1, 20)
    columns = torch.arange(20).repeat(graph.num_nodes).int()
    rows = SparseRows(ends, columns, torch.ones(columns.numel()), FEATURES)
    question = asked_of(
        replace(graph, x=SparseFeatures(rows)), MODELS["gcn"](32, 2), 2, fan_outs=[5, 5], size=64
    )
    flows = question.sight.flows
    assert flows is not None
    two, four = (windows_memory(question, flows, 1e6, k).items["loaded"] for k in (2, 4))
    five = of_given(question, "data", {}).memory.items["loaded"]  # inputs of five, blocks of three
    assert four - two > 4 / 5 * five


def test_windows_in_hand() -> None:
    """Two that follow one another; the last of an epoch may have fewer mini-batches."""
    assert [_in_windows(size, 38) for size in (1, 16, 19, 32, 38, 50)] == [2, 32, 38, 38, 76, 76]


@pytest.mark.parametrize(("way", "more"), WAYS)
def test_wider_models_take_more(graph: Graph, way: str, more: dict[str, Any]) -> None:
    assert foreseen(graph, way, width=128, **more).training > foreseen(graph, way, width=32, **more).training


def test_more_layers_take_more(graph: Graph) -> None:
    assert foreseen(graph, "halo", layers=4).training > foreseen(graph, "halo", layers=2).training


def test_deep_models_take_less_where_layers_are_computed_again(graph: Graph) -> None:
    deep = {"model": "gcnii", "layers": 8, "width": 64}
    plain, again = (foreseen(graph, "halo", **deep, **more) for more in ({}, {"recompute": True}))
    assert again.training < plain.training
    assert again.items["freed"] == plain.items["freed"]  # what is computed again is allocated again


def test_larger_batches_take_more(graph: Graph) -> None:
    few, many = (foreseen(graph, "data", fan_outs=[5, 5], batch_size=size) for size in (128, 1024))
    assert many.training > few.training


@pytest.mark.parametrize(("way", "more"), [("halo", {}), ("data", {"fan_outs": [5, 5]})])
def test_more_ranks_take_less(graph: Graph, way: str, more: dict[str, Any]) -> None:
    two, eight = (foreseen(graph, way, ranks=n, **more) for n in (2, 8))
    assert eight.training < two.training < foreseen(graph, "single", ranks=1, **more).training * 1.5
    assert eight.start <= two.start


def test_a_plan_is_kept_with_its_items(graph: Graph) -> None:
    found = foreseen(graph, "halo")
    assert Memory.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_parts_from_a_folder_need_no_whole_graph(graph: Graph) -> None:
    net = MODELS["gcn"](32, 2)
    asked = training_of(net, graph, Trainer("auto"), inputs_of(graph), labelled(graph).numel())
    law, link = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6), Link(1e9, 1e-4)
    sight = look_at(graph, partition(graph, 2, "hash"), asked)
    starts = [
        of_given(Question(given, sight, 2, MACHINE, link, law), "halo", {}).memory.start
        for given in (asked, replace(asked, loads_whole=False))
    ]
    assert starts[1] < starts[0]


@pytest.mark.parametrize("given", [{}, {"num_neighbors": [5, 5], "batch_size": 256}])
def test_a_gpu_that_the_model_is_not_on_changes_nothing(graph: Graph, given: dict[str, Any]) -> None:
    asked = training_of(
        MODELS["gcn"](32, 2), graph, Trainer("auto", **given), inputs_of(graph), labelled(graph).numel()
    )
    law, sight = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6), look_at(graph, partition(graph, 2), asked)
    plain, with_gpu = (
        Question(asked, sight, 2, replace(MACHINE, gpus=gpus), Link(1e9, 1e-4), law, 1.0) for gpus in (0, 1)
    )
    assert list(predictions(with_gpu)) == list(predictions(plain))
    beside = replace(plain, device="cuda")
    assert beside.step_s < plain.step_s
    assert beside.exchange_s == 0
    assert not any(each.memory.start for each in predictions(beside))


def test_a_plan_fits_with_room_to_spare(graph: Graph) -> None:
    net = MODELS["gcn"](64, 2)
    asked = training_of(net, graph, Trainer("auto"), inputs_of(graph), labelled(graph).numel())
    law, link = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6), Link(1e9, 1e-4)
    sight = look_at(graph, partition(graph, 2, "hash"), asked)
    given = of_given(Question(asked, sight, 2, MACHINE, link, law), "halo", {})
    assert not rank([given], Limits(memory_bytes=given.memory.most))[0].fits
    assert rank([given], Limits(memory_bytes=1.001 * given.memory.needed))[0].fits


@pytest.mark.slow
def test_a_run_has_about_as_much(tmp_path: Path) -> None:
    """One process, the full graph: what it had beside a process that trained next to nothing, within a third."""
    from benchmarks.plan.cases import Case
    from benchmarks.plan.memory import TINY
    from benchmarks.plan.memory_rank import MemoryJob, arguments

    case, seen = Case("synth:products?scale=0.02", "gcn", 2, 128), []
    for each in (TINY, case):
        job = tmp_path / "job.json"
        job.write_text(json.dumps(MemoryJob(each, str(tmp_path), 1, "single").to_json()))
        subprocess.run(arguments(job), check=True, cwd=Path(__file__).resolve().parents[2])
        seen.append(json.loads((tmp_path / "rank-0.json").read_text())["training"])
    graph = case.recipe().load()
    asked = training_of(case.built(graph), graph, Trainer("auto"), inputs_of(graph), labelled(graph).numel())
    sight = look_at(graph, partition(graph, 1), asked)
    law = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6)
    question = Question(asked, sight, 1, replace(MACHINE, process_bytes=seen[0]), Link(1e9, 1e-4), law)
    found = next(iter(predictions(question))).memory
    assert found.training - seen[0] == pytest.approx(seen[1] - seen[0], rel=1 / 3)
