"""A file is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyhop.errors import InputError
from polyhop.report.whole_file import whole_file


def test_it_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.html"
    with whole_file(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
    assert path.read_text() == "half"
    assert [each.name for each in path.parent.iterdir()] == ["a.html"]


def test_what_goes_wrong_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.html"]


def test_a_full_disk_is_named(small_disk: Path) -> None:
    with pytest.raises(InputError, match="No space left"), whole_file(small_disk / "a.html") as temporary:
        temporary.write_bytes(bytes(2_000_000))
    assert list(small_disk.iterdir()) == []
