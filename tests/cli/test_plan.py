"""``polyhop plan``: assumptions first, then time, cost and value, then plain words; nothing of the features is read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from polyhop.graph import DenseFeatures
from polyhop.serverless import prices as table


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_DATA", raising=False)


def test_text(polyhop) -> None:
    shown = polyhop("plan", "debian-packages", "--strategy", "serverless")
    assert shown.code == 0, shown.err
    order = ["assumed", "63,436 nodes, 637,940 edges", "8 c5n.2xlarge at $0.432/h", "2021-07-01", "an epoch", "CPU only",
             "functions each", "functions on each server", "Tensor work is"]  # fmt: skip
    places = [shown.out.index(part) for part in order]
    assert places == sorted(places)
    assert "pay" in shown.out.splitlines()[-1]


def test_json(polyhop) -> None:
    shown = polyhop(
        "plan", "paper:amazon", "--strategy", "serverless", "--hidden", 64, "--num-servers", 8, "--json"
    )
    assert shown.code == 0, shown.err
    facts = shown.json
    assert facts["cpu"]["seconds"] == pytest.approx(10.3, rel=0.05)
    assert facts["functions"]["num_servers"] == 8
    assert facts["played_s"] == pytest.approx(facts["functions"]["seconds"], rel=0.25)
    assert "9,200,000 nodes" in facts["assumed"]["graph"]
    assert facts["says"]


def test_features_are_not_read(polyhop, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("features were made")

    monkeypatch.setattr(DenseFeatures, "__post_init__", refuse, raising=False)
    monkeypatch.setattr("polyhop.datasets.npz.load_npz", refuse)
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--strategy", "serverless", "--json")
    assert shown.code == 0, shown.err
    assert "80 nodes" in shown.json["assumed"]["graph"]


def test_a_billion_edges_are_not_made(polyhop) -> None:
    shown = polyhop(
        "plan", "synth:papers", "--strategy", "serverless", "--num-servers", 64, "--model", "sage"
    )
    assert shown.code == 0, shown.err
    assert "111,059,956 nodes, 1,615,685,872 edges" in shown.out


def test_options_change_the_plan(polyhop) -> None:
    base = ["plan", "paper:reddit-large", "--strategy", "serverless", "--json"]
    plain = polyhop(*base).json
    for more in (
        ["--servers", "c5n.4xlarge"],
        ["--num-servers", 16],
        ["--function-memory", 1769],
        ["--processor", "arm"],
        ["--staleness", 0],
        ["--halo", 0.5],
        ["--intervals", 33],
        ["--model", "gat", "--heads", 4],
        ["--layers", 3],
    ):
        shown = polyhop(*base, *more)
        assert shown.code == 0, shown.err
        assert shown.json["functions"] != plain["functions"], more


def test_own_prices_and_rates(polyhop, tmp_path: Path) -> None:
    mine = json.loads(table.SHIPPED.read_text())
    mine["servers"]["kinds"]["c5n.2xlarge"]["dollars_per_hour"] = 0.864
    (tmp_path / "mine.json").write_text(json.dumps(mine))
    rates = {"gather": 1e9, "server_flops": 1e10, "function_flops": {"192": 1e9}, "function_bytes": 1e8,
             "server_bytes": 1e9, "scatter_bytes": 1e9, "source": "measured here"}  # fmt: skip
    (tmp_path / "rates.json").write_text(json.dumps(rates))
    base = ["plan", "paper:amazon", "--strategy", "serverless"]
    plain = polyhop(*base, "--json").json
    dearer = polyhop(*base, "--prices", "mine.json", "--json").json
    assert dearer["cpu"]["dollars"] == pytest.approx(2 * plain["cpu"]["dollars"])
    shown = polyhop(*base, "--rates", "rates.json")
    assert "measured here" in shown.out
    assert "p3.2xlarge" not in shown.out  # no rates of GPUs, no comparison


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["debian-packages", "--strategy", "halo"], "--strategy halo: only serverless is planned so far"),
        (["debian-package", "--strategy", "serverless"], "Did you mean 'debian-packages'?"),
        (["paper:amazone", "--strategy", "serverless"], "Did you mean 'paper:amazon'?"),
        (["paper:amazon", "--strategy", "serverless", "--servers", "c5n.2xl"], "Did you mean 'c5n.2xlarge'?"),
        (["paper:amazon", "--strategy", "serverless", "--model", "gin"], "unknown model 'gin'"),
        (["paper:amazon", "--strategy", "serverless", "--function-memory", "64"], "128 to 10240 MB"),
        (["paper:amazon", "--strategy", "serverless", "--gpu-servers", "c5.xlarge"], "no GPU in it"),
        (["paper:amazon", "--strategy", "serverless", "--deadline", "0.001"], "no number of functions keeps"),
        (["rmat:?scale=4", "--strategy", "serverless"], "a plan needs both"),
    ],
)
def test_refused(polyhop, arguments: list[str], told: str) -> None:
    shown = polyhop("plan", *arguments)
    assert shown.code == 1
    assert told in shown.err


def test_order_is_that_of_the_layers(polyhop, tmp_path: Path) -> None:
    """Wide rows are mapped first where that is cheaper, as in training."""
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 50, (2, 400))
    edges = np.unique(edges, axis=1)
    for name, columns in (("wide", 900), ("narrow", 2)):
        np.savez(
            tmp_path / f"{name}.npz",
            edge_index=edges,
            x=np.zeros((50, columns), "float32"),
            y=np.arange(50) % 3,
        )
        shown = polyhop(
            "plan", f"{name}.npz", "--strategy", "serverless", "--json", "--hidden", 16, "--num-servers", 1
        )
        assert shown.code == 0, shown.err
        assert shown.json["assumed"]["model"].endswith(
            f"first: {'map' if name == 'wide' else 'aggregate'}, map"
        )
