"""Files that are whole or absent, and tensors as safetensors: ground for checkpoints and the run folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from polyhop.errors import CheckpointError

__all__ = [
    "TEMPORARY",
    "append_whole",
    "pack",
    "read_tensors",
    "replace_file",
    "sync_folder",
    "unpack",
    "write_synced",
]

TEMPORARY = ".tmp-"
"""Start of the name of anything not yet complete."""


def sync_folder(path: Path) -> None:
    """Make renames inside a folder last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write one file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace one file whole: temporary name, sync, rename. CheckpointError if the disk refuses; the old file then stays."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        write_synced(temporary, data)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def append_whole(path: Path, line: bytes) -> None:
    """Add a line to a file; OSError if the disk refuses it or takes a half, and then nothing of it stays."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors of any device as the bytes of a safetensors file."""
    from safetensors.torch import save

    seen: set[int] = set()
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        # Tied weights: safetensors wants each tensor on its own.
        is_shared = flat.numel() > 0 and flat.data_ptr() in seen
        packed[name] = flat.clone() if is_shared else flat
        seen.add(flat.data_ptr())
    return save(packed)


def unpack(data: bytes) -> dict[str, Tensor]:
    """The tensors of what ``pack`` gave, on the CPU."""
    from safetensors.torch import load

    return load(data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, on the CPU."""
    from safetensors import SafetensorError

    try:
        return unpack(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
