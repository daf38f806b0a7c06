"""Where names lead: the given folder before the environment's, before the package's."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyhop.datasets.catalogue import EMBEDDED, find, names


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    given, environment = tmp_path / "given", tmp_path / "environment"
    for folder in (given, environment):
        folder.mkdir()
        (folder / "both.npz").touch()
    (environment / "only.npz").touch()
    (given / "ogbn_arxiv").mkdir()
    (given / "ogbn_arxiv" / "raw").mkdir()
    (given / "empty").mkdir()
    monkeypatch.setenv("POLYHOP_DATA", str(environment))
    return given, environment


def test_order(folders: tuple[Path, Path]) -> None:
    given, environment = folders
    assert find("both", given) == given / "both.npz"
    assert find("both") == environment / "both.npz"
    assert find("only", given) == environment / "only.npz"
    assert find("ogbn-arxiv", given) == given / "ogbn_arxiv"
    assert find("empty", given) is None
    assert find("nothing", given) is None
    assert find("debian-packages") == EMBEDDED / "debian-packages.npz"


def test_names(folders: tuple[Path, Path]) -> None:
    assert names(folders[0]) == ["both", "debian-packages", "empty", "ogbn_arxiv", "only"]


def test_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_DATA", raising=False)
    assert names(tmp_path / "nowhere") == ["debian-packages"]
