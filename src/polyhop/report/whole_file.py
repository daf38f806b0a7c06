"""Files that are whole or absent: written under another name, renamed once they are complete."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyhop.errors import InputError

__all__ = ["whole_file"]


# Not plan's replaced_whole: importing plan loads torch (seconds), which a report does without.
@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name to write to; what is there at the end of the block gets the path's name. InputError if the disk refuses.

    A device or a pipe is written straight into; of a symbolic link, the file that it leads to is replaced.
    """
    temporary = None
    try:
        if _is_special(path):
            yield path
            return
        file = path.resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".tmp-{file.name}")
        yield temporary
        temporary.replace(file)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # it was renamed, or never made
                temporary.unlink()


def _is_special(path: Path) -> bool:
    """Whether something is there that no file may take the place of. OSError for links in a circle."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False
