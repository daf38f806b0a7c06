"""``polyhop predict``: a finished and an interrupted run, both kinds of file, and folders that are no run."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest


def read_csv(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def run(polyhop, small) -> dict[str, float]:
    """The result of a run in ./run."""
    shown = polyhop("train", *small, "--run-dir", "run", "--json")
    assert shown.code == 0, shown.err
    return shown.json


def test_scores_are_those_of_the_run(polyhop, run) -> None:
    shown = polyhop("predict", "run", "--json").json
    assert shown["scores"]["val"] == pytest.approx(run["best_val"])
    assert shown["scores"]["test"] == pytest.approx(run["test"])
    assert shown["metric"] == "accuracy"


def test_table_for_people(polyhop, run) -> None:
    shown = polyhop("predict", "run", "--out", "p.csv")
    assert f"test accuracy   {100 * run['test']:.2f} %" in shown.out
    assert "written" in shown.out


def test_npy_holds_scores_and_csv_their_best(polyhop, run) -> None:
    assert polyhop("predict", "run", "--out", "p.npy").code == 0
    assert polyhop("predict", "run", "--out", "p.csv").code == 0
    scores = np.load("p.npy")
    assert scores.shape == (80, 2)
    rows = read_csv("p.csv")
    assert [int(row["id"]) for row in rows] == list(range(80))
    assert [int(row["class"]) for row in rows] == scores.argmax(1).tolist()
    assert all(0.5 <= float(row["probability"]) <= 1 for row in rows)
    assert not list(Path().glob(".p.csv*"))


def test_interrupted_run_uses_its_checkpoint(polyhop, run) -> None:
    whole = polyhop("predict", "run", "--json").json
    Path("run/model.safetensors").unlink()
    shown = polyhop("predict", "run", "--json")
    assert "did not end" in shown.err
    assert shown.json["scores"] == whole["scores"]
    assert "checkpoints" in shown.json["weights"]


def test_another_graph(polyhop, run, two_communities) -> None:
    Path("data").mkdir()
    np.savez("data/newer.npz", **two_communities(num_nodes=60, seed=3))
    shown = polyhop("predict", "run", "--data", "newer", "--data-dir", "data", "--json").json
    assert (shown["graph"], shown["nodes"]) == ("newer", 60)
    np.savez("data/wider.npz", **two_communities(num_features=9))
    refused = polyhop("predict", "run", "--data", "wider", "--data-dir", "data")
    assert refused.code == 1
    assert "takes 12 features" in refused.err


def test_unlabelled_graph_has_no_scores(polyhop, run, two_communities) -> None:
    Path("data").mkdir()
    arrays = {
        name: value for name, value in two_communities().items() if name in ("edge_index", "x", "num_nodes")
    }
    np.savez("data/blank.npz", **arrays)
    shown = polyhop("predict", "run", "--data", "blank", "--data-dir", "data", "--json", "--out", "p.csv")
    assert shown.code == 0, shown.err
    assert shown.json["scores"] == {}
    assert len(read_csv("p.csv")) == 80


def test_multilabel_graph(polyhop, small, two_communities) -> None:
    Path("data").mkdir()
    arrays = two_communities()
    labels = np.stack([arrays["y"], 1 - arrays["y"], np.ones_like(arrays["y"])], 1)
    np.savez("data/many.npz", **{**arrays, "y": labels, "num_classes": np.int64(3)})
    shown = polyhop("train", "many", "--data-dir", "data", *small[3:], "--epochs", 30, "--run-dir", "run")
    assert shown.code == 0, shown.err
    assert polyhop("predict", "run", "--out", "p.csv").code == 0
    rows = read_csv("p.csv")
    assert all("2" in row["class"].split(";") for row in rows)  # the label that everyone has
    assert all(len(row["class"].split(";")) == len(row["probability"].split(";")) for row in rows)


def test_folders_that_are_no_run(polyhop, run) -> None:
    assert "is not a folder" in polyhop("predict", "nowhere").err
    Path("empty").mkdir()
    assert "is not a run of 'polyhop train'" in polyhop("predict", "empty").err
    Path("run/command.json").write_text("{")
    assert "command.json is damaged" in polyhop("predict", "run").err
    Path("run/command.json").write_text(json.dumps({"source": "tiny", "colour": "red"}))
    shown = polyhop("predict", "run")
    assert "command.json is damaged" in shown.err
    assert shown.code == 1


def test_run_without_weights(polyhop, run) -> None:
    Path("run/model.safetensors").unlink()
    shutil.rmtree("run/checkpoints")
    shown = polyhop("predict", "run")
    assert shown.code == 1
    assert shown.err.count("\n") == 1
