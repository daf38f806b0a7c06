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


@pytest.mark.parametrize(
    ("given", "message"),
    [
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
