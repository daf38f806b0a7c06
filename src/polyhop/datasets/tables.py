"""Edge and node tables in CSV or Parquet.

Edges: columns ``src``, ``dst`` (or ``source``, ``target``) and optional ``weight``. Nodes (optional): ``id`` (default: row
number), ``label``, ``split`` (train, val, test or empty), and features: a list column ``x`` or ``features``, else every
other column, which must be numeric. Ids may be any whole numbers or strings. They are numbered by their row in the node
table, else in sorted order; unless they already are 0 .. N-1, the original ids stand in ``meta["ids"]``. Labels may be
words: their names then stand in ``meta["classes"]``.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from polyhop.datasets._arrays import Array, Rows, as_features, pyarrow_module, reading
from polyhop.errors import DatasetError, unknown
from polyhop.graph import Graph, dense_features

__all__ = ["find_tables", "is_table", "load_tables", "table_rows"]

_KINDS = (".parquet", ".csv", ".csv.gz", ".tsv", ".tsv.gz")
_SETS = {
    "train": 1,
    "val": 2,
    "valid": 2,
    "validation": 2,
    "test": 3,
    "": 0,
    "none": 0,
    "0": 0,
    "1": 1,
    "2": 2,
    "3": 3,
}
_FACTS = {"id", "label", "split"}  # columns of nodes that are no features
_SRC, _DST, _WEIGHT = ("src", "source"), ("dst", "target", "destination"), ("weight", "edge_weight")


def is_table(path: Path) -> bool:
    """Whether the file's name is that of a CSV or Parquet table."""
    return path.name.lower().endswith(_KINDS)


def find_tables(folder: Path) -> tuple[Path, Path | None] | None:
    """The edges.* and nodes.* files of a folder, or None."""
    found = {
        stem: next((folder / f"{stem}{kind}" for kind in _KINDS if (folder / f"{stem}{kind}").exists()), None)
        for stem in ("edges", "nodes")
    }
    return None if found["edges"] is None else (found["edges"], found["nodes"])


def load_tables(
    edges: Path,
    nodes: Path | None = None,
    *,
    name: str | None = None,
    features: str = "auto",
    duplicates: str = "error",
) -> Graph:
    """The graph of an edge table and, if given, a node table."""
    table, _ = _read(edges)
    source, target = _column(edges, table, _SRC), _column(edges, table, _DST)
    weight = next((table[key] for key in _WEIGHT if key in table), None)
    only = None if nodes is None or features != "none" else _names(nodes) & _FACTS
    node_table, rows = ({}, None) if nodes is None else _read(nodes, only)
    meta: dict[str, Any] = {"source": edges.name}
    ids, count = _numbering(source, target, node_table.pop("id", None), rows, nodes)
    if ids is not None:
        meta["ids"] = ids
        source, target = (_renumber(edges, column, ids) for column in (source, target))
    y, classes = _labels(node_table.pop("label", None))
    if classes:
        meta["classes"] = classes
    codes = _codes(nodes, node_table.pop("split", None))
    x = None if nodes is None or features == "none" else _features(nodes, node_table)
    store = None if x is None else dense_features(x)
    return Graph.from_edges(
        np.stack([source.astype(np.int64), target.astype(np.int64)]), as_features(store, features), y,
        num_nodes=count, edge_weight=None if weight is None else _numeric(edges, "weight", weight),
        train=None if codes is None else codes == 1, val=None if codes is None else codes == 2,
        test=None if codes is None else codes == 3, num_classes=len(classes) or None, duplicates=duplicates,
        name=name or edges.parent.name or edges.stem, meta=meta,
    )  # fmt: skip


def table_rows(nodes: Path | None) -> Rows:
    """What the header of a node table says of its features: of CSV its first line, of Parquet its schema and footers."""
    if nodes is None:
        return Rows()
    if not _is_parquet(nodes):
        return Rows(len(_names(nodes) - _FACTS))
    dataset = _parquet(nodes)
    kinds = {field.name: field.type for field in dataset.schema if field.name not in _FACTS}
    for key in ("x", "features"):
        if "list" in str(kinds.get(key)):
            return Rows(_list_length(nodes, dataset, key, kinds[key]))
    empty = dataset.schema.empty_table()
    for key, kind in kinds.items():
        if empty[key].to_numpy().dtype.kind not in "biuf":
            raise DatasetError(f"{nodes}: column {key!r} is not numeric: it holds {kind}")
    return Rows(len(kinds))


