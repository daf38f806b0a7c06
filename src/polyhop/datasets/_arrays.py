"""Reading arrays from files that may be wrong: every failure becomes a DatasetError that names the file.

Nothing is ever unpickled. The ground of this folder: every loader may import it.
"""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import DatasetError, unknown
from polyhop.graph import DenseFeatures, FeatureStore, SparseFeatures, SparseRows

__all__ = [
    "FEATURE_MODES",
    "Array",
    "Header",
    "Npz",
    "Rows",
    "as_features",
    "as_tensor",
    "look_npy",
    "pyarrow_module",
    "read_csv_numbers",
    "read_npy",
    "reading",
    "rows_of",
    "sparse_features",
    "split_number",
]

Array = np.ndarray[Any, np.dtype[Any]]
FEATURE_MODES = ("auto", "dense", "sparse", "none")
_BROKEN = (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError)
_T = TypeVar("_T")


def reading(path: Path, what: str, read: Callable[[], _T]) -> _T:
    """read(), with every failure of a broken file told as a DatasetError."""
    try:
        return read()
    except DatasetError:
        raise
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such file") from None
    except _BROKEN as error:
        if "pickle" in str(error) or "Object arrays" in str(error):
            raise DatasetError(
                f"{path}: {what} holds pickled Python objects, which are never loaded (they can run code); "
                "save plain numeric arrays instead"
            ) from error
        raise DatasetError(
            f"{path}: cannot read {what}: the file is damaged, incomplete or of another kind ({error})"
        ) from error


@dataclass(frozen=True)
class Header:
    """What an array says of itself before any of its values."""

    shape: tuple[int, ...]
    dtype: str
    is_c_order: bool

    @classmethod
    def read(cls, opened: IO[bytes]) -> Header:
        """From the beginning of a .npy file."""
        version = np.lib.format.read_magic(opened)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read(opened)
        return cls(shape, dtype.name, not is_fortran or min(shape, default=0) <= 1)


@dataclass(frozen=True)
class Rows:
    """What is known of features that were not read: as a load would find them."""

    num_features: int = 0
    dtype: str = "float32"
    length: float | None = None  # values of a sparse row, on average; None: dense
    has_scale: bool = False  # stored values are multiplied when they are read
    num_rows: int | None = None  # None: there are none, or nothing short of reading them says how many


def rows_of(look: Callable[[str], Header | None], find: Callable[[str], Array | None]) -> Rows:
    """Of arrays x and x_scale, or x_indices and x_shape: from headers, and of values the two numbers of the shape."""
    x, shape = look("x"), find("x_shape")
    if x is not None and len(x.shape) == 2:
        return Rows(x.shape[1], _dtype_as_loaded(x.dtype), None, look("x_scale") is not None, x.shape[0])
    columns = look("x_indices")
    if x is not None or columns is None or shape is None or shape.size != 2:
        return Rows()
    return Rows(int(shape[1]), "float32", columns.shape[0] / max(1, int(shape[0])), False, int(shape[0]))


def _dtype_as_loaded(stored: str) -> str:
    """Of rows in memory: what is neither small nor a float of 32 or 64 bits becomes one."""
    return stored if stored in ("uint8", "int8", "float32", "float64") else "float32"


