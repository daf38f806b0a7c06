"""``polyhop train``: the options reach the trainer, results are shown, runs continue, and folders are safe."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from polyhop.datasets import load, save


def test_trains_and_shows_the_result(polyhop, small) -> None:
    shown = polyhop("train", *small, "--run-dir", "run")
    assert shown.code == 0, shown.err
    assert "validation accuracy over epochs" in shown.out
    assert "test accuracy" in shown.out
    assert {path.name for path in Path("run").iterdir()} >= {
        *("command.json", "config.json", "metrics.jsonl", "result.json", "model.safetensors", "checkpoints"),
        "curve.png",
    }


def test_json_is_one_document(polyhop, small) -> None:
    shown = polyhop("train", *small, "--json", "--run-dir", "run")
    assert shown.json["epochs"] == 4
    assert 0 <= shown.json["test"] <= 1
    assert shown.json["curve"] == str(Path("run") / "curve.png")


def test_automatic_run_folder(polyhop, small) -> None:
    folder = Path(polyhop("train", *small, "--json").json["run_dir"])
    assert folder.parent == Path("runs")
    assert folder.name.endswith("tiny-graphsage")


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gin", "gcnii", "deepgcn"])
def test_every_model_trains_in_mini_batches(polyhop, small, model: str) -> None:
    more = ["--heads", "4"] if model == "gat" else []
    shown = polyhop(
        "train", *small, "--model", model, *more, "--fanout", "5,-1", "--batch-size", 16, "--json"
    )
    assert shown.code == 0, shown.err
    assert shown.json["steps"] == 4 * 3  # 40 training nodes in batches of 16


def test_aggregated_inputs_are_said_and_kept(polyhop, small) -> None:
    options = ["--fanout", "5,3", "--aggregate-inputs", "--progress", "plain"]
    shown = polyhop("train", *small, *options, "--run-dir", "run")
    assert shown.code == 0, shown.err
    assert "hops drawn 5; the innermost fan-out 3 is not used" in shown.err
    assert json.loads(Path("run/config.json").read_text())["aggregate_inputs"] is True
    refused = polyhop("train", *small, *options, "--model", "gat", "--run-dir", "other")
    assert refused.code == 1
    assert "GATConv: aggregated inputs are not possible" in refused.err
    assert polyhop("train", *small, "--aggregate-inputs").code == 1  # the full graph has no hop to save


def test_features_stay_on_disk(polyhop, small, tiny_dir: Path) -> None:
    save(load("tiny", data_dir=tiny_dir), "folder")
    _, *options = small
    found = {
        where: polyhop(
            *("train", "folder", *options, "--features", where),
            *("--json", "--run-dir", where, "--device", "cpu"),  # a GPU adds in no fixed order
        ).json
        for where in ("memory", "mapped", "disk")
    }
    assert found["disk"]["test"] == found["mapped"]["test"] == found["memory"]["test"]
    assert json.loads(Path("disk/config.json").read_text())["feature_store"] == "disk"
    weights = {where: (Path(where) / "model.safetensors").read_bytes() for where in found}
    assert weights["disk"] == weights["mapped"] == weights["memory"]
    refused = polyhop("train", *small, "--features", "disk")
    assert refused.code == 1
    assert "the graph's features are in memory" in refused.err


def test_learns_the_communities(polyhop, small) -> None:
    shown = polyhop("train", *small, "--epochs", 60, "--dropout", 0.1, "--json")
    assert shown.json["test"] >= 0.75  # of 20 nodes; chance is 0.5


def test_options_reach_the_config(polyhop, small) -> None:
    options = {
        "--optimizer": ("optimizer", "adamw"),
        "--lr": ("lr", 0.02),
        "--weight-decay": ("weight_decay", 0.1),
        "--schedule": ("schedule", "cosine"),
        "--warmup": ("warmup", 2),
        "--clip": ("clip", 1.0),
        "--eval-every": ("eval_every", 2),
        "--patience": ("patience", 3),
        "--seed": ("seed", 5),
        "--batch-size": ("batch_size", 8),
        "--sampler": ("sampler", "labor"),
        "--batch-dependence": ("labor_dependence", 8),
        "--precision": ("precision", "64-true"),
    }
    given = [part for flag, (_, value) in options.items() for part in (flag, value)]
    shown = polyhop("train", *small, *given, "--fanout", "3,2", "--norm", "layer", "--run-dir", "run")
    assert shown.code == 0, shown.err
    config = json.loads(Path("run/config.json").read_text())
    assert {name: config[name] for name, _ in options.values()} == dict(options.values())
    assert (config["num_neighbors"], config["max_epochs"]) == ([3, 2], 4)
    assert json.loads(Path("run/command.json").read_text())["more"] == {"norm": "layer"}


def test_dry_run_writes_nothing(polyhop, small) -> None:
    shown = polyhop("train", *small, "--dry-run", "--fanout", "5,5", "--batch-size", 16)
    assert shown.code == 0
    assert "4 epochs of 3 steps, 40 training nodes" in shown.out
    assert list(Path().iterdir()) == []
    assert polyhop("train", *small, "--dry-run", "--json").json["config"]["max_epochs"] == 4
    on_ranks = polyhop("train", *small, "--dry-run", "--workers", 3, "--strategy", "halo")
    assert "strategy halo, 3 ranks, full graph" in on_ranks.out
    assert list(Path().iterdir()) == []


def test_continues_a_run(polyhop, small) -> None:
    small = [*small, "--device", "cpu"]  # sums on a GPU are not repeatable
    whole = polyhop("train", *small, "--run-dir", "whole", "--json").json
    polyhop("train", *small, "--epochs", 2, "--run-dir", "run")
    rest = polyhop("train", *small, "--run-dir", "run", "--resume", "auto", "--json").json
    for changing in ("seconds", "run_dir", "curve"):
        del whole[changing], rest[changing]
    assert rest == whole
    assert Path("run/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_another_model_does_not_continue_a_run(polyhop, small) -> None:
    polyhop("train", *small, "--run-dir", "run")
    before = Path("run/command.json").read_bytes()
    shown = polyhop("train", *small, "--model", "gcn", "--run-dir", "run", "--resume", "auto")
    assert shown.code == 1
    assert "was made by another run" in shown.err
    assert Path("run/command.json").read_bytes() == before


def test_a_run_is_not_overwritten_unless_asked(polyhop, small) -> None:
    polyhop("train", *small, "--run-dir", "run")
    Path("run/notes.txt").write_text("mine")
    assert "already holds a run" in polyhop("train", *small, "--run-dir", "run").err
    shown = polyhop(
        "train", *small, "--run-dir", "run", "--overwrite", "--model", "gcn", "--epochs", 2, "--json"
    )
    assert shown.json["epochs"] == 2
    assert json.loads(Path("run/command.json").read_text())["model"] == "gcn"
    assert Path("run/notes.txt").read_text() == "mine"


def test_overwrite_replaces_runs_only(polyhop, small) -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("years of work")
    shown = polyhop("train", *small, "--run-dir", "thesis", "--overwrite")
    assert shown.code == 1
    assert "holds no run" in shown.err
    assert polyhop("train", *small, "--run-dir", "new", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "-1"], "lr=-1.0: expected a positive number"),
        (["--fanout", "0,5"], "expected one fan-out of at least 1"),
        (["--optimizer", "adma"], "Did you mean 'adam'?"),
        (["--precision", "16"], "unknown precision '16'"),
        (["--heads", "4"], "--heads is not an option of --model sage; it is one of gat"),
        (["--norm", "batch", "--model", "gcnii"], "--norm is not an option of --model gcnii"),
        (["--model", "gat", "--heads", "3"], "heads=3"),
        (["--split", "9"], "split"),
        (["--resume", "auto"], "resume='auto' needs"),
        (["--device", "tpu"], "tpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_impossible_options_are_explained(polyhop, small, options: list[str], message: str) -> None:
    shown = polyhop("train", *small, *options)
    assert shown.code == 1
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not Path("runs").exists()


def test_graph_without_labels_is_explained(polyhop, tmp_path: Path) -> None:
    Path("edges.csv").write_text("source,target\n0,1\n1,2\n")
    shown = polyhop("train", "edges.csv")
    assert shown.code == 1
    assert "0 features and 0 classes: training needs both" in shown.err


def test_edges_and_nodes_as_tables(polyhop, small) -> None:
    Path("e.csv").write_text("source,target\n" + "".join(f"{i},{(i + 2) % 12}\n" for i in range(12)))
    split = ["train", "train", "val", "test"]
    rows = "".join(f"{i},{i % 2},{i / 12},{i % 2},{split[i // 2 % 4]}\n" for i in range(12))
    Path("n.csv").write_text("id,f0,f1,label,split\n" + rows)
    shown = polyhop("train", "e.csv", "--nodes", "n.csv", *small[3:], "--json")
    assert shown.code == 0, shown.err


def test_works_without_matplotlib(polyhop, small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = polyhop("train", *small, "--run-dir", "run")
    assert shown.code == 0
    assert "picture" not in shown.out
    assert not Path("run/curve.png").exists()


def test_single_epoch_and_no_epoch(polyhop, small) -> None:
    assert "over epochs" not in polyhop("train", *small, "--epochs", 1).out
    assert polyhop("train", *small, "--epochs", 0, "--json").json["curve"] is None


def test_threads(polyhop, small) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        shown = polyhop("train", *small, "--threads", 1, "--dry-run")
        assert "1 threads" in shown.out
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:trace stopped", "ignore:a record of metrics.jsonl is lost")
def test_a_disk_that_is_full_at_any_moment_is_told(polyhop, small, small_disk: Path) -> None:
    """From no room at all to enough: what could not be written, and where; nothing half-written; then it goes on."""
    whole = polyhop("train", *small, "--json", "--run-dir", "elsewhere").json
    run, ballast, told = small_disk / "run", small_disk / "ballast", []
    for free_kb in range(0, 100, 4):
        ballast.write_bytes(bytes((1024 - free_kb) * 1024))
        shown = polyhop("train", *small, "--run-dir", run)
        told.append((shown.code, shown.err))
        assert list(small_disk.rglob(".tmp-*")) == []
        assert shown.code == 0 or f"{run}/" in shown.err.split("polyhop: error: ")[-1], shown.err
        assert "Traceback" not in shown.err
        ballast.unlink()
        if shown.code and not (run / "config.json").exists():
            assert not run.exists()  # it had not begun
        elif shown.code:
            again = polyhop("train", *small, "--run-dir", run, "--resume", "auto", "--json")
            assert (again.code, again.json["test"]) == (0, whole["test"]), again.err
            shutil.rmtree(run)
        else:
            break
    assert told[0][0] == 1
    assert told[-1][0] == 0
    named = {name for name in ("command.json", "config.json", "step-00000004", "model.safetensors", "result.json")
             if any(f"/{name}" in err for code, err in told if code)}  # fmt: skip
    assert len(named) >= 3, named
