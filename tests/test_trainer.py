"""Whole runs: they learn, repeat bit for bit, stop, save, and refuse what cannot be."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyhop
from polyhop.errors import CheckpointError, ConfigError, DivergedError, Interrupted, UnsupportedError
from polyhop.graph import DenseFeatures, Graph
from polyhop.nn import GAT, GCN, GCNII, GIN, DeepGCN, GraphSAGE, Stack
from polyhop.plan import PLAN_FILE, read_plan
from polyhop.train import checkpoint, config

MakeGraph = Callable[..., Graph]


def model_of(graph: Graph, kind: type[nn.Module] = GraphSAGE, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    given = {"num_layers": 2, "out_channels": graph.num_classes, "dropout": 0.3, **options}
    return kind(graph.num_features, 16, **given)


def trainer(**options: Any) -> polyhop.Trainer:
    return polyhop.Trainer(**{"progress": "none", "device": "cpu", "max_epochs": 6, **options})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


MODES: dict[str, dict[str, Any]] = {
    "full graph": {},
    "mini-batch": {"num_neighbors": [5, 3], "batch_size": 32},
}


@pytest.fixture(scope="module")
def graph(make_graph: MakeGraph) -> Graph:
    return make_graph(240)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GAT, GIN, GCNII, DeepGCN])
def test_every_model_learns(graph: Graph, mode: str, kind: type[nn.Module]) -> None:
    # A plain GIN ends in a tiny MLP, which some draws leave with dead units; with "cat" it ends in a linear map.
    model = model_of(graph, kind, **({"jk": "cat"} if kind is GIN else {}))
    result = trainer(max_epochs=25, **MODES[mode]).fit(model, graph)
    assert result.test is not None
    assert result.test > 0.65  # chance is 0.33
    assert result.history[-1]["loss"] < result.history[0]["loss"]


@pytest.mark.parametrize("metric", ["accuracy", "roc_auc", "f1_micro"])
@pytest.mark.parametrize("mode", MODES)
def test_multilabel_learns(make_graph: MakeGraph, metric: str, mode: str) -> None:
    graph = make_graph(240, kind="multi")
    result = trainer(max_epochs=25, metric=metric, **MODES[mode]).fit(model_of(graph), graph)
    assert result.metric == metric
    assert result.test is not None
    assert result.test > 0.7


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_formats_learn(make_graph: MakeGraph, precision: str, mode: str, sparse: bool) -> None:
    graph = make_graph(240, sparse=sparse)
    model = model_of(graph, GCN)
    result = trainer(max_epochs=20, precision=precision, **MODES[mode]).fit(model, graph)
    assert result.test is not None
    assert result.test > 0.6
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert {p.dtype for p in model.parameters()} == {expected}


@pytest.mark.parametrize("options", [
    {"optimizer": "adamw", "weight_decay": 0.01, "schedule": "cosine", "warmup": 3},
    {"optimizer": "sgd", "lr": 0.5, "momentum": 0.9, "clip": 1.0, "schedule": "step", "decay_every": 8},
    {"optimizer": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01), "schedule": "linear"},
    {"num_neighbors": [5, 3], "sampler": "labor", "batch_size": 16, "num_workers": 0},
])  # fmt: skip
def test_options_learn(graph: Graph, options: dict[str, Any]) -> None:
    result = trainer(max_epochs=20, **options).fit(model_of(graph, dropout=0.0), graph)
    assert result.test is not None
    assert result.test > 0.6


def test_learning_rates_follow_the_schedule(graph: Graph) -> None:
    result = trainer(max_epochs=4, lr=0.08, schedule="linear").fit(model_of(graph), graph)
    assert [record["lr"] for record in result.history] == pytest.approx([0.08, 0.06, 0.04, 0.02])


@pytest.mark.parametrize("mode", MODES)
def test_same_seed_same_weights_whatever_the_global_generator(graph: Graph, mode: str) -> None:
    runs = []
    for before in (1, 2):
        model = model_of(graph, GAT)
        torch.manual_seed(before)
        torch.rand(before)
        state = torch.get_rng_state()
        trainer(**MODES[mode]).fit(model, graph)
        assert torch.equal(torch.get_rng_state(), state)  # left as it was found
        runs.append(weights(model))
    assert_same(*runs)
    other = model_of(graph, GAT)
    trainer(seed=1, **MODES[mode]).fit(other, graph)
    assert any(
        not torch.equal(a, b) for a, b in zip(runs[0].values(), other.state_dict().values(), strict=True)
    )


def test_a_plain_module_with_torch_s_own_dropout_repeats_too(graph: Graph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = pyg.GCNConv(8, 16), pyg.GCNConv(16, 3)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            hidden = nn.functional.dropout(self.a(x, edge_index).relu(), training=self.training)
            return self.b(hidden, edge_index)

    runs = []
    for before in (1, 2):
        torch.manual_seed(0)
        model = Net()
        torch.manual_seed(before)
        result = trainer(max_epochs=20).fit(model, graph)
        runs.append(weights(model))
    assert_same(*runs)
    assert result.test is not None
    assert result.test > 0.6
    assert trainer().evaluate(model, graph)["accuracy"] == result.test


def test_wrapped_pyg_layers_train_on_mini_batches(graph: Graph) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    model = Stack([pyg.SAGEConv(8, 16), pyg.SAGEConv(16, 3)])
    result = trainer(max_epochs=15, **MODES["mini-batch"]).fit(model, graph)
    assert result.test is not None
    assert result.test > 0.6


def test_early_stopping_leaves_the_best_weights(graph: Graph) -> None:
    model = model_of(graph)
    result = trainer(max_epochs=200, patience=5, lr=0.05).fit(model, graph)
    assert result.is_early_stopped
    assert result.epochs < 200
    vals = [record["val"] for record in result.history]
    assert result.best_val == max(vals)
    assert result.best_epoch == vals.index(max(vals)) + 1 == result.epochs - 5
    found = trainer().evaluate(model, graph, "val")
    assert found["accuracy"] == result.best_val
    assert found["loss"] == pytest.approx(result.history[result.best_epoch - 1]["val_loss"])
    assert trainer().evaluate(model, graph)["accuracy"] == result.test


def test_no_validation_nodes(graph: Graph) -> None:
    assert graph.split is not None
    bare = replace(graph, split=replace(graph.split, val=graph.split.val[:0]))
    model = model_of(graph)
    result = trainer().fit(model, bare)
    assert result.best_val is None
    assert result.test == result.history[-1]["test"]
    with pytest.raises(ConfigError, match="patience needs validation nodes"):
        trainer(patience=2).fit(model, bare)
    with pytest.raises(ConfigError, match="no labelled nodes in its val split"):
        trainer().evaluate(model, bare, "val")


def test_zero_epochs(graph: Graph) -> None:
    model = model_of(graph)
    before = weights(model)
    result = trainer(max_epochs=0).fit(model, graph)
    assert (result.epochs, result.history, result.test) == (0, [], None)
    assert_same(before, weights(model))


def test_callbacks_see_records_and_can_stop(graph: Graph) -> None:
    seen: list[dict[str, Any]] = []

    def stop_at_two(record: dict[str, Any]) -> bool:
        seen.append(record)
        return record["epoch"] == 2

    result = trainer(callbacks=[stop_at_two, lambda record: None]).fit(model_of(graph), graph)
    assert [record["epoch"] for record in seen] == [1, 2]
    assert result.epochs == 2


@pytest.mark.parametrize("mode", MODES)
def test_prediction_equals_the_forward_pass(graph: Graph, mode: str, tmp_path: Path) -> None:
    model = model_of(graph, GCN)
    trainer(max_epochs=2, **MODES[mode]).fit(model, graph)
    model.eval()
    with torch.no_grad():
        expected = model(graph.x.all(), graph.edge_index)
    model.train()
    for options in ({}, {"memory": "20kB"}, {"memory": "20kB", "spill_dir": tmp_path / "rows"}):
        torch.testing.assert_close(trainer(**options).predict(model, graph), expected, rtol=1e-5, atol=1e-5)
    mapped = trainer(memory=20_000).predict(model, graph, out=tmp_path / "out.npy")
    assert isinstance(mapped, np.memmap)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected.numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"written as \.npy"):
        trainer().predict(model, graph, out=tmp_path / "out.csv")
    assert model.training


# The run folder


def test_what_a_run_leaves_behind(graph: Graph, tmp_path: Path) -> None:
    model = model_of(graph)
    run = tmp_path / "run"
    result = trainer(run_dir=run, checkpoint_every=4, **MODES["mini-batch"]).fit(model, graph)
    assert result.run_dir == str(run)
    names = {path.name for path in run.iterdir()} - {".lock"}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "trace-rank0.jsonl",
        "checkpoints",
        "model.safetensors",
        "plan.json",
        "result.json",
    }
    assert json.loads((run / "config.json").read_text())["num_neighbors"] == [5, 3]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records == json.loads(json.dumps(result.history))
    assert {"epoch", "step", "loss", "lr", "val", "test", "val_loss", "seconds"} <= records[0].keys()
    trace = [json.loads(line) for line in (run / "trace-rank0.jsonl").read_text().splitlines()]
    spans = {record["name"] for record in trace if record["kind"] == "span"}
    assert spans == {"sample", "load", "wait", "compute", "evaluate", "checkpoint"}
    assert json.loads((run / "result.json").read_text())["test"] == result.test
    from safetensors.torch import load_file

    assert_same(load_file(run / "model.safetensors"), weights(model))
    assert all(path.name.startswith("step-") for path in (run / "checkpoints").iterdir())
    assert len(list((run / "checkpoints").iterdir())) in (2, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_keeps_what_it_was_expected_to_take(graph: Graph, mode: str, tmp_path: Path) -> None:
    found = {}
    for foresee in (True, False):
        model = model_of(graph)
        trainer(run_dir=tmp_path / str(foresee), foresee=foresee, **MODES[mode]).fit(model, graph)
        found[foresee] = weights(model)
    plan = read_plan(tmp_path / "True" / PLAN_FILE)
    assert (plan.asked, plan.chosen.strategy, plan.num_ranks) == ("single", "single", 1)
    assert plan.chosen.epoch_s > 0
    assert not (tmp_path / "False" / PLAN_FILE).exists()
    assert_same(found[True], found[False])


def test_what_is_not_foreseen_is_trained_all_the_same(graph: Graph, tmp_path: Path, capsys: Any) -> None:
    given = {"aggregate_inputs": True, "progress": "plain", "max_epochs": 2, **MODES["mini-batch"]}
    result = trainer(run_dir=tmp_path / "run", **given).fit(model_of(graph), graph)
    assert result.epochs == 2
    assert not (tmp_path / "run" / PLAN_FILE).exists()
    said = capsys.readouterr()
    assert "'single' is not foreseen with aggregate_inputs" in said.out + said.err


def test_automatic_folder(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = trainer(max_epochs=1, run_dir="auto").fit(model_of(graph), graph)
    assert result.run_dir is not None
    assert result.run_dir.startswith("runs/")
    assert result.run_dir.endswith("-planted-graphsage")
    assert (tmp_path / result.run_dir / "result.json").exists()


class Stopper:
    """A callback that asks the process to stop after an epoch."""

    def __init__(self, epoch: int, number: signal.Signals = signal.SIGTERM) -> None:
        self.epoch, self.number = epoch, number

    def __call__(self, record: dict[str, Any]) -> None:
        if record["epoch"] == self.epoch:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("mode", MODES)
def test_a_signal_saves_and_resume_gives_the_same_weights(
    graph: Graph, tmp_path: Path, number: signal.Signals, mode: str
) -> None:
    whole = model_of(graph, GAT)
    options = {**MODES[mode], "patience": 30, "schedule": "cosine", "warmup": 2}
    expected = trainer(**options).fit(whole, graph)
    model = model_of(graph, GAT)
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match=f"{number.name}.*continue with resume='auto'"):
        trainer(run_dir=run, callbacks=[Stopper(3, number)], **options).fit(model, graph)
    assert not (run / "result.json").exists()
    model = model_of(graph, GAT, seed=99)  # its weights are replaced by the checkpoint's
    result = trainer(run_dir=run, resume="auto", **options).fit(model, graph)
    assert_same(weights(model), weights(whole))
    assert (result.best_val, result.test, result.best_epoch) == (
        expected.best_val,
        expected.test,
        expected.best_epoch,
    )
    for a, b in zip(result.history, expected.history, strict=True):
        assert {k: v for k, v in a.items() if k not in ("seconds", "train_seconds")} == {
            k: v for k, v in b.items() if k not in ("seconds", "train_seconds")
        }


def test_without_a_folder_a_signal_says_nothing_was_saved(graph: Graph) -> None:
    with pytest.raises(Interrupted, match="nothing was saved"):
        trainer(callbacks=[Stopper(2)]).fit(model_of(graph), graph)


def test_resume_auto_starts_afresh_in_an_empty_folder_and_is_done_with_a_finished_one(
    graph: Graph, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    model = model_of(graph)
    first = trainer(run_dir=run, resume="auto").fit(model, graph)
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    again = model_of(graph, seed=5)
    second = trainer(run_dir=run, resume="auto").fit(again, graph)
    assert_same(weights(model), weights(again))
    assert (second.test, second.epochs, second.history) == (first.test, first.epochs, first.history)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == kept


def test_a_longer_run_continues_a_shorter_one(graph: Graph, tmp_path: Path) -> None:
    whole, model = model_of(graph), model_of(graph)
    trainer(max_epochs=6).fit(whole, graph)
    trainer(max_epochs=3, run_dir=tmp_path / "run").fit(model, graph)
    again = model_of(graph)
    trainer(max_epochs=6, run_dir=tmp_path / "run", resume="auto").fit(again, graph)
    assert_same(weights(whole), weights(again))


def test_resume_from_a_path(graph: Graph, tmp_path: Path) -> None:
    model = model_of(graph)
    trainer(max_epochs=3, run_dir=tmp_path / "a", checkpoint_every=1, keep_checkpoints=9).fit(model, graph)
    whole = model_of(graph)
    trainer(max_epochs=5).fit(whole, graph)
    for source in (tmp_path / "a", tmp_path / "a" / "checkpoints" / "step-00000001"):
        again = model_of(graph)
        result = trainer(max_epochs=5, run_dir=tmp_path / f"b{source.name}", resume=source).fit(again, graph)
        assert result.epochs == 5
        assert_same(weights(whole), weights(again))
    in_place = model_of(graph)
    result = trainer(max_epochs=5, resume=tmp_path / "a").fit(in_place, graph)
    assert result.run_dir == str(tmp_path / "a")
    assert_same(weights(whole), weights(in_place))
    with pytest.raises(CheckpointError, match="no checkpoint to resume"):
        trainer(resume=tmp_path / "nowhere", run_dir=tmp_path / "c").fit(model, graph)
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer(resume=tmp_path / "a", run_dir=tmp_path / "ba").fit(model, graph)


def test_resume_refuses_another_model_graph_or_option(
    graph: Graph, make_graph: MakeGraph, tmp_path: Path
) -> None:
    trainer(max_epochs=2, run_dir=tmp_path).fit(model_of(graph), graph)
    again = {"max_epochs": 4, "run_dir": tmp_path, "resume": "auto"}
    with pytest.raises(CheckpointError, match=r"config.lr: the checkpoint has 0.01, this run 0.5"):
        trainer(lr=0.5, **again).fit(model_of(graph), graph)
    with pytest.raises(CheckpointError, match=r"model.class: the checkpoint has 'GraphSAGE', this run 'GCN'"):
        trainer(**again).fit(model_of(graph, GCN), graph)
    with pytest.raises(CheckpointError, match=r"graph.structure: "):
        trainer(**again).fit(model_of(graph), make_graph(240, seed=1))
    trainer(**again).fit(model_of(graph), graph)  # and the folder is still good


def test_resume_skips_a_damaged_checkpoint(graph: Graph, tmp_path: Path) -> None:
    whole = model_of(graph)
    trainer(max_epochs=5).fit(whole, graph)
    trainer(max_epochs=3, run_dir=tmp_path, checkpoint_every=1).fit(model_of(graph), graph)
    os.truncate(tmp_path / "checkpoints" / "step-00000003" / "optimizer.safetensors", 100)
    model = model_of(graph)
    with pytest.warns(RuntimeWarning, match="step-00000003/optimizer.safetensors is damaged"):
        trainer(max_epochs=5, run_dir=tmp_path, resume="auto").fit(model, graph)
    assert_same(weights(whole), weights(model))


def test_other_threads_warn(graph: Graph, tmp_path: Path) -> None:
    trainer(max_epochs=1, run_dir=tmp_path).fit(model_of(graph), graph)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.warns(RuntimeWarning, match=f"used {threads} threads, this one {threads + 1}"):
            trainer(max_epochs=2, run_dir=tmp_path, resume="auto").fit(model_of(graph), graph)
    finally:
        torch.set_num_threads(threads)


def test_a_full_disk_keeps_the_last_good_checkpoint(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.write_synced

    def full(path: Path, data: bytes) -> None:
        if "step-00000003" in str(path) and path.name == "state.json":
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    model = model_of(graph)
    with pytest.raises(CheckpointError, match=r"No space left.*last good checkpoint is .*step-00000002"):
        trainer(run_dir=tmp_path, checkpoint_every=1).fit(model, graph)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]
    monkeypatch.undo()
    whole = model_of(graph)
    trainer().fit(whole, graph)
    trainer(run_dir=tmp_path, resume="auto").fit(model, graph)
    assert_same(weights(whole), weights(model))


# What goes wrong


def test_a_loss_that_is_not_finite_stops_the_run(graph: Graph, tmp_path: Path) -> None:
    model = model_of(graph, norm=None, act=None, dropout=0.0)
    with pytest.raises(DivergedError, match=r"at step \d+|not finite after step \d+"):
        trainer(optimizer="sgd", lr=1e30, max_epochs=50, run_dir=tmp_path, checkpoint_every=1).fit(
            model, graph
        )
    kept = checkpoint.Checkpoints(tmp_path / "checkpoints").newest()
    if kept is not None:
        assert all(bool(torch.isfinite(value).all()) for value in kept.tensors["model"].values())


def test_what_the_graph_lacks_is_said(graph: Graph) -> None:
    model = model_of(graph)
    with pytest.raises(ConfigError, match="no labels"):
        trainer().fit(model, replace(graph, y=None))
    with pytest.raises(ConfigError, match="no features"):
        trainer().fit(model, replace(graph, x=None))
    assert graph.split is not None
    empty = replace(graph, split=replace(graph.split, train=graph.split.train[:0]))
    with pytest.raises(ConfigError, match="train set is empty"):
        trainer().fit(model, empty)
    with pytest.raises(ConfigError, match="8 features per node, graph 'planted' has 5"):
        trainer().fit(model, replace(graph, x=DenseFeatures(torch.zeros(240, 5))))


def test_what_cannot_go_together_is_said(graph: Graph) -> None:
    with pytest.raises(ConfigError, match="3 fan-outs, the model has 2 layers"):
        trainer(num_neighbors=[2, 2, 2]).fit(model_of(graph), graph)
    with pytest.raises(UnsupportedError, match="Linear has no begin/layer/finish"):
        trainer(num_neighbors=[2]).fit(nn.Linear(8, 3), graph)
    with pytest.raises(ConfigError, match="Did you mean 'single'"):
        polyhop.Trainer("singel", progress="none").fit(model_of(graph), graph)
    with pytest.raises(TypeError, match="learning_rate"):
        polyhop.Trainer(learning_rate=0.1)


def test_a_failed_start_leaves_the_folder_unlocked(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        trainer(num_neighbors=[2, 2, 2], run_dir=tmp_path / "run").fit(model_of(graph), graph)
    trainer(max_epochs=1, run_dir=tmp_path / "run").fit(model_of(graph), graph)


def test_fit_in_another_thread(graph: Graph) -> None:
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(trainer().fit(model_of(graph), graph).test))
    thread.start()
    thread.join()
    assert found
    assert found[0] is not None
    assert not math.isnan(found[0])


def test_first_lines(graph: Graph, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trainer(max_epochs=1, progress="plain", run_dir=tmp_path, num_neighbors=[4, 2]).fit(
        model_of(graph), graph
    )
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["data", "machine", "kernels", "model", "plan", "run"]
    assert f"planted  240 nodes  {graph.num_edges:,} edges  8 features  3 classes" in lines[0]
    assert "fan-outs 4, 2" in lines[4]
    assert str(tmp_path) in lines[5]
    assert lines[-1].startswith("result    accuracy  val ")


def test_the_trainer_has_every_option_of_its_config() -> None:
    assert issubclass(polyhop.Trainer, config.Config)
    assert polyhop.Trainer("single", lr=0.5).lr == 0.5
