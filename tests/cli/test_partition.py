"""``polyhop partition``: the report, the folder, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from polyhop.partition import default_method, open_parts


def test_report_and_folder(polyhop, tiny_dir: Path) -> None:
    shown = polyhop(
        "partition", "tiny", "--data-dir", tiny_dir, "--parts", 4, "--method", "fennel", "--out", "parts"
    )
    assert shown.code == 0, shown.err
    for part in (
        "4 by fennel",
        "% of edges (at random:",
        "train nodes",
        "rows read from other parts",
        "folder",
    ):
        assert part in shown.out
    assert "part 4/4 written" in shown.err
    folder = open_parts("parts")
    assert (folder.num_parts, folder.num_nodes) == (4, 80)
    folder.check()


def test_json_without_a_folder(polyhop, tiny_dir: Path) -> None:
    facts = polyhop("partition", "tiny", "--data-dir", tiny_dir, "--parts", 3, "--json").json
    assert facts["method"] == default_method()
    assert sum(facts["sizes"]) == 80
    assert facts["out"] is None
    assert 0 <= facts["cut"] <= 1


def test_parts_from_a_file(polyhop, tiny_dir: Path) -> None:
    np.save("mine.npy", np.arange(80) % 2)
    facts = polyhop(
        "partition", "tiny", "--data-dir", tiny_dir, "--parts", 2, "--file", "mine.npy", "--json"
    ).json
    assert (facts["method"], facts["sizes"]) == ("file", [40, 40])


def test_presampled(polyhop, tiny_dir: Path) -> None:
    given = ("partition", "tiny", "--data-dir", tiny_dir, "--parts", 2, "--method", "fennel", "--presample",
             "--fanout", "3,2", "--batch-size", 8)  # fmt: skip
    shown = polyhop(*given, "--out", "parts")
    assert shown.code == 0, shown.err
    for part in (
        "of sampled edges join two owners",
        "within a mini-batch",
        "of those by lot",
        "5 fresh mini-batches",
    ):
        assert part in shown.out
    open_parts("parts").check()
    facts = polyhop(*given, "--json").json
    assert facts["method"] == "fennel"
    assert sum(facts["sizes"]) == 80
    assert facts["fresh"]["num_batches"] == 5
    assert len(facts["fresh"]["rows"]) == 2
    assert 0 < facts["fresh"]["cut"] < facts["fresh"]["chance_cut"]
    wide = polyhop(*given, "--json", "--hidden", 64, "--sampler", "labor", "--epochs", 1).json
    assert wide["fresh"] != facts["fresh"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--parts", 2, "--presample"], "give its --fanout"),
        (["--parts", 2, "--fanout", "3,2"], "goes with --presample"),
        (["--parts", 2, "--presample", "--fanout", "3;2"], "expected one number per layer"),
        (["--parts", 2, "--presample", "--fanout", "3,2", "--method", "hash"], "metis or fennel"),
        (
            ["--parts", 2, "--presample", "--fanout", "3,2", "--method", "file", "--file", "x.npy"],
            "metis or fennel",
        ),
        (["--parts", 2, "--method", "metris"], "Did you mean 'metis'"),
        (["--parts", 2, "--method", "file"], "'file': .*path"),
        (["--parts", 2, "--file", "none.npy"], "none.npy: cannot be read"),
        (["--parts", 2, "--method", "hash", "--out", "."], "is there already"),
    ],
)
def test_refused(polyhop, tiny_dir: Path, given, message) -> None:
    shown = polyhop("partition", "tiny", "--data-dir", tiny_dir, *given)
    assert shown.code == 1
    assert re.search(message, shown.err)


def _save_edges(name: str = "edges.npy", *, repeat: bool = False) -> None:
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, 90, (700, 2)), axis=0)
    pairs = np.concatenate([pairs, pairs[:3]]) if repeat else pairs
    if name.endswith(".npy"):
        np.save(name, pairs.T.astype(np.int32))
    else:
        Path(name).write_text("src,dst\n" + "".join(f"{u},{v}\n" for u, v in pairs))


def test_edges_from_a_file(polyhop) -> None:
    _save_edges()
    shown = polyhop(
        "partition", "edges.npy", "--parts", 3, "--memory", "200KB", "--passes", 2, "--out", "parts"
    )
    assert shown.code == 0, shown.err
    for part in ("3 by ldg", "edges, 90 nodes", "% of edges (at random:", "rows read from other parts"):
        assert part in shown.out
    assert re.search(r"^scan: [\d,]+/[\d,]+ edges$", shown.err, flags=re.MULTILINE)
    assert re.search(r"^writing parts: (\d+)/\1 edges$", shown.err, flags=re.MULTILINE)
    open_parts("parts").check()


@pytest.mark.parametrize("name", ["edges.npy", "edges.csv"])
def test_the_same_from_memory_and_from_files(polyhop, name: str) -> None:
    _save_edges("edges.csv")
    _save_edges(name)
    common = ("--parts", 4, "--method", "ldg", "--json")
    whole = polyhop("partition", "edges.csv", *common, "--out", "whole").json
    parts = polyhop("partition", name, *common, "--out", "parts", "--memory", "1MB").json
    assert {**whole, "out": None} == {**parts, "out": None}
    owners = [open_parts(folder).new_ids().tolist() for folder in ("whole", "parts")]
    assert owners[0] == owners[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--memory", "1GB", "--method", "metis", "--out", "p"],
            "'metis' needs the whole graph .*block, fennel",
        ),
        (["--method", "metis", "--out", "p"], "'metis' does not read edges in .npy"),
        (["--memory", "1GB"], "give --out DIR"),
        (
            ["--presample", "--fanout", "2", "--out", "p"],
            "from the whole graph: edges.npy is cut out of core",
        ),
        (["--memory", "lots", "--out", "p"], "expected a size such as 1GB"),
        (["--memory", "1KB", "--out", "p"], "too small.*give at least 65.6KB"),
        (["--num-nodes", 50, "--out", "p"], r"the graph has nodes 0 \.\. 49.*--num-nodes"),
        (["--method", "hash", "--out", "p"], "duplicate edges, such as .*--duplicates keep"),
        (["--method", "hash", "--passes", 3, "--out", "p"], "'hash': no option passes"),
    ],
)
def test_refused_files(polyhop, given, message) -> None:
    _save_edges(repeat=True)
    shown = polyhop("partition", "edges.npy", "--parts", 2, *given)
    assert shown.code == 1
    assert re.search(message, shown.err)


def test_memory_is_for_files(polyhop, tiny_dir: Path) -> None:
    shown = polyhop(
        "partition", "tiny", "--data-dir", tiny_dir, "--parts", 2, "--memory", "1GB", "--out", "p"
    )
    assert shown.code == 1
    assert "tiny is no file of edges" in shown.err


def test_repeated_edges_may_be_kept_or_dropped(polyhop) -> None:
    _save_edges("edges.csv", repeat=True)
    common = ("partition", "edges.csv", "--parts", 2, "--method", "block", "--json")
    assert polyhop(*common).code == 1
    kept, dropped = (polyhop(*common, "--duplicates", how).json["edges"] for how in ("keep", "drop"))
    assert kept == dropped + 3
    assert polyhop(*common, "--duplicates", "keep", "--memory", "1MB", "--out", "p").json["edges"] == kept
