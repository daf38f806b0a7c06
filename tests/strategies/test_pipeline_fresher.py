"""Better history and gradients: compensation by past ones, sweeps before an epoch, chunks that go together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, run_in_threads
from polyhop.errors import ConfigError
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.strategies import pipeline, pipeline_setup
from polyhop.strategies.pipeline_check import check
from polyhop.strategies.pipeline_fallback import EVERY, Fallback
from polyhop.strategies.pipeline_history import Meter
from polyhop.strategies.pipeline_schedule import Layout, fill_drain, grouped, layer_by_layer
from polyhop.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))

from test_pipeline import (  # type: ignore[import-not-found]
    LAYERS,
    alone,
    assert_same,
    build,
    far,
    gradients_of,
    model_of,
    over_stages,
    stepped,
)
from test_pipeline_training import over_stages as trained  # type: ignore[import-not-found]

MakeGraph = Callable[..., Graph]


def frozen(
    line: Collective, graph: Graph, name: str, epochs: int, options: dict[str, Any]
) -> list[dict[str, Tensor]]:
    """Gradients of some epochs in which weights stand still."""
    model = model_of(name, graph, 0.0)
    step, found = build(line, graph, model, **options), []
    for epoch in range(epochs):
        stepped(step, model, epoch)
        found.append(gradients_of(model))
    return found


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gcnii", "deepgcn"])
def test_compensated_gradients_become_exact(make_graph: MakeGraph, name: str) -> None:
    """Weights stand still and nothing is dropped: exact once every layer has had an epoch; without, never."""
    graph = make_graph(60)
    expected = alone(graph, name).gradients

    def apart(options: dict[str, Any]) -> list[float]:
        found = run_in_threads(1, frozen, graph, name, LAYERS + 1, {"chunks": 5, **options})[0]
        return [max(far(each[weight], value) for weight, value in expected.items()) for each in found]

    with_past, without = apart({"history_gradients": True}), apart({})
    assert with_past[-1] < 1e-11
    assert with_past[0] == without[0] > 1e-3
    assert without[-1] > 1e-3


def test_compensation_takes_one_layer_an_epoch(make_graph: MakeGraph) -> None:
    """The gradients of the last layer are exact at once, of the one below it after an epoch, and so on."""
    graph = make_graph(60)
    expected = alone(graph, "gcn").gradients
    found = run_in_threads(1, frozen, graph, "gcn", LAYERS, {"chunks": 5, "history_gradients": True})[0]
    for epoch, each in enumerate(found):
        for layer in range(LAYERS):
            off = far(each[f"convs.{layer}.lin.weight"], expected[f"convs.{layer}.lin.weight"])
            assert (off < 1e-11) == (layer >= LAYERS - 1 - epoch), (epoch, layer, off)


@pytest.mark.parametrize("name", ["gcn", "gcnii"])
@pytest.mark.parametrize("options", [{"history_gradients": True}, {"history_sweeps": 2}], ids=str)
def test_stages_do_not_matter(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    graph = make_graph(60)
    one, three = (over_stages(graph, name, stages, 0.4, epochs=3, chunks=5, **options) for stages in (1, 3))
    assert_same(three, one, 0.0)


@pytest.mark.parametrize("name", ["gcn", "gcnii", "deepgcn"])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_each_sweep_fixes_a_layer(make_graph: MakeGraph, name: str, p: float) -> None:
    """C1, from tables of rubbish, this epoch's dropout included; the rows that layer l reads are exact after l sweeps."""
    graph = make_graph(60)

    def run(line: Collective, sweeps: int) -> dict[int, Tensor]:
        model = model_of(name, graph, p)
        step = build(line, graph, model, chunks=5, history_sweeps=sweeps)
        for table in step.history.rows.values():
            table.fill_(7.0)
        step.history.is_filled = True
        schedule, key = step.schedule(0), Key(3, 0)
        for _ in range(sweeps):
            step._freshen(schedule, key)
        return {layer: table.clone() for layer, table in step.history.rows.items()}

    def exact(line: Collective) -> dict[int, Tensor]:
        model = model_of(name, graph, p)
        step = build(line, graph, model, chunks=5, exact_layers=True)
        stepped(step, model, 0)
        return {layer: table.clone() for layer, table in step.history.rows.items()}

    expected = run_in_threads(1, exact)[0]
    for sweeps in range(1, LAYERS):
        found = run_in_threads(1, run, sweeps)[0]
        for layer, table in found.items():
            assert (far(table, expected[layer]) < 1e-12) == (layer <= sweeps), (sweeps, layer)


