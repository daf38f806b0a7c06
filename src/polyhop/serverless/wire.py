"""Messages between servers and functions, as frames of bytes; nothing here sends or receives.

A message is a header (msgpack, one of the structs below) and one frame of raw bytes for each of its arrays. Whatever comes
from outside is checked against the header and against ``Limits`` before an array is made of it, and nothing is unpickled.

    function -> server   Hello, Pull (a wish for one task), Push (what came of one), Failed, Bye
    server -> function   Welcome (to Hello), Task, More (rows of it, where they are many), Ack, Stop
    server -> server     Rows (of an interval, after a piece), Sums (gradients of rows, by their reader)

Imports neither torch nor anything of polyhop but its errors: it is part of the function's package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from polyhop.errors import PolyhopError

__all__ = [
    "LIMITS",
    "PROTOCOL",
    "Ack",
    "Array",
    "ArrayHead",
    "Bye",
    "Failed",
    "Header",
    "Hello",
    "Limits",
    "More",
    "Pull",
    "Push",
    "Rows",
    "Stop",
    "Sums",
    "Task",
    "TaskKey",
    "Welcome",
    "WireError",
    "num_bytes",
    "pack",
    "unpack",
]

PROTOCOL = 2
Array = npt.NDArray[Any]
_DTYPES = {"float32", "float64", "int32", "int64", "uint8"}


class WireError(PolyhopError):
    """A message that is not one of ours, or is larger than it may be."""


@dataclass(frozen=True)
class Limits:
    """What a message may be at most, and a task of several."""

    header_bytes: int = 1 << 16
    num_arrays: int = 64
    frame_bytes: int = 1 << 30
    num_dims: int = 4
    num_blocks: int = 1024  # of rows, of one task
    task_bytes: int = 1 << 32  # of all of them


LIMITS = Limits()


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    pass


class ArrayHead(_Header, frozen=True):
    """What a frame holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class TaskKey(_Header, frozen=True, order=True):
    """One piece of work. Ordered so that what is least advanced comes first."""

    epoch: int
    place: int  # in the order of an epoch: forward pieces, then backward ones
    interval: int  # among all servers'
    piece: int
    is_backward: bool


class Hello(_Header, frozen=True, tag="hello"):
    """The first message of a function."""

    job: str
    function: str
    protocol: int
    memory_mb: int
    remaining_ms: int


class Welcome(_Header, frozen=True, tag="welcome"):
    """The answer to Hello: a session, and the port where the messages of those who have one are taken."""

    session: str
    password: str
    key: bytes
    port: int


class Pull(_Header, frozen=True, tag="pull"):
    """A wish for one task. ``held``: (piece, version) of the weights that the function has."""

    held: tuple[tuple[int, int], ...] = ()


class Task(_Header, frozen=True, tag="task"):
    """A lease. Arrays named ``w:...`` are weights: with them comes the program of the piece."""

    key: TaskKey
    lease: int
    lease_ms: int
    version: int  # of the weights
    arrays: tuple[ArrayHead, ...]
    program: dict[str, Any] | None = None
    wants: tuple[str, ...] = ()  # rows whose gradients are wanted
    options: dict[str, float] = {}
    num_rows: int = 0  # of all blocks, where there are several
    num_more: int = 0  # messages that follow with further blocks of rows


class More(_Header, frozen=True, tag="more"):
    """A further block of a task's rows: the arrays of the Task but for weights, in its order. Blocks are numbered from 1."""

    lease: int
    block: int
    arrays: tuple[ArrayHead, ...]


class Push(_Header, frozen=True, tag="push"):
    """What came of a task: rows and gradients of weights together, so that they count together or not at all."""

    key: TaskKey
    lease: int
    arrays: tuple[ArrayHead, ...]
    busy_ms: float = 0.0
    parked_ms: float = 0.0  # waited for work since the last task
    values: dict[str, float] = {}


class Failed(_Header, frozen=True, tag="failed"):
    """A task that could not be computed."""

    key: TaskKey
    lease: int
    reason: str


class Ack(_Header, frozen=True, tag="ack"):
    """Whether a push counted."""

    lease: int
    verdict: str


