"""Files that are whole or absent: written under another name, renamed once they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyhop.errors import InputError

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to; what is there at the end of the block gets the path's name. InputError if the disk refuses."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it was renamed, or never made
            temporary.unlink()