@pytest.mark.parametrize("stages", [1, 2])
def test_enough_sweeps_give_the_exact_loss(make_graph: MakeGraph, stages: int) -> None:
    """With dropout, of weights that have moved."""
    graph = make_graph(60)

    def run(line: Collective, options: dict[str, Any]) -> list[float]:
        model = model_of("gcnii", graph, 0.4)
        step, losses = build(line, graph, model, chunks=5, **options), []
        for epoch in range(3):
            losses.append(stepped(step, model, epoch))
            step.complete_model()
            drawn = torch.Generator().manual_seed(
                epoch
            )  # ranks are threads, and torch's own is theirs together
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=drawn, dtype=p.dtype), alpha=0.05)
        return losses

    exact = run_in_threads(stages, run, {"exact_layers": True})[0]
    assert run_in_threads(stages, run, {"history_sweeps": LAYERS - 1})[0] == pytest.approx(exact, rel=1e-12)
    assert run_in_threads(stages, run, {})[0] != pytest.approx(exact, rel=1e-4)


def test_bytes_of_sweeps_are_accounted(make_graph: MakeGraph) -> None:
    graph = make_graph(60)

    def run(line: Collective) -> tuple[Any, Any, Any]:
        model = model_of("gcnii", graph, 0.0)
        step = build(line, graph, model, chunks=5, history_sweeps=2)
        stepped(step, model, 0)
        line.barrier()
        before = line.traffic.now()
        stepped(step, model, 1)
        counted = (line.traffic.now() - before).only("hidden", "gradients")
        made = pipeline.account(
            step.schedule(1), step.chunks.sizes, step.boundaries, line.rank, 8, num_sweeps=2
        )
        return counted, made, pipeline.estimate(step.facts(), line.rank)

    for rank, (counted, *expected) in enumerate(run_in_threads(3, run)):
        for each in expected:
            assert dict(counted.bytes) == dict(each.bytes), rank
            assert dict(counted.messages) == dict(each.messages), rank


def test_groups_are_a_schedule() -> None:
    """Checked as any; of one chunk each the tasks of fill-drain, of all chunks layer by layer."""
    for together in (1, 2, 3, 6, 9):
        check(grouped(Layout(3), [0, 2, 3, 5], [range(6)], together))
    assert grouped(Layout(3), [0, 2, 3, 5], [range(6)], 6) == layer_by_layer(
        Layout(3), [0, 2, 3, 5], [range(6)]
    )
    one, usual = (
        grouped(Layout(5), range(6), [range(4)], 1),
        fill_drain(Layout(5), range(6), [range(4)]),
    )
    assert one == usual  # stages of one layer