class Stop(_Header, frozen=True, tag="stop"):
    """Nothing more to do here."""

    reason: str


class Bye(_Header, frozen=True, tag="bye"):
    """The last message of a function: wishes that were not met are void."""

    reason: str


class Rows(_Header, frozen=True, tag="rows"):
    """Rows of an interval that another server reads: ghosts."""

    table: int
    interval: int
    epoch: int
    arrays: tuple[ArrayHead, ...]


class Sums(_Header, frozen=True, tag="sums"):
    """Gradients of another server's rows, of one interval that read them."""

    table: int
    interval: int  # the reader
    epoch: int
    arrays: tuple[ArrayHead, ...]


Header = Hello | Welcome | Pull | Task | More | Push | Failed | Ack | Stop | Bye | Rows | Sums
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def _heads(arrays: Mapping[str, Array]) -> tuple[ArrayHead, ...]:
    """What a header says of its arrays."""
    return tuple(ArrayHead(name, value.dtype.name, value.shape) for name, value in arrays.items())


def pack(header: Header, arrays: Mapping[str, Array] | None = None) -> list[Any]:
    """Frames of a message: bytes of the header, then each array as it lies (a buffer, not a copy, where it can be)."""
    given = {name: np.ascontiguousarray(value) for name, value in (arrays or {}).items()}
    for name, value in given.items():
        if value.dtype.name not in _DTYPES:
            raise WireError(
                f"array {name!r}: {value.dtype} cannot be sent; one of {', '.join(sorted(_DTYPES))}"
            )
    if hasattr(header, "arrays"):
        header = msgspec.structs.replace(header, arrays=_heads(given))
    elif given:
        raise WireError(f"{type(header).__name__} carries no arrays, and was given {', '.join(given)}")
    return [_ENCODER.encode(header), *(value.data.cast("B") for value in given.values() if value.size)]


def unpack(frames: Sequence[Any], limits: Limits = LIMITS) -> tuple[Header, dict[str, Array]]:
    """The header and the arrays, which share memory with the frames; WireError if anything is not as it says."""
    if not frames or len(frames) > limits.num_arrays + 1:
        raise WireError(f"a message of {len(frames)} frames; 1 to {limits.num_arrays + 1} are allowed")
    if len(memoryview(frames[0])) > limits.header_bytes:
        raise WireError(f"a header of {len(memoryview(frames[0]))} bytes; {limits.header_bytes} are allowed")
    try:
        header = _DECODER.decode(frames[0])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError) as error:
        raise WireError(f"a header that is none of ours: {error}") from error
    told: tuple[ArrayHead, ...] = getattr(header, "arrays", ())
    if len({head.name for head in told}) != len(told):
        raise WireError("two arrays of one name")
    arrays: dict[str, Array] = {}
    rest = list(frames[1:])
    for head in told:
        size = _size(head, limits)
        frame: Any = rest.pop(0) if size and rest else b""
        if len(memoryview(frame)) != size:
            raise WireError(f"array {head.name!r}: {size} bytes were told, {len(memoryview(frame))} came")
        arrays[head.name] = np.frombuffer(frame, dtype=head.dtype).reshape(head.shape)
    if rest:
        raise WireError(f"{len(rest)} frames that the header does not tell of")
    return header, arrays


def _size(head: ArrayHead, limits: Limits) -> int:
    """Bytes of an array as it was told."""
    if head.dtype not in _DTYPES:
        raise WireError(
            f"array {head.name!r}: dtype {head.dtype[:20]!r}; one of {', '.join(sorted(_DTYPES))}"
        )
    if len(head.shape) > limits.num_dims or any(n < 0 for n in head.shape):
        raise WireError(f"array {head.name!r}: shape {head.shape[:8]}")
    size = math.prod(head.shape) * np.dtype(head.dtype).itemsize
    if size > limits.frame_bytes:
        raise WireError(f"array {head.name!r}: {size} bytes; {limits.frame_bytes} are allowed")
    return size


def num_bytes(arrays: Mapping[str, Array]) -> int:
    """Payload of a message."""
    return sum(value.nbytes for value in arrays.values())