class Npz:
    """An .npz file opened without pickles; arrays are read when asked for. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = reading(path, "the archive", lambda: path.open("rb"))
        try:
            opened = reading(path, "the archive", lambda: np.load(self._handle, allow_pickle=False))
            if not isinstance(opened, np.lib.npyio.NpzFile):
                raise DatasetError(f"{path}: expected an .npz archive of named arrays, found a single array")
        except BaseException:
            self._handle.close()
            raise
        self._file = opened
        self.names = frozenset(opened.files)

    def __enter__(self) -> Npz:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()
        self._handle.close()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str) -> Array:
        """One array."""
        if name not in self.names:
            raise DatasetError(f"{self.path}: {unknown('array', name, self.names)}")
        return reading(self.path, f"array {name!r}", lambda: np.asarray(self._file[name]))

    def find(self, name: str) -> Array | None:
        """One array, or None if the file has none of that name."""
        return self.read(name) if name in self.names else None

    def look(self, name: str) -> Header | None:
        """What the header of an array says, or None if the file has none of that name; no values are read."""
        if name not in self.names:
            return None

        def read() -> Header:
            archive: Any = self._file.zip
            with archive.open(f"{name}.npy") as member:
                return Header.read(member)

        return reading(self.path, f"array {name!r}", read)


def read_npy(path: Path, *, mmap: bool = False) -> Array:
    """One .npy array; ``mmap``: mapped for reading only, so opening reads nothing and the file may exceed memory."""
    mode: Any = "r" if mmap else None
    array = reading(path, "the array", lambda: np.load(path, mmap_mode=mode, allow_pickle=False))
    if not isinstance(array, np.ndarray):
        raise DatasetError(f"{path}: expected a single .npy array, found an archive")
    return array


def look_npy(path: Path) -> Header | None:
    """What the header of a .npy file says, or None if there is no such file; no values are read."""
    if not path.exists():
        return None

    def read() -> Header:
        with path.open("rb") as opened:
            return Header.read(opened)

    return reading(path, "the array", read)


def as_tensor(array: Array) -> Tensor:
    """The array's own memory as a tensor. That of a mapped file must not be written to: it would end the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def as_features(store: FeatureStore | None, mode: str) -> FeatureStore | None:
    """The store as asked for: "auto" (as it is), "dense" (a matrix), "sparse" (CSR) or "none"."""
    if mode not in FEATURE_MODES:
        raise DatasetError(unknown("features", mode, FEATURE_MODES))
    if mode == "none" or store is None:
        return None
    if mode == "dense" and isinstance(store, SparseFeatures):
        return DenseFeatures(store.rows.dense())
    if mode == "sparse" and isinstance(store, DenseFeatures):
        dense = store.all().to(torch.float32)
        row, column = dense.nonzero(as_tuple=True)
        indptr = torch.zeros(store.num_rows + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(row, minlength=store.num_rows), 0, out=indptr[1:])
        return SparseFeatures(
            SparseRows(indptr, column.to(torch.int32), dense[row, column], store.num_features)
        )
    return store


def sparse_features(
    indptr: Array, columns: Array, values: Array | None, shape: tuple[int, int]
) -> SparseFeatures:
    """CSR features; no values = every stored value is 1."""
    data = np.ones(columns.size, np.float32) if values is None else np.asarray(values, np.float32)
    if indptr.ndim != 1 or indptr.size != shape[0] + 1:
        raise DatasetError(
            f"sparse x: indptr has shape {list(indptr.shape)}, expected [{shape[0] + 1}] for {shape[0]} rows"
        )
    rows = SparseRows(
        torch.from_numpy(indptr.astype(np.int64)), torch.from_numpy(columns.astype(np.int32)), torch.from_numpy(data),
        int(shape[1]),
    )  # fmt: skip
    return SparseFeatures(rows)


def split_number(split: int | str, names: list[str], source: str) -> int:
    """Which of the splits is meant, by number or name."""
    if isinstance(split, str):
        if split not in names:
            raise DatasetError(f"{source}: {unknown('split', split, names)}")
        return names.index(split)
    if not 0 <= split < len(names):
        raise DatasetError(
            f"{source}: split {split} of {len(names)}; expected 0 .. {len(names) - 1} ({', '.join(names)})"
        )
    return split


def pyarrow_module(name: str, why: str) -> Any:
    """pyarrow's submodule, or a DatasetError that says how to get it."""
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise DatasetError(
            f"{why} needs pyarrow, which is not installed: pip install 'polyhop[parquet]'"
        ) from error


def read_csv_numbers(path: Path, dtype: type[np.generic]) -> Array:
    """A headerless CSV (or .csv.gz) of numbers as a matrix [rows, columns]; fast where pyarrow is installed."""
    try:
        from pyarrow import ArrowInvalid, csv
    except ImportError:
        return reading(path, "the table", lambda: np.loadtxt(path, delimiter=",", dtype=dtype, ndmin=2))

    def read() -> Array:
        try:
            table = csv.read_csv(path, read_options=csv.ReadOptions(autogenerate_column_names=True))
        except ArrowInvalid as error:
            raise ValueError(str(error)) from error
        columns = [column.to_numpy() for column in table.columns]
        out = np.empty((table.num_rows, len(columns)), dtype)
        for k, column in enumerate(columns):
            if column.dtype.kind not in "iuf":
                raise ValueError(f"column {k} is not numeric, e.g. {column[0]!r}")
            out[:, k] = column
        return out

    return reading(path, "the table", read)