@pytest.mark.parametrize("name", ["gcn", "gat", "gcnii", "deepgcn"])
def test_all_chunks_together_are_exact(make_graph: MakeGraph, name: str) -> None:
    graph = make_graph(60)
    expected = alone(graph, name, 0.4, epochs=2)

    def run(line: Collective, together: int) -> tuple[list[float], dict[str, Tensor], list[Meter]]:
        model = model_of(name, graph, 0.4)
        step = build(line, graph, model, chunks=6)
        step.fallback.together = together
        losses = [stepped(step, model, epoch) for epoch in range(2)]
        return losses, gradients_of(model), [step.meter]

    losses, gradients, meters = run_in_threads(1, run, 6)[0]
    assert losses == pytest.approx(expected.losses, rel=1e-12)
    assert all(far(gradients[weight], value) < 1e-10 for weight, value in expected.gradients.items())
    assert meters[0].history_rows == 0
    rows = [run_in_threads(1, run, together)[0][2][0].history_rows for together in (1, 2, 3, 6)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[1]


def test_groups_read_as_they_say(make_graph: MakeGraph) -> None:
    """Rows of chunks of the same group and of those before are of this epoch; counted. Stages do not matter."""
    graph = make_graph(60)

    def run(line: Collective) -> tuple[float, int, int, int]:
        model = model_of("gcn", graph, 0.3)
        step = build(line, graph, model, chunks=6)
        step.fallback.together = 2
        loss = stepped(step, model, 0)
        order = list(dict.fromkeys(task.chunk for task in step.schedule(0).tasks(0, "forward")))
        reads = step.chunks.reads()
        after = sum(int(reads[chunk, order[at - at % 2 + 2 :]].sum()) for at, chunk in enumerate(order))
        first, stop = step.bounds[line.rank], step.bounds[line.rank + 1]
        return loss, step.meter.history_rows, after, stop - max(first, 1)

    ((one, *_),) = run_in_threads(1, run)
    for loss, history, after, layers in run_in_threads(2, run):
        assert loss == one
        assert history == after * layers > 0


def test_fallback_doubles_where_history_is_off() -> None:
    def looked(line: Collective) -> tuple[list[int], list[str]]:
        fallback, seen, told = Fallback(0.2, 6), [], []
        for epoch in range(6 * EVERY):
            # Only what all ranks have together is above the bound.
            meter = Meter(error=(0.0, 10.0)[line.rank] if epoch >= 2 * EVERY else 0.0, size=100.0)
            if note := fallback.look(epoch, meter, line):
                told.append(note)
            seen.append(fallback.together)
        return seen, told

    for seen, told in run_in_threads(2, looked):
        sizes = [1, 1, 2, 4, 6, 6]
        assert seen[EVERY - 1 :: EVERY] == sizes
        assert seen[3 * EVERY - 2] == 1
        assert len(told) == 3
        assert "from epoch 16 on 2 chunks go through a layer together: history was off by 0.22" in told[0]
        assert "exact" in told[2]


@pytest.mark.parametrize(
    "options",
    [{"history_gradients": True}, {"history_sweeps": 1}, {"history_bound": 0.0}, {"history_bound": 1e9}],
    ids=str,
)
def test_resumed_is_undisturbed(make_graph: MakeGraph, tmp_path: Path, options: dict[str, Any]) -> None:
    """What was kept of gradients, and how many chunks go together, are in the checkpoint."""
    graph, given = make_graph(60), {"chunks": 5, "eval_every": 4, **options}
    whole, _ = trained(graph, 3, max_epochs=9, **given)
    folder = {"run_dir": str(tmp_path / "run"), "checkpoint_every": 6}
    trained(graph, 3, max_epochs=6, **given, **folder)
    found, _ = trained(graph, 3, max_epochs=9, resume="auto", **given, **folder)
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_fallback_changes_what_is_trained(make_graph: MakeGraph) -> None:
    """After the first look, and not before; both runs note what they did."""
    graph, given = make_graph(60), {"chunks": 5, "max_epochs": 2 * EVERY}
    plain, bound = (trained(graph, 2, **given, **more)[1] for more in ({}, {"history_bound": 0.0}))
    losses = [[each["loss"] for each in result.history] for result in (plain, bound)]
    assert losses[0][:EVERY] == losses[1][:EVERY]
    assert losses[0][EVERY + 1] != losses[1][EVERY + 1]

    def noted(line: Collective) -> list[str]:
        model = model_of("gcnii", graph, 0.3)
        step = build(line, graph, model, chunks=5, history_bound=0.0)
        for epoch in range(EVERY):
            stepped(step, model, epoch)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
        return list(step.notes)

    for notes in run_in_threads(2, noted):
        assert "2 chunks go through a layer together" in notes[-1]


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one"):
        Trainer("pipeline", history_gradients=True, history_gamma=2.0)
    with pytest.raises(ConfigError, match="give one"):
        Trainer("pipeline", history_sweeps=1, history_period=3)
    with pytest.raises(ConfigError, match="history_bound=-1"):
        Trainer("pipeline", history_bound=-1)


@pytest.mark.parametrize(
    ("options", "p", "expected"),
    [
        ({}, 0.3, 1),
        ({}, 0.0, 0),
        ({"history_period": 3}, 0.3, 0),
        ({"history_gradients": True}, 0.3, 0),
        ({"chunks": 1}, 0.3, 0),
        ({"exact_layers": True}, 0.3, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gcnii", "deepgcn", "gat"])
def test_a_sweep_by_itself_where_units_are_dropped(
    make_graph: MakeGraph, name: str, options: dict[str, Any], p: float, expected: int
) -> None:
    graph, given = make_graph(60), {"chunks": 5, "history_sweeps": "auto", **options}

    def run(line: Collective) -> int:
        return int(build(line, graph, model_of(name, graph, p), **given).facts().num_sweeps)

    assert run_in_threads(2, run) == [expected] * 2


def test_attention_that_drops_counts_as_dropping(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    dropping = nn.Stack([nn.GATConv(graph.num_features, 4, dropout=0.2), nn.GATConv(4, 3)], dropout=0.0)
    assert pipeline_setup.num_sweeps("auto", dropping, 1, False) == 1
    assert pipeline_setup.num_sweeps("auto", nn.Stack([nn.GATConv(8, 3)], dropout=0.0), 1, False) == 0
    assert Trainer("pipeline").history_sweeps == "auto"
    with pytest.raises(ConfigError, match="history_sweeps"):
        Trainer("pipeline", history_sweeps="often")
