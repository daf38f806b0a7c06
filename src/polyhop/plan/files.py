"""Files that are whole or as they were: written beside their place, and renamed once they are complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyhop.errors import ConfigError

__all__ = ["check_writable", "replaced_whole"]


def check_writable(file: Path, option: str) -> None:
    """ConfigError where a file cannot be made, before the work for what is to be in it."""
    told = f"{option} {file}: cannot be written"
    if file.is_dir():
        raise ConfigError(f"{told}: it is a folder; name a file in it")
    if _leads_back(file):
        raise ConfigError(f"{told}: it is a link that leads back to itself; remove it")
    if not Path(os.path.realpath(file)).parent.is_dir():
        raise ConfigError(f"{told}: there is no folder {file.parent}; make it first")


def _leads_back(file: Path) -> bool:
    try:
        file.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


@contextmanager
def replaced_whole(file: Path) -> Iterator[Path]:
    """A name to write to, with the same ending; what is there at the end of the block takes the file's place."""
    if file.exists() and not file.is_file():  # a device or a pipe stays what it is
        yield file
        return
    if _leads_back(file):
        raise OSError(f"{file} is a link that leads back to itself")
    file = file.resolve()  # what a link names is replaced, not the link
    beside = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        yield beside
        beside.replace(file)
    finally:
        with suppress(OSError):  # it was renamed, or never made
            beside.unlink()