def _list_length(path: Path, dataset: Any, key: str, kind: Any) -> int:
    """Of the lists of a column, from how many values and rows every file says it has."""
    if hasattr(kind, "list_size"):
        return int(kind.list_size)
    files = reading(path, "the table", lambda: [each.metadata for each in dataset.fragments])
    values = 0
    for file in files:
        groups = [file.row_group(at) for at in range(file.num_row_groups)]
        columns = [group.column(at) for group in groups for at in range(group.num_columns)]
        values += sum(each.num_values for each in columns if each.path_in_schema.split(".")[0] == key)
    rows = sum(file.num_rows for file in files)
    if rows and values % rows:
        raise DatasetError(f"{path}: lists of different lengths in column {key!r}")
    return int(values // max(1, rows))


def _is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(".parquet")


def _parquet(path: Path) -> Any:
    """A file, or a folder of them, of which no rows are read yet."""
    parquet = pyarrow_module("parquet", f"reading {path.name}")
    return reading(path, "the table", lambda: parquet.ParquetDataset(path))


def _names(path: Path) -> set[str]:
    """Of a table's columns, from its header."""
    if _is_parquet(path):
        return set(_parquet(path).schema.names)

    def read() -> set[str]:
        with _lines(path) as file:
            return set(_header(csv.reader(file, delimiter=_delimiter(path))))

    return reading(path, "the header line", read)


def _read(path: Path, only: set[str] | None = None) -> tuple[dict[str, Array], int]:
    """Columns by name, and how many rows there are; ``only``: values of other columns are passed over.

    Strings come as object or str arrays, list columns as matrices.
    """
    if _is_parquet(path):
        columns = None if only is None else sorted(only)
        stored = _parquet(path)
        table = reading(path, "the table", lambda: stored.read(columns=columns))
        return _columns(path, table), table.num_rows
    try:
        arrow = pyarrow_module("csv", "")
    except DatasetError:
        return reading(path, "the table", lambda: _plain_csv(path, only))
    table, rows = reading(path, "the table", lambda: _arrow_csv(arrow, path, only))
    return _columns(path, table) if only is None or only else {}, rows


def _arrow_csv(arrow: Any, path: Path, only: set[str] | None) -> tuple[Any, int]:
    """Values of other columns than ``only`` are not even kept as text."""
    plain, options = {"strings_can_be_null": False}, arrow.ParseOptions(delimiter=_delimiter(path))
    if only is None:
        table = arrow.read_csv(path, parse_options=options, convert_options=arrow.ConvertOptions(**plain))
        return table, table.num_rows
    # As bytes at first: kinds of columns are found among all values, and for that pyarrow keeps every line whole.
    names = sorted(only) or ["id"]
    convert = arrow.ConvertOptions(
        include_columns=names, include_missing_columns=not only, column_types=dict.fromkeys(names, "binary"), **plain
    )  # fmt: skip
    text, rows = io.BytesIO(), 0
    with (
        arrow.open_csv(path, parse_options=options, convert_options=convert) as batches,
        arrow.CSVWriter(text, batches.schema) as out,
    ):
        for batch in batches:
            out.write_batch(batch)
            rows += batch.num_rows
    text.seek(0)
    return arrow.read_csv(text, convert_options=arrow.ConvertOptions(**plain)), rows


def _delimiter(path: Path) -> str:
    return "\t" if ".tsv" in path.name.lower() else ","


def _columns(path: Path, table: Any) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for key, column in zip(table.column_names, table.columns, strict=True):
        if "list" in str(column.type):
            rows = column.to_pylist()
            if len({None if row is None else len(row) for row in rows}) > 1:
                raise DatasetError(f"{path}: lists of different lengths in column {key!r}")
            out[key] = np.asarray(rows, np.float32)
        else:
            out[key] = column.to_numpy()
    return out


def _lines(path: Path) -> IO[str]:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _header(lines: Iterator[list[str]]) -> list[str]:
    header = next((line for line in lines if line), None)
    if header is None:
        raise ValueError("no header line")
    return header


def _plain_csv(path: Path, only: set[str] | None) -> tuple[dict[str, Array], int]:
    """Without pyarrow: slower, same result."""
    with _lines(path) as file:
        lines = csv.reader(file, delimiter=_delimiter(path))
        header, count = _header(lines), 0
        kept: dict[int, list[str]] = {k: [] for k, key in enumerate(header) if only is None or key in only}
        for count, row in enumerate(lines, start=1):
            if len(row) != len(header):
                raise ValueError(f"line {count + 1} has {len(row)} values for {len(header)} columns")
            for k, column in kept.items():
                column.append(row[k])
    return {header[k]: _typed(column) for k, column in kept.items()}, count


def _typed(values: list[str]) -> Array:
    """The narrowest of int64, float64 and str that holds every value."""
    for kind in (np.int64, np.float64):
        try:
            typed: Array = np.array([v if v or kind is np.int64 else "nan" for v in values]).astype(kind)
            return typed
        except ValueError:
            continue
    return np.array(values, dtype=object)


def _column(path: Path, table: dict[str, Array], options: tuple[str, ...]) -> Array:
    for key in options:
        if key in table:
            return table[key]
    has = ", ".join(table) or "nothing"
    raise DatasetError(
        f"{path}: no column {options[0]!r} (or {', '.join(map(repr, options[1:]))}); it has {has}"
    )


def _numeric(path: Path, name: str, column: Array) -> Array:
    if column.dtype.kind not in "biuf":
        raise DatasetError(f"{path}: column {name!r} is not numeric, e.g. {column[0]!r}")
    return column


def _numbering(
    source: Array, target: Array, ids: Array | None, rows: int | None, nodes: Path | None
) -> tuple[Array | None, int | None]:
    """(original ids in node order, or None if edges already hold node numbers; number of nodes)."""
    if ids is None and rows is not None:
        return None, rows
    if ids is None:
        both = np.concatenate([source, target])
        if both.dtype.kind in "iu" and both.size and int(both.min()) >= 0 and int(both.max()) < 2 * both.size:
            return None, None  # near enough to 0 .. N-1 to be meant so
        ids = np.unique(both.astype(str) if both.dtype.kind == "O" else both)
        return ids, len(ids)
    if len(np.unique(ids.astype(str) if ids.dtype.kind == "O" else ids)) != len(ids):
        values, counts = np.unique(ids.astype(str), return_counts=True)
        raise DatasetError(
            f"{nodes}: id {str(values[counts.argmax()])!r} stands in {counts.max()} rows; ids must be unique"
        )
    if ids.dtype.kind in "iu" and bool((ids == np.arange(len(ids))).all()):
        return None, len(ids)
    return ids, len(ids)


def _renumber(path: Path, column: Array, ids: Array) -> Array:
    """Position of each entry among ids."""
    if column.dtype.kind not in "iu" or ids.dtype.kind not in "iu":
        column, ids = column.astype(str), ids.astype(str)
    order = np.argsort(ids, kind="stable")
    at = np.searchsorted(ids[order], column).clip(max=len(ids) - 1)
    found: Array = order[at]
    missing = ids[found] != column
    if missing.any():
        raise DatasetError(
            f"{path}: row {int(missing.argmax())} names node {str(column[missing.argmax()])!r}, which is not in the "
            f"node table ({int(missing.sum())} such entries)"
        )
    return found


def _labels(column: Array | None) -> tuple[Array | None, list[str]]:
    """(classes by number with -1 for none, or None; names of the classes where labels are words)."""
    if column is None:
        return None, []
    if column.dtype.kind in "biuf":
        return column.astype(np.int64) if column.dtype.kind in "bi" else column, []
    words = np.array(["" if word is None else str(word) for word in column])
    classes = [str(word) for word in np.unique(words) if word]
    y = np.searchsorted(np.array(classes), words) if classes else np.full(len(words), -1)
    return np.where(words == "", -1, y), classes


def _codes(path: Path | None, column: Array | None) -> Array | None:
    """0 none, 1 train, 2 val, 3 test of each node, or None without a split column."""
    if column is None:
        return None
    out = np.zeros(len(column), np.int64)
    for word in np.unique(np.array(["" if w is None else str(w) for w in column])):
        if word.lower() not in _SETS:
            raise DatasetError(
                f"{path}: column 'split': {unknown('set', str(word), ('train', 'val', 'test'))}"
            )
        out[np.array(["" if w is None else str(w) for w in column]) == word] = _SETS[word.lower()]
    return out


def _features(path: Path, table: dict[str, Array]) -> Array | None:
    """The list column x or features, else all columns side by side; float32 [N, F]."""
    for key in ("x", "features"):
        if key in table and table[key].ndim == 2:
            return table[key]
    if not table:
        return None
    return np.stack([_numeric(path, key, column).astype(np.float32) for key, column in table.items()], axis=1)
