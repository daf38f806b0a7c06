"""Files that are whole or as they were: written beside their place, and renamed once they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["replaced_whole"]


@contextmanager
def replaced_whole(file: Path) -> Iterator[Path]:
    """A name to write to, with the same ending; what is there at the end of the block takes the file's place."""
    if file.exists() and not file.is_file():  # a device or a pipe stays what it is
        yield file
        return
    beside = file.with_name(f".{os.getpid()}.{file.name}")
    try:
        yield beside
        beside.replace(file)
    finally:
        with suppress(OSError):  # it was renamed, or never made
            beside.unlink()
