"""CSV and Parquet tables too large for memory, read in batches and kept as .npy files that are read in chunks.

Columns, ids, labels and splits mean what ``datasets/tables.py`` says. Ids and labels of nodes are held in memory, features
are not.

Legend: E edges, N nodes, F features.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from polyhop.datasets import tables
from polyhop.datasets._arrays import Array, pyarrow_module, reading
from polyhop.errors import DatasetError

__all__ = [
    "GrowingArray",
    "Numbering",
    "batches",
    "edges_to_npy",
    "features_to_npy",
    "find_numbering",
    "node_columns",
    "number_nodes",
]

_ABOUT = ("id", "label", "split")
_HEADER = 128  # bytes of a .npy header, whatever the number of rows


class GrowingArray:
    """One .npy file that is appended to; the number of rows is written last. Use as a context manager."""

    def __init__(self, path: Path, dtype: Any, width: int | None = None) -> None:
        self._file = path.open("wb")
        self._dtype, self._width, self._rows = np.dtype(dtype), width, 0
        self._file.write(b"\0" * _HEADER)

    def __enter__(self) -> GrowingArray:
        return self

    def append(self, rows: Array) -> None:
        self._rows += rows.shape[0]
        self._file.write(np.ascontiguousarray(rows, self._dtype).reshape(-1).view(np.uint8).data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        head = io.BytesIO()
        shape = (self._rows,) if self._width is None else (self._rows, self._width)
        about = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(head, about)
        assert head.tell() == _HEADER, f"a header of {head.tell()} bytes"
        self._file.seek(0)
        self._file.write(head.getbuffer())
        self._file.close()


def batches(
    path: Path, memory: int, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[dict[str, Array]]:
    """Columns by name, as many rows at a time as take about ``memory`` bytes."""
    if path.name.lower().endswith(".parquet"):
        yield from _parquet(path, memory, wanted)
        return
    arrow = pyarrow_module("csv", f"reading {path.name} in pieces")
    block = max(1 << 12, min(memory // 8, 1 << 26))
    names = _csv_names(path)
    reader = reading(
        path,
        "the table",
        lambda: arrow.open_csv(
            path,
            read_options=arrow.ReadOptions(block_size=block),
            parse_options=arrow.ParseOptions(delimiter=tables._delimiter(path)),
            convert_options=arrow.ConvertOptions(
                strings_can_be_null=False, include_columns=[name for name in names if wanted(name)]
            ),
        ),
    )
    table = pyarrow_module("lib", "")
    while True:
        try:
            batch = reading(path, "the table", reader.read_next_batch)
        except StopIteration:
            return
        yield tables._columns(path, table.Table.from_batches([batch]))


def _csv_names(path: Path) -> list[str]:
    """The header line."""
    import csv
    import gzip

    def read() -> list[str]:
        with (
            gzip.open(path, "rt", newline="") if path.name.endswith(".gz") else path.open(newline="") as file
        ):
            return next(csv.reader(file, delimiter=tables._delimiter(path)), [])

    return reading(path, "the header", read)


def _parquet(path: Path, memory: int, wanted: Callable[[str], bool]) -> Iterator[dict[str, Array]]:
    parquet = pyarrow_module("parquet", f"reading {path.name}")
    table = pyarrow_module("lib", "")
    file = reading(path, "the table", lambda: parquet.ParquetFile(path))
    columns = [name for name in file.schema_arrow.names if wanted(name)]
    each = max(1, file.metadata.num_rows)
    size = sum(file.metadata.row_group(g).total_byte_size for g in range(file.metadata.num_row_groups))
    rows = max(1 << 10, int(memory / 8 / max(1.0, size / each)))
    stream = file.iter_batches(batch_size=rows, columns=columns, use_threads=False)
    while True:
        try:
            batch = reading(path, "the table", lambda: next(stream))
        except StopIteration:
            return
        yield tables._columns(path, table.Table.from_batches([batch]))


class Numbering:
    """Position of ids among those of the nodes; None = edges already hold node numbers."""

    def __init__(self, ids: Array | None) -> None:
        if ids is not None and ids.dtype.kind not in "iu":
            ids = ids.astype(str)
        self._order = None if ids is None else np.argsort(ids, kind="stable")
        self._sorted = None if ids is None or self._order is None else ids[self._order]

    def of(self, path: Path, column: Array, first: int) -> Array:
        """int64: node of each entry; ``first`` is the row of the file that the column starts at."""
        if self._sorted is None or self._order is None:
            if column.dtype.kind not in "iu":
                bad = str(column[0]) if column.size else ""
                raise DatasetError(
                    f"{path}: row {first}: {bad!r} is not a whole number; ids that are words, or have gaps, need a node "
                    "table with a column 'id' (--nodes)"
                )
            return column.astype(np.int64, copy=False)
        if self._sorted.dtype.kind not in "iu":
            column = column.astype(str)
        at = np.searchsorted(self._sorted, column).clip(max=max(len(self._sorted) - 1, 0))
        missing = self._sorted[at] != column if len(self._sorted) else np.ones(column.size, bool)
        if missing.any():
            row = int(missing.argmax())
            raise DatasetError(
                f"{path}: row {first + row} names node {str(column[row])!r}, which is not in the node table"
            )
        found: Array = self._order[at]
        return found


def _is_edge_column(name: str) -> bool:
    return name in (*tables._SRC, *tables._DST, *tables._WEIGHT)


def edges_to_npy(
    path: Path, to: Path, weight_to: Path, numbering: Numbering, *, memory: int, wide: bool,
    tell: Callable[[int], None],
) -> tuple[int, bool]:  # fmt: skip
    """(number of edges, whether they have weights): src, dst as [E, 2] in ``to`` and weights [E] in ``weight_to``."""
    done, has_weight = 0, None
    with (
        GrowingArray(to, np.int64 if wide else np.int32, 2) as ends,
        GrowingArray(weight_to, np.float32) as weights,
    ):
        for table in batches(path, memory, _is_edge_column):
            columns = [tables._column(path, table, names) for names in (tables._SRC, tables._DST)]
            weight = next((table[key] for key in tables._WEIGHT if key in table), None)
            has_weight = weight is not None
            numbers = [numbering.of(path, column, done) for column in columns]
            if not wide and any(c.size and (c.min() < -(2**31) or c.max() >= 2**31) for c in numbers):
                raise DatasetError(f"{path}: ids beyond 2**31 in rows from {done}")
            ends.append(np.stack(numbers, 1))
            if weight is not None:
                weights.append(tables._numeric(path, "weight", weight))
            done += columns[0].size
            tell(done)
    return done, bool(has_weight)


def find_numbering(path: Path, *, memory: int, tell: Callable[[int], None]) -> tuple[Array | None, int]:
    """(ids in node order, or None if edges hold node numbers; largest id), as ``load_tables`` without a node table."""
    size, low, high, seen = 0, 0, -1, np.zeros(0, np.int64)
    is_number = True
    for table in batches(path, memory, lambda name: name in (*tables._SRC, *tables._DST)):
        both = np.concatenate([tables._column(path, table, names) for names in (tables._SRC, tables._DST)])
        size += both.size
        tell(size // 2)
        is_number = is_number and both.dtype.kind in "iu"
        if is_number and both.size:
            low, high = min(low, int(both.min())), max(high, int(both.max()))
    if is_number and low >= 0 and high < max(2 * size, 1):
        return None, high
    for table in batches(path, memory, lambda name: name in (*tables._SRC, *tables._DST)):
        columns: Sequence[Array] = [
            tables._column(path, table, names) for names in (tables._SRC, tables._DST)
        ]
        both = np.unique(np.concatenate([c.astype(str) if not is_number else c for c in columns]))
        seen = np.union1d(seen.astype(both.dtype) if not seen.size else seen, both)
    return seen, len(seen) - 1


def node_columns(path: Path, *, memory: int) -> tuple[dict[str, Array], int, list[str]]:
    """(id, label and split columns whole, number of rows, names of the other columns)."""
    found: dict[str, list[Array]] = {}
    rows, others = 0, _csv_names(path) if not path.name.lower().endswith(".parquet") else _parquet_names(path)
    others = [name for name in others if name not in _ABOUT]
    wanted = (*_ABOUT, *others[:1])
    for table in batches(path, memory, lambda name: name in wanted):
        rows += len(next(iter(table.values())))
        for name in _ABOUT:
            if name in table:
                found.setdefault(name, []).append(table[name])
    return {name: np.concatenate(pieces) for name, pieces in found.items()}, rows, others


def _parquet_names(path: Path) -> list[str]:
    parquet = pyarrow_module("parquet", f"reading {path.name}")
    names: list[str] = reading(path, "the table", lambda: parquet.ParquetFile(path)).schema_arrow.names
    return names


def number_nodes(path: Path, ids: Array | None, rows: int) -> Array | None:
    """The ids in node order, or None where the edges hold node numbers. DatasetError if an id stands in two rows."""
    empty = np.zeros(0, np.int64)
    return tables._numbering(empty, empty, ids, rows, path)[0]


def features_to_npy(
    path: Path, to: Path, *, memory: int, others: Sequence[str], tell: Callable[[int], None]
) -> None:
    """Feature columns as float32 [N, F] in ``to``; DatasetError names the first that is not finite."""
    file: GrowingArray | None = None
    done = 0
    kept = [name for name in ("x", "features") if name in others][:1] or others
    try:
        for table in batches(path, memory, lambda name: name in kept):
            x = tables._features(path, table)
            assert x is not None
            if not np.isfinite(x).all():
                row, column = (int(i) for i in np.argwhere(~np.isfinite(x))[0])
                raise DatasetError(
                    f"{path}: node {done + row}, feature {column} is {x[row, column]}; expected finite numbers"
                )
            if file is None:
                file = GrowingArray(to, np.float32, x.shape[1])
            file.append(x)
            done += x.shape[0]
            tell(done)
    finally:
        if file is not None:
            file.__exit__(None, None, None)
