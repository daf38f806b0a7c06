"""``polyhop plan``: assumptions first, then time, cost and value, then plain words; nothing of the features is read."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

from polyhop.cli import plan
from polyhop.graph import DenseFeatures
from polyhop.nn import GraphSAGE
from polyhop.serverless import prices as table
from polyhop.trainer import Trainer


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
        (
            ["debian-packages", "--strategy", "halo"],
            "'halo' cannot train this model so on 1 rank: give --workers 2 or more",
        ),
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


# ---------------------------------------------------------------- all strategies


def test_all_ways_are_ranked(polyhop, tiny_dir: Path) -> None:
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--hidden", 8, "--explain")
    assert shown.code == 0, shown.err
    order = ["assumed", "2, 1 to a core", "an epoch", "serverless", "approximate"]
    places = [shown.out.index(part) for part in order]
    assert places == sorted(places)
    lines = shown.out.splitlines()
    (at,) = [at for at, line in enumerate(lines) if "an epoch expected" in line]
    assert lines[at + 1].startswith("next ")


def test_partitioners_are_compared_and_the_best_is_obeyed(polyhop, tiny_dir: Path, tmp_path: Path) -> None:
    given = ["tiny", "--data-dir", tiny_dir, "--workers", 2, "--hidden", 8]
    shown = polyhop("plan", *given, "--partitioner", "compare", "--json", "--out", tmp_path / "plan.json")
    assert shown.code == 0, shown.err
    told = dict(shown.json["assumed"])
    others = {what.removeprefix("parts by ") for what in told if what.startswith("parts by ")}
    best = shown.json["partitioner"]
    assert others | {best} >= {"fennel", "ldg", "hash"}
    assert best not in others
    alone = polyhop("plan", *given, "--partitioner", min(others), "--json").json
    assert alone["partitioner"] == min(others)
    assert alone["chosen"]["epoch_s"] >= shown.json["chosen"]["epoch_s"] * 0.999
    cuts = []
    for number, more in enumerate(
        (["--plan", tmp_path / "plan.json"], ["--partitioner", best], ["--partitioner", "block"])
    ):
        folder = tmp_path / str(number)
        run = polyhop("train", *given, *more, "--epochs", 1, "--run-dir", folder, "--json")
        assert run.code == 0, run.err
        cuts.append(json.loads((folder / "partition.json").read_text())["cut"])
    assert cuts[0] == cuts[1] != cuts[2]


@pytest.mark.parametrize(
    ("more", "strategies"),
    [
        ([], {"halo", "pipeline", "serverless"}),
        (["--fanout", "3,3"], {"data", "macro", "split", "pushpull"}),
        (["--model", "gat", "--fanout", "3,3"], {"data", "macro", "split", "pushpull"}),
        (["--model", "gcnii", "--layers", "4"], {"halo", "pipeline"}),
    ],
)
def test_every_strategy_is_planned(polyhop, tiny_dir: Path, more: list[str], strategies: set[str]) -> None:
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--hidden", 8, *more, "--json")
    assert shown.code == 0, shown.err
    ranked = [shown.json["chosen"], *shown.json["others"]]
    assert {each["strategy"] for each in ranked} == strategies
    assert all(each["epoch_s"] > 0 and each["memory_bytes"]["training"] > 0 for each in ranked)
    times = [each["epoch_s"] for each in ranked if not each["why_not"]]
    assert times[1:] == sorted(times[1:])
    assert len(shown.json["why"]) == 2


def test_features_are_never_read_for_any_plan(
    polyhop, monkeypatch: pytest.MonkeyPatch, tiny_dir: Path
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("features were read")

    monkeypatch.setattr("polyhop.datasets.npz._features", refuse)
    for more in ([], ["--fanout", "3,3"]):
        shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, *more, "--json")
        assert shown.code == 0, shown.err


def test_text_of_features_is_not_read(polyhop, tmp_path: Path) -> None:
    """Words in their place, which no load takes, are no hindrance; how many columns there are is known all the same."""
    nodes, width = 60, 5
    edges = [(v, (v + step) % nodes) for v in range(nodes) for step in (1, 7)]
    (tmp_path / "tab").mkdir()
    (tmp_path / "tab" / "edges.csv").write_text("src,dst\n" + "".join(f"{u},{v}\n" for u, v in edges))
    header = "label,split," + ",".join(f"f{k}" for k in range(width))
    rows = [f"{v % 3},{('train', 'val', 'test')[v % 3]},{'word,' * (width - 1)}word" for v in range(nodes)]
    (tmp_path / "tab" / "nodes.csv").write_text("\n".join([header, *rows]) + "\n")
    raw, split = tmp_path / "ogbn_arxiv" / "raw", tmp_path / "ogbn_arxiv" / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    for file, lines in {
        raw / "edge": [f"{u},{v}" for u, v in edges],
        raw / "num-node-list": [str(nodes)],
        raw / "node-label": [str(v % 3) for v in range(nodes)],
        raw / "node-feat": [",".join(["word"] * width)] * nodes,
        **{split / name: map(str, range(at, nodes, 3)) for at, name in enumerate(("train", "valid", "test"))},
    }.items():
        file.with_suffix(".csv.gz").write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
    for name in ("tab", "ogbn_arxiv"):
        for more in (
            ["--workers", 2],
            ["--cluster", "p4d.24xlarge"],
            ["--strategy", "serverless", "--num-servers", 1],
        ):
            shown = polyhop("plan", name, *more, "--hidden", 16, "--json")
            assert shown.code == 0, (name, more, shown.err)
            assert shown.json["assumed"], (name, more)
        assert f"columns {width} > 16 > 3" in shown.json["assumed"]["model"]


def test_one_strategy(polyhop, tiny_dir: Path) -> None:
    shown = polyhop(
        "plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--strategy", "pipeline", "--json"
    )
    assert shown.json["chosen"]["strategy"] == "pipeline"
    assert shown.json["chosen"]["is_exact"]
    shown = polyhop(
        "plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--strategy", "serverless", "--json"
    )
    assert shown.json["chosen"]["strategy"] == "serverless", "on ranks, not in a cloud"


def test_impossible_limits_get_the_nearest_plan_and_what_would_have_to_change(
    polyhop, tiny_dir: Path
) -> None:
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--memory", "1MB")
    assert shown.code == 0, shown.err
    assert "nothing fits: the nearest is" in shown.out
    assert "give --memory" in shown.out
    facts = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--deadline", 1e-9, "--json").json
    assert not facts["fits"]
    assert any("fewer epochs" in line for line in facts["advice"])


def test_the_column_of_memory_is_what_must_be_given(polyhop, tiny_dir: Path) -> None:
    given = ["plan", "tiny", "--data-dir", tiny_dir, "--workers", 2]
    shown = polyhop(*given, "--memory", "1MB")
    (advised,) = [
        line.removeprefix("give --memory ")
        for line in shown.out.splitlines()
        if line.startswith("give --memory")
    ]
    (nearest,) = re.findall(r"nothing fits: the nearest is .*, which needs (.*?) a rank", shown.out)
    assert nearest in next(line for line in shown.out.splitlines() if "1.0 x" in line).split("needs")[0]
    assert polyhop(*given, "--memory", advised, "--json").json["fits"]


def test_a_slow_link_changes_the_plan(polyhop, tiny_dir: Path) -> None:
    given = ["plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--hidden", 8, "--json"]
    slow = polyhop(*given, "--link", "1mbit", "--latency", 20)
    assert slow.json["chosen"]["epoch_s"] > 5 * polyhop(*given).json["chosen"]["epoch_s"]
    assert "0.001 Gbit/s" in dict(slow.json["assumed"])["links"]


def test_a_plan_is_written_and_obeyed(polyhop, small: list[str], tiny_dir: Path) -> None:
    given = ["--workers", 2, "--fanout", "3,3", "--hidden", 16]
    shown = polyhop(
        "plan", "tiny", "--data-dir", tiny_dir, *given, "--strategy", "split", "--out", "plan.json"
    )
    assert shown.code == 0, shown.err
    assert "--plan plan.json" in shown.out
    shown = polyhop(
        "train", *small, "--workers", 2, "--fanout", "3,3", "--plan", "plan.json", "--run-dir", "run"
    )
    assert shown.code == 0, shown.err
    config = json.loads(Path("run/config.json").read_text())
    planned = json.loads(Path("plan.json").read_text())["chosen"]["options"]
    assert (config["strategy"], config["split_depth"]) == ("split", planned["split_depth"])
    assert json.loads(Path("run/plan.json").read_text()) == json.loads(Path("plan.json").read_text()), "kept"


def test_a_plan_for_elsewhere_that_does_not_fit(polyhop, small: list[str], tiny_dir: Path) -> None:
    """It is obeyed and kept, and what it breaks is told."""
    given = ["--workers", 2, "--fanout", "3,3", "--hidden", 16]
    elsewhere = ["--link", "1mbit", "--latency", 20, "--memory", "1MB"]
    polyhop("plan", "tiny", "--data-dir", tiny_dir, *given, *elsewhere, "--out", "slow.json")
    shown = polyhop("train", *small, *given, "--plan", "slow.json", "--run-dir", "run")
    assert shown.code == 0, shown.err
    assert "nothing fits: the nearest is" in shown.err
    assert json.loads(Path("run/plan.json").read_text()) == json.loads(Path("slow.json").read_text())


def test_a_host_learns_from_its_own_plans_alone(make_graph, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, taught = make_graph(200), []
    monkeypatch.setattr("polyhop.trainer.learn_from", lambda *given: taught.append(given))
    model = GraphSAGE(graph.num_features, 8, num_layers=2, out_channels=graph.num_classes)
    trainer = Trainer("auto", max_epochs=1, progress="none")
    made = trainer.plan(model, graph)
    trainer.fit(model, graph, plan=made)
    assert taught == [], "it may be of elsewhere"
    trainer.fit(model, graph)
    assert len(taught) == 1


def test_heads_are_part_of_a_plan(polyhop, small: list[str], tiny_dir: Path) -> None:
    given = ["--workers", 2, "--model", "gat", "--hidden", 16]
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, *given, "--heads", 4, "--out", "plan.json")
    assert shown.code == 0, shown.err
    shown = polyhop("train", *small, *given, "--plan", "plan.json", "--run-dir", "run")
    assert shown.code == 1
    assert "is a plan for --heads 4, and this run has --heads 1" in shown.err
    shown = polyhop("train", *small, *given, "--heads", 4, "--plan", "plan.json", "--dry-run")
    assert shown.code == 0, shown.err


def test_plans_are_written_where_they_can_be(polyhop, tiny_dir: Path) -> None:
    plan = ["plan", "tiny", "--data-dir", tiny_dir, "--workers", 2]
    Path("folder").mkdir()
    Path("circle").symlink_to("around")
    Path("around").symlink_to("circle")
    refused = {
        "none/plan.json": "there is no folder none",
        "folder": "it is a folder",
        "circle": "it is a link that leads back to itself",
    }
    for out, told in refused.items():
        shown = polyhop(*plan, "--out", out)
        assert shown.code == 1
        assert f"--out {out}: cannot be written: {told}" in shown.err
        assert "timing" not in shown.err
    Path("old.json").write_text("{}")
    Path("link.json").symlink_to("old.json")
    assert polyhop(*plan, "--out", "link.json").code == 0
    assert Path("link.json").is_symlink()
    assert json.loads(Path("old.json").read_text())["workers"] == 2
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        shown = polyhop(*plan, "--out", "pipe")
        assert shown.code == 0, shown.err
        assert stat.S_ISFIFO(Path("pipe").stat().st_mode), "a device or a pipe stays what it is"
        assert os.read(reader, 1) == b"{"
    finally:
        os.close(reader)


def test_an_approximate_strategy_that_was_given_fits(polyhop, small: list[str]) -> None:
    shown = polyhop("train", *small, "--workers", 2, "--strategy", "halo", "--bits", 8, "--run-dir", "run")
    assert shown.code == 0, shown.err
    kept = json.loads(Path("run/plan.json").read_text())
    assert kept["fits"]
    assert kept["chosen"]["why_not"] == []
    assert not any("allow-approximate" in line for line in kept["advice"])


def test_a_plan_for_something_else(polyhop, small: list[str], tiny_dir: Path) -> None:
    polyhop("plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, "--out", "plan.json")
    for more, told in (
        (["--workers", 3], "is a plan for 2 ranks"),
        (["--workers", 2, "--strategy", "data"], ": give one of them"),
    ):
        shown = polyhop("train", *small, *more, "--plan", "plan.json", "--run-dir", "run")
        assert shown.code == 1
        assert told in shown.err
    Path("bad.json").write_text("{}")
    shown = polyhop("train", *small, "--workers", 2, "--plan", "bad.json", "--run-dir", "run")
    assert shown.code == 1
    assert "bad.json: not a plan" in shown.err
    assert not Path("run").exists()


def test_a_plan_is_for_what_it_was_made_for(polyhop, small: list[str], tiny_dir: Path) -> None:
    """Another model, other mini-batches, another graph, options that contradict it: an error names both."""
    given = ["--workers", 2, "--fanout", "3,3", "--hidden", 16]
    made = polyhop("plan", "tiny", "--data-dir", tiny_dir, *given, "--strategy", "data", "--out", "plan.json")
    assert made.code == 0, made.err
    train = ["train", *small, "--plan", "plan.json", "--run-dir", "run"]
    for more, told in (
        (["--workers", 2], "is a plan for --fanout 3,3, and this run has --fanout full"),
        ([*given, "--batch-size", 10], "is a plan for --batch-size 1024, and this run has --batch-size 10"),
        ([*given, "--model", "gat"], "is a plan for --model sage, and this run has --model gat"),
        (
            [*given, "--layers", 3, "--fanout", "3,3,3"],
            "--layers 2 --fanout 3,3, and this run has --layers 3",
        ),
        ([*given, "--hidden", 32], "is a plan for --hidden 16, and this run has --hidden 32"),
        ([*given, "--bits", 8], "--bits 8, and plan.json is a plan with bits 32"),
        ([*given, "--cache", "1MB"], "--cache 1MB, and plan.json is a plan with cache "),
        ([*given, "--macro", 3], "--macro 3, and plan.json is a plan with macro auto"),
        ([*given, "--partitioner", "hash"], "--partitioner hash, and plan.json is a plan with parts by "),
    ):
        shown = polyhop(*train, *more)
        assert shown.code == 1, more
        assert told in shown.err
    whole = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**whole, "purpose": {**whole["purpose"], "num_edges": 7}}))
    shown = polyhop(*train, *given)
    assert shown.code == 1
    assert "plan.json is a plan for tiny (80 nodes, 7 edges), and this is tiny (80 nodes, " in shown.err
    Path("plan.json").write_text(json.dumps({**whole, "partitioner": "mets"}))
    shown = polyhop(*train, *given)
    assert shown.code == 1
    assert "plan.json: a plan with unknown partitioner 'mets'" in shown.err
    for name, value in (("strategy", "fly"), ("options", {"speed": 1})):
        Path("plan.json").write_text(json.dumps({**whole, "chosen": {**whole["chosen"], name: value}}))
        shown = polyhop(*train, *given)
        assert shown.code == 1
        assert "plan.json: a plan " in shown.err
    assert not Path("run").exists()


def test_a_plan_of_one_process_is_obeyed(polyhop, small: list[str], tiny_dir: Path) -> None:
    polyhop("plan", "tiny", "--data-dir", tiny_dir, "--hidden", 16, "--out", "plan.json")
    shown = polyhop("train", *small, "--plan", "plan.json", "--run-dir", "run")
    assert shown.code == 0, shown.err
    whole = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**whole, "purpose": {**whole["purpose"], "num_nodes": 7}}))
    shown = polyhop("train", *small, "--plan", "plan.json", "--run-dir", "other")
    assert shown.code == 1
    assert "is a plan for tiny (7 nodes, " in shown.err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--strategy", "nothing"], "strategy 'nothing'"),
        (["--fanout", "3"], "expected one number for each of 2 layers"),
        (["--link", "fast"], "expected a rate such as 1gbit"),
        (["--memory", "much"], "expected bytes"),
        (["--strategy", "halo", "--fanout", "3,3"], "'halo' cannot train this model so on 2 ranks"),
        (["--budget", "0"], "--budget 0.0: expected a number above 0"),
        (["--budget", "nan"], "--budget nan: expected a number above 0"),
        (["--deadline", "-1"], "--deadline -1.0: expected a number above 0"),
        (["--budget", "0.000001"], "--budget needs prices"),
        (["--machine", "none.json"], "not a file of 'polyhop env --calibrate'"),
        (
            ["--workers", "1", "--link", "1gbit"],
            "--link is between ranks, and one rank has nobody to send to",
        ),
        (["--workers", "81"], "--workers 81: 'tiny' has 80 nodes"),
        (["--workers", "129"], "looked at, which is done for up to 128 ranks; for more, describe the hosts"),
    ],
)
def test_refused_plans(polyhop, tiny_dir: Path, more: list[str], told: str) -> None:
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, "--workers", 2, *more)
    assert shown.code in (1, 2)
    assert told in shown.err


def test_a_run_picks_a_strategy_says_why_and_keeps_its_plan(polyhop, small: list[str]) -> None:
    shown = polyhop("train", *small[:-1], "plain", "--workers", 2, "--run-dir", "run")
    assert shown.code == 0, shown.err
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["chosen"]["strategy"] == json.loads(Path("run/config.json").read_text())["strategy"]
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert all(0 < each["train_seconds"] <= each["seconds"] for each in records)
    shown = polyhop("train", *small, "--workers", 2, "--run-dir", "run", "--resume", "auto", "--epochs", 6)
    assert shown.code == 0, shown.err
    assert json.loads(Path("run/plan.json").read_text()) == plan, "a run that goes on keeps its plan"


def test_options_of_a_strategy_are_not_overruled(polyhop, small: list[str]) -> None:
    shown = polyhop("train", *small, "--workers", 2, "--stages", 2, "--chunks", 2, "--run-dir", "run")
    assert shown.code == 0, shown.err
    assert json.loads(Path("run/config.json").read_text())["strategy"] == "pipeline"
    shown = polyhop("train", *small, "--workers", 2, "--stages", 2, "--naive-halo", "--run-dir", "other")
    assert shown.code == 1
    assert "no strategy has all of these options: naive_halo, stages" in shown.err


CLOUD = ["--strategy", "serverless"]
CLUSTER = ["--cluster", "p4d.24xlarge"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([*CLOUD, "--out", "sv.json"], "--out is not used with functions of a cloud"),
        ([*CLOUD, "--memory", "1"], "--memory is not used with functions of a cloud"),
        ([*CLOUD, "--statistics-out", "s2.json"], "--statistics-out is not used with functions of a cloud"),
        ([*CLOUD, "--machine", "none.json"], "--machine is not used with functions of a cloud"),
        ([*CLOUD, "--allow-approximate"], "--allow-approximate is not used with functions of a cloud"),
        ([*CLOUD, "--servers", "c5n.2xlarge", "--workers", "4"], "--workers is not used with functions of a"),
        ([*CLOUD, "--budget", "0"], "--budget 0.0: expected a number above 0"),
        ([*CLOUD, "--deadline", "nan"], "--deadline nan: expected a number above 0"),
        ([*CLUSTER, "--machine", "/nonexistent.json"], "--machine is not used with --cluster: it is for hosts like"),
        ([*CLUSTER, "--servers", "c5n.2xlarge"], "--servers is not used with --cluster: it is for functions of a"),
        ([*CLUSTER, *CLOUD, "--prices", "p.json"], "--prices is not used with --cluster"),
        ([*CLUSTER, "--partitioner", "compare"], "--partitioner compare is not used with --cluster"),
        (["--servers", "c5n.2xlarge"], "--servers is not used on hosts like this one: it is for functions of a cloud"),
        (["--workers", "2", "--num-servers", "3"], "--num-servers is not used on hosts like this one"),
        (["--workers", "2", *CLOUD, "--halo", "1"], "--halo is not used on hosts like this one"),
        (["--latency", "3"], "--latency is of the links that --link gives: give both"),
        ([*CLUSTER, "--latency", "3"], "--latency is of the links that --link gives: give both"),
        (["--statistics-out", "s.json", "--out", "plan.json"], "--out is not used where statistics alone are written"),
        (["--statistics-out", "s.json", "--workers", "2"], "--workers is not used where statistics alone are"),
    ],
)  # fmt: skip
def test_an_option_that_would_not_be_used_is_refused(
    polyhop, tiny_dir: Path, more: list[str], told: str
) -> None:
    shown = polyhop("plan", "tiny", "--data-dir", tiny_dir, *more)
    assert shown.code == 1
    assert told in shown.err
    assert not any(Path().iterdir())


@pytest.mark.parametrize("more", [["--partitioner", "nonsense"], ["--split", "7"], ["--nodes", "n.csv"]])
def test_statistics_say_all_of_a_graph(polyhop, more: list[str]) -> None:
    shown = polyhop("plan", "--statistics", "none.json", *CLUSTER, *more)
    assert shown.code == 1
    assert f"{more[0]} is not used with --statistics" in shown.err


def test_a_budget_without_prices_is_refused_before_anything_is_loaded(polyhop) -> None:
    shown = polyhop("plan", "no-such-graph", "--workers", 2, "--budget", 1)
    assert shown.code == 1
    assert "--budget needs prices" in shown.err


def test_every_option_of_a_mode_is_one_of_the_command() -> None:
    names = set(inspect.signature(plan.command).parameters)
    assert set(plan.BELONGS) <= names
