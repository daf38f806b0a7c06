"""How the command line speaks: results on standard output, everything else on standard error, errors in one line.

Exit codes: 0 done, 1 an error that polyhop explains, 2 wrong usage (typer's), 130 Ctrl-C, 143 stopped by SIGTERM with the
state saved. ``POLYHOP_TRACEBACK=1`` shows where an error came from.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from polyhop.errors import Interrupted, PolyhopError

__all__ = ["explained", "is_ascii", "print_json", "say", "show_table"]


@contextmanager
def explained() -> Iterator[None]:
    """Run a command; what goes wrong in a known way becomes one line on standard error and an exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
        except BrokenPipeError:
            # The reader left (polyhop data cora | head): nothing to say, and nothing more to flush.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        except (PolyhopError, OSError, ModuleNotFoundError, MemoryError) as error:
            if os.environ.get("POLYHOP_TRACEBACK", "0") not in ("", "0"):
                raise
            is_stop = isinstance(error, Interrupted)
            print(f"polyhop: {'' if is_stop else 'error: '}{_line(error)}", file=sys.stderr)
            stopped = 130 if "SIGINT" in str(error) else 143
            raise SystemExit(stopped if is_stop else 1) from None


def _line(error: BaseException) -> str:
    """One line that says what went wrong."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        return "out of memory" + (f": {text}" if text else "")
    if isinstance(error, ModuleNotFoundError):
        return f"{text} ('polyhop env' says what is installed and how to add what is missing)"
    return text or type(error).__name__


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"polyhop: warning: {' '.join(str(message).split())}", file=file or sys.stderr)


def say(text: str = "") -> None:
    """A line for a person, on standard error, so that standard output stays a result."""
    print(text, file=sys.stderr, flush=True)


def print_json(record: Any) -> None:
    """A result for a program: one JSON document on standard output; what JSON cannot say (NaN, infinity) is null."""
    print(json.dumps(_finite(record), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def is_ascii() -> bool:
    """Whether standard output can show only plain ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "█⠿│".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def show_table(rows: Sequence[tuple[str, str]], *, indent: int = 0) -> None:
    """Two columns on standard output: names, then values; a row without a name continues the one above."""
    margin = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"{'':{indent}}{name:<{margin}}  {value}".rstrip())
