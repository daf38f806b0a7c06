"""A file is whole or absent."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
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


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    """As a device does; one in /dev is not put at risk here, tests may run as root."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with ThreadPoolExecutor(1) as reader:
        for path in (pipe, link):
            with whole_file(path) as temporary:
                assert temporary == path  # else nobody would write what the reader waits for
                got = reader.submit(pipe.read_text)
                temporary.write_text("page")
            assert got.result(20) == "page"
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_pipe_that_only_a_handle_names() -> None:
    """As of ``--out >(gzip > a.gz)``: its link leads to a name that no folder has."""
    begin, end = os.pipe()
    try:
        with whole_file(Path(f"/dev/fd/{end}")) as temporary:
            temporary.write_text("page")
        assert os.read(begin, 100) == b"page"
    finally:
        os.close(begin)
        os.close(end)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_followed(tmp_path: Path, is_there: bool) -> None:
    link, target = tmp_path / "link.html", tmp_path / "pages" / "a.html"
    target.parent.mkdir()
    if is_there:
        target.write_text("old")
    link.symlink_to(Path("pages", "a.html"))
    with whole_file(link) as temporary:
        temporary.write_text("new")
    assert link.readlink() == Path("pages", "a.html")
    assert target.read_text() == "new"
    assert [each.name for each in target.parent.iterdir()] == ["a.html"]


def test_links_in_a_circle_are_named(tmp_path: Path) -> None:
    link = tmp_path / "a.html"
    link.symlink_to(link)
    with pytest.raises(InputError, match=r"cannot write .*a\.html: Too many levels"), whole_file(link):
        pass
    assert link.is_symlink()
