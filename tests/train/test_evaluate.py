"""Layer-wise evaluation gives the numbers of one full-graph pass, in chunks that respect the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhop.comm import Collective, run_in_threads
from polyhop.errors import PolyhopError
from polyhop.exchange import RowFetch, RowFormat
from polyhop.graph import Block, DenseFeatures, Graph
from polyhop.nn import GAT, GCN, GCNII, GIN, BasicGNN, DeepGCN, GraphSAGE, Model
from polyhop.partition import Partition, share
from polyhop.sample.wire import Wire
from polyhop.strategies import HeldPart, WholeGraph, place
from polyhop.train import evaluate
from polyhop.train.evaluate import in_eval_mode, layerwise

MakeGraph = Callable[..., Graph]
MODELS = {
    "gcn": lambda f, c: GCN(f, 8, num_layers=3, out_channels=c, dropout=0.5),
    "sage": lambda f, c: GraphSAGE(f, 8, num_layers=2, out_channels=c, dropout=0.5, norm="batch_norm"),
    "gat": lambda f, c: GAT(f, 8, num_layers=2, out_channels=c, dropout=0.5, heads=2),
    "gin jk": lambda f, c: GIN(f, 8, num_layers=3, out_channels=c, jk="cat"),
    "gcnii": lambda f, c: GCNII(f, 8, num_layers=3, out_channels=c, dropout=0.5),
    "deep": lambda f, c: DeepGCN(f, 8, num_layers=3, out_channels=c, dropout=0.5),
}


def whole_pass(model: nn.Module, whole: WholeGraph) -> Tensor:
    with in_eval_mode(model):
        return model(whole.x, whole.block)


def joined(model: nn.Module, whole: WholeGraph, **options: object) -> tuple[Tensor, int]:
    chunks = list(layerwise(model, whole, **options))
    assert [c[0] for c in chunks] == [0, *(c[1] for c in chunks[:-1])]
    assert chunks[-1][1] == whole.features.num_rows
    return torch.cat([logits for _, _, logits in chunks]), len(chunks)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("variant", ["plain", "weighted", "sparse", "copied"])
def test_equals_one_pass_whatever_the_chunks(
    make_graph: MakeGraph, name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(150, **({variant: True} if variant in ("weighted", "sparse") else {}))
    if variant == "copied":  # as for models that cannot read rows where they are
        monkeypatch.setattr(Model, "takes_pool", False)
        for kind in (BasicGNN, GCNII):
            monkeypatch.setattr(kind, "takes_pool", False)
    torch.manual_seed(0)
    model = MODELS[name](graph.num_features, graph.num_classes).double()
    whole = WholeGraph(graph, place("cpu", "64-true"))
    expected = whole_pass(model, whole)
    assert expected.abs().max() > 1e-3
    for memory in (None, 1 << 30, 100_000, 20_000, 1):
        logits, num_chunks = joined(model, whole, memory_bytes=memory)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
        assert (num_chunks == 1) == (memory is None or memory == 1 << 30)
        assert memory != 1 or num_chunks == 150


def test_hidden_rows_in_files_give_the_same_bits(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(150)
    model = MODELS["gcnii"](graph.num_features, graph.num_classes)
    whole = WholeGraph(graph, place("cpu", "32-true"))
    mapped = []
    real = evaluate._mapped

    def spy(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
        mapped.append(shape)
        return real(shape, dtype, folder)

    evaluate._mapped, kept = spy, evaluate._mapped
    try:
        spilled, _ = joined(model, whole, memory_bytes=5_000, spill_dir=tmp_path / "rows")
        assert mapped == [(150, 8)] * 2 * 3  # "h" and "h0" of begin and of two layers
        roomy, _ = joined(model, whole, memory_bytes=1 << 20, spill_dir=tmp_path / "rows")
        assert len(mapped) == 6
    finally:
        evaluate._mapped = kept
    in_memory, _ = joined(model, whole, memory_bytes=5_000)
    assert torch.equal(spilled, in_memory)
    torch.testing.assert_close(spilled, roomy, rtol=1e-5, atol=1e-6)
    assert list((tmp_path / "rows").iterdir()) == []


def test_a_full_disk_for_hidden_rows_is_an_error_not_a_crash(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch
) -> None:
    def refuse(handle: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluate.os, "posix_fallocate", refuse)
    graph = make_graph(60)
    whole = WholeGraph(graph, place("cpu", "32-true"))
    with pytest.raises(PolyhopError, match=r"cannot spill .* No space left"):
        joined(MODELS["gcn"](graph.num_features, 3), whole, memory_bytes=1000, spill_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Spy(GCN):
    """Notes how many source rows each call of a layer held."""

    seen: list[tuple[int, int, int]]

    def layer(self, i: int, block: Block, state: dict[str, Tensor], **more: object) -> dict[str, Tensor]:
        self.seen.append((i, block.num_src, block.num_dst))
        assert block.rows is not None or state["h"].shape[0] == block.num_src
        return super().layer(i, block, state, **more)


def test_working_rows_stay_within_the_budget(make_graph: MakeGraph) -> None:
    graph = make_graph(400, num_features=64)
    model = Spy(64, 64, num_layers=2, out_channels=3)
    model.seen = []
    memory = 200_000
    joined(model, WholeGraph(graph, place("cpu", "32-true")), memory_bytes=memory)
    assert max(sources for _, sources, _ in model.seen) * 64 * 4 <= memory
    assert sum(rows for i, _, rows in model.seen if i == 0) == 400
    assert len(model.seen) > 4


def test_last_layer_skips_chunks_nobody_asked_for(make_graph: MakeGraph) -> None:
    graph = make_graph(200)
    model = Spy(graph.num_features, 8, num_layers=2, out_channels=3)
    model.seen = []
    whole = WholeGraph(graph, place("cpu", "32-true"))
    wanted = torch.tensor([3, 150])
    chunks = list(layerwise(model, whole, memory_bytes=10_000, wanted=wanted))
    expected, _ = joined(model, whole)
    assert len(chunks) == 2
    for start, stop, logits in chunks:
        torch.testing.assert_close(logits, expected[start:stop])
    assert {3, 150} <= {node for start, stop, _ in chunks for node in range(start, stop)}


def test_plain_module_runs_on_the_full_graph(make_graph: MakeGraph) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            assert edge_index.shape[0] == 2
            return self.linear(x).index_add(0, edge_index[1], self.linear(x)[edge_index[0]])

    graph, model = make_graph(50), Plain()
    whole = WholeGraph(graph, place("cpu", "32-true"))
    logits, num_chunks = joined(model, whole, memory_bytes=1)
    assert num_chunks == 1
    torch.testing.assert_close(logits, model(graph.x.all(), graph.edge_index))


def test_modes_come_back_and_gradients_are_off(make_graph: MakeGraph) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    model.train()
    model[0].eval()
    with in_eval_mode(model):
        assert not model[1].training
        assert not model[1](torch.ones(1, 2)).requires_grad
    assert (model.training, model[0].training, model[1].training) == (True, False, True)


def test_poll_can_stop_it(make_graph: MakeGraph) -> None:
    graph = make_graph(100)
    whole = WholeGraph(graph, place("cpu", "32-true"))
    calls = []

    def poll() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model = MODELS["gcn"](graph.num_features, 3)
    with pytest.raises(KeyboardInterrupt):
        joined(model, whole, memory_bytes=10_000, poll=poll)
    assert model.training


Run = Callable[..., list[Any]]
OWNERS = {
    "even": lambda nodes: (torch.arange(nodes) % 3).int(),
    "skewed": lambda nodes: torch.where(torch.arange(nodes) % 10 == 9, torch.arange(nodes) % 3, 0).int(),
    "first empty": lambda nodes: (torch.arange(nodes) % 2 + 1).int(),
    "ranges": lambda nodes: (torch.arange(nodes) * 3 // nodes).int(),
}


def held_part(line: Collective, graph: Graph, owner: Tensor, precision: str = "64-true") -> HeldPart:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    layout = RowFormat.of(held.part, graph.num_nodes, "auto")
    fetch = RowFetch(held.part, layout, Wire(graph.num_nodes))
    return HeldPart(held, place("cpu", precision), line, fetch)


def part_logits(
    line: Collective, graph: Graph, owner: Tensor, models: list[nn.Module], options: dict[str, Any]
) -> tuple[Tensor, Tensor, int]:
    """The user's ids of this rank's nodes, their logits, and how many chunks they came in. Each rank has its own model."""
    held = held_part(line, graph, owner)
    chunks = list(layerwise(models[line.rank], held, **options))
    part = held.graph.part
    assert [c[0] for c in chunks] == [0, *(c[1] for c in chunks[:-1])][: len(chunks)]
    logits = torch.cat([logits for _, _, logits in chunks] or [torch.empty(0, 3, dtype=torch.float64)])
    return part.user_ids, logits, len(chunks)


def models_of(name: str, graph: Graph, count: int) -> list[nn.Module]:
    made = []
    for _ in range(count):
        torch.manual_seed(0)
        made.append(MODELS[name](graph.num_features, 3).double())
    return made


def assert_of_the_whole(found: list[Any], graph: Graph, model: nn.Module) -> None:
    expected = whole_pass(model, WholeGraph(graph, place("cpu", "64-true")))
    assert sum(ids.numel() for ids, _, _ in found) == graph.num_nodes
    for ids, logits, _ in found:
        torch.testing.assert_close(logits, expected[ids], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("variant", "parts"),
    [("plain", "even"), ("plain", "skewed"), ("weighted", "first empty"), ("sparse", "ranges")],
)
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gin jk", "gcnii"])
def test_parts_give_the_numbers_of_the_whole(
    make_graph: MakeGraph, name: str, variant: str, parts: str, tmp_path: Path
) -> None:
    graph = make_graph(60, **({variant: True} if variant != "plain" else {}))
    owner = OWNERS[parts](60)
    for options in (
        {"memory_bytes": None},
        {"memory_bytes": 15_000},
        {"memory_bytes": 1, "spill_dir": tmp_path / "rows"},
    ):
        models = models_of(name, graph, 3)
        found = run_in_threads(3, part_logits, graph, owner, models, options)
        assert_of_the_whole(found, graph, models[0])
        if options["memory_bytes"] == 1:
            assert [chunks for _, _, chunks in found] == [ids.numel() for ids, _, _ in found]
    assert list((tmp_path / "rows").iterdir()) == []


def one_way_graph(num_nodes: int, reach: int) -> Graph:
    """Node v reads from v - 1 and v - reach: the first part reads from nobody, the last gives to nobody."""
    nodes = torch.arange(num_nodes)
    edges = torch.cat(
        [torch.stack([nodes[1:] - 1, nodes[1:]]), torch.stack([nodes[reach:] - reach, nodes[reach:]])], 1
    )
    x = torch.randn(num_nodes, 8, generator=torch.Generator().manual_seed(1))
    return Graph.from_edges(edges, DenseFeatures(x), torch.arange(num_nodes) % 3, num_nodes=num_nodes)


@pytest.mark.parametrize("name", ["gcn", "gcnii"])
def test_a_part_that_reads_from_nobody_still_gives(name: str) -> None:
    graph = one_way_graph(30, 4)
    models = models_of(name, graph, 3)
    found = run_in_threads(3, part_logits, graph, OWNERS["ranges"](30), models, {"memory_bytes": 5000})
    assert_of_the_whole(found, graph, models[0])


def test_parts_over_gloo(make_graph: MakeGraph, ranks: Run) -> None:
    graph = make_graph(90, weighted=True)
    models = models_of("gcnii", graph, 3)
    found = ranks(3, part_logits, graph, OWNERS["first empty"](90), models, {"memory_bytes": 15_000})
    assert_of_the_whole(found, graph, models[0])


@pytest.mark.parametrize("parts", ["even", "first empty"])
def test_wanted_rows_of_one_rank_alone(make_graph: MakeGraph, parts: str) -> None:
    """The others leave out their last layer's chunks, but not what those rows read."""
    graph, owner = make_graph(90), OWNERS[parts](90)
    models = models_of("gcn", graph, 3)

    def run(line: Collective) -> list[tuple[Tensor, Tensor]]:
        held = held_part(line, graph, owner)
        wanted = torch.tensor([1, 20] if line.rank == 2 else [], dtype=torch.int64)
        chunks = layerwise(models[line.rank], held, memory_bytes=5000, wanted=wanted)
        return [(held.graph.part.user_ids[start:stop], logits) for start, stop, logits in chunks]

    found = run_in_threads(3, run)
    assert found[:2] == [[], []]
    expected = whole_pass(models[0], WholeGraph(graph, place("cpu", "64-true")))
    assert 1 <= len(found[2]) <= 2
    for ids, logits in found[2]:
        torch.testing.assert_close(logits, expected[ids], rtol=1e-12, atol=1e-12)
