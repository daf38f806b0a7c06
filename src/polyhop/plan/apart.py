"""Measuring in a process of its own: what it takes is gone before training starts, and a rank never holds it.

The process reads a function and its arguments, pickled, from its standard input, and writes what comes of them to its
standard output. It ends with whoever started it: its input is then closed.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, TypeVar

__all__ = ["ApartError", "run_apart"]

_MOST_S = 600.0  # of a measurement: a host that takes longer is not one to measure
_SIZE = struct.Struct("<Q")
_LAST_LINES = 3  # of what it complained of
_Result = TypeVar("_Result")


class ApartError(Exception):
    """It could not be run in a process of its own; the text says why."""


def run_apart(
    function: Callable[..., _Result], *given: Any, timeout_s: float = _MOST_S, **named: Any
) -> _Result:
    """``function(*given, **named)`` in another process, which is gone when this returns or raises.

    ApartError if the process cannot start, cannot read what it is given (a class of the script that was started: its
    module has another name there), fails, or takes too long.
    """
    try:
        task = pickle.dumps((function, given, named))
    except Exception as error:  # pickle raises whatever the object's own methods do
        raise ApartError(f"cannot be sent: {error}") from error
    # Whatever was imported here is imported there from the same place.
    paths = [str(path) or os.getcwd() for path in sys.path]
    try:
        process = subprocess.Popen(
            [sys.executable or "python", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is for whoever asked, who ends it
        )
    except (OSError, ValueError) as error:
        raise ApartError(f"cannot start: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    complaints: list[bytes] = []
    reader = threading.Thread(target=lambda: complaints.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
    late = threading.Timer(timeout_s, process.kill)
    reader.start()
    late.start()
    try:
        process.stdin.write(_SIZE.pack(len(task)) + task)
        process.stdin.flush()  # and left open: its end would end the process
        is_done, result = pickle.loads(_read(process.stdout))
    except (OSError, EOFError) as error:
        code = _ended(process, reader)
        lines = b"".join(complaints).decode(errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise ApartError(" / ".join(lines) or f"ended with code {code}") from error
    finally:
        late.cancel()
        _ended(process, reader)
    if not is_done:
        raise ApartError(result)
    return result  # type: ignore[no-any-return]


def _ended(process: subprocess.Popen[bytes], reader: threading.Thread) -> int:
    """Its code; nothing of it is left."""
    process.kill()
    code = process.wait()
    reader.join()
    for file in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):  # what could not be written any more
            if file is not None:
                file.close()
    return code


def _read(file: IO[bytes]) -> bytes:
    size = file.read(_SIZE.size)
    if len(size) < _SIZE.size:
        raise EOFError
    (count,) = _SIZE.unpack(size)
    found = file.read(count)
    if len(found) < count:
        raise EOFError
    return found


def _end_with(file: IO[bytes]) -> None:
    with suppress(OSError):
        file.read(1)
    os._exit(1)


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints
    given = os.fdopen(0, "rb", closefd=False)
    task = _read(given)
    threading.Thread(target=_end_with, args=(given,), daemon=True).start()
    try:
        function, arguments, named = pickle.loads(task)
        answer = (True, function(*arguments, **named))
    except Exception as error:  # told to whoever asked
        answer = (False, f"{type(error).__name__}: {error}")
    told = pickle.dumps(answer)
    answers.write(_SIZE.pack(len(told)) + told)
    answers.close()
    os._exit(0)  # threads that still read must not hold it


if __name__ == "__main__":
    _main()
