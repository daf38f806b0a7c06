"""Graphs without their features: of every form, values that cannot be read are not missed; widths are those of a load."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyhop import datasets
from polyhop.datasets import GraphSizes, load, load_unread, save, sizes
from polyhop.datasets._arrays import Npz
from polyhop.datasets.objects import from_object
from polyhop.errors import InputError
from polyhop.graph import DenseFeatures, Graph, SparseFeatures

NODES, WIDTH = 2000, 24
EDGES = np.stack([np.arange(NODES), (7 * np.arange(NODES) + 1) % NODES])
LABELS = np.arange(NODES) % 5
CODES = np.arange(NODES) % 4
X = np.random.default_rng(0).standard_normal((NODES, WIDTH)).astype("float32")


@dataclass(frozen=True)
class Source:
    """A graph in files, and what makes its feature values unreadable."""

    given: dict[str, Any]
    spoil: Callable[[], None]

    def load(self) -> Graph:
        return load(**self.given)


def damage(path: Path, begin: int, end: int | None = None) -> None:
    """Bytes of a file replaced by others."""
    whole = bytearray(path.read_bytes())
    stop = len(whole) if end is None else end
    assert begin < stop
    whole[begin:stop] = b"\xa5" * (stop - begin)
    path.write_bytes(whole)


def cut(path: Path, size: int) -> None:
    assert path.stat().st_size > 2 * size
    with path.open("rb+") as file:
        file.truncate(size)


def damage_member(path: Path, name: str, after: int) -> None:
    """An array in an archive, behind its header."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{name}.npy")
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        lengths = file.read(4)
    begin = member.header_offset + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    damage(path, begin + after, begin + member.compress_size)


def sparse() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    indptr = np.arange(NODES + 1) * 10
    return {
        "x_indptr": indptr, "x_indices": rng.integers(0, 300, 10 * NODES).astype("int32"),
        "x_shape": np.array([NODES, 300]),
    }  # fmt: skip


def npz(folder: Path, write: Any = np.savez, after: int = 200, **more: Any) -> Source:
    path = folder / "one.npz"
    arrays = {"edge_index": EDGES, "y": LABELS, "split_codes": CODES[None], **more}
    write(path, **arrays)
    spoiled = "x" if "x" in more else "x_indices"
    return Source({"source": str(path)}, lambda: damage_member(path, spoiled, after))


def npy(folder: Path, x: Any = X, *, mmap: bool | None = None, **more: Any) -> Source:
    home = folder / "arrays"
    home.mkdir()
    for name, array in {"edge_index": EDGES, "y": LABELS, "train": CODES == 1, "x": x, **more}.items():
        if array is not None:
            np.save(home / f"{name}.npy", array)
    spoiled = home / ("x_indices.npy" if x is None else "x.npy")
    given = {"source": str(home)} if mmap is None else {"source": str(home), "mmap": mmap}
    return Source(given, lambda: cut(spoiled, 200))


def saved(folder: Path, mmap: bool | None = None) -> Source:
    save(Graph.from_edges(EDGES, X, LABELS, train=CODES == 1, name="kept"), folder / "saved")
    return Source({"source": str(folder / "saved"), "mmap": mmap}, lambda: cut(folder / "saved/x.npy", 200))


def table(folder: Path, end: str = ".csv", *, beside: bool = False, facts: bool = True) -> Source:
    """Values of features become words, which no load takes."""
    home = folder / "table"
    home.mkdir()
    mark = "\t" if "tsv" in end else ","
    words = {0: "", 1: "train", 2: "val", 3: "test"}

    def write(file: Path, lines: list[list[Any]]) -> None:
        text = "".join(mark.join(map(str, line)) + "\n" for line in lines)
        file.write_bytes(gzip.compress(text.encode()) if end.endswith(".gz") else text.encode())

    def nodes(values: Any) -> None:
        header = [*(["id", "label", "split"] if facts else []), *(f"f{k}" for k in range(WIDTH))]
        rows = [
            [*([v, LABELS[v], words[CODES[v]]] if facts else []), *values[v]] for v in range(NODES)
        ]  # fmt: skip
        write(home / f"nodes{end}", [header, *rows])

    write(home / f"edges{end}", [["src", "dst"], *EDGES.T.tolist()])
    nodes(X)
    given = {"source": str(home / f"edges{end}"), "nodes": str(home / f"nodes{end}")}
    return Source(given if beside else {"source": str(home)}, lambda: nodes([["word"] * WIDTH] * NODES))


def parquet(folder: Path, kind: str) -> Source:
    """``kind``: columns, list or fixed."""
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    home = folder / "table"
    home.mkdir()
    words = np.array(["", "train", "val", "test"])[CODES]
    writer.write_table(pa.table({"src": EDGES[0], "dst": EDGES[1]}), home / "edges.parquet")
    columns: dict[str, Any] = {"id": np.arange(NODES), "label": LABELS, "split": words}
    if kind == "columns":
        columns |= {f"f{k}": X[:, k].astype("float64") for k in range(WIDTH)}
    elif kind == "list":
        columns["x"] = X.tolist()
    else:
        columns["features"] = pa.FixedSizeListArray.from_arrays(X.ravel(), WIDTH)
    writer.write_table(pa.table(columns), home / "nodes.parquet", row_group_size=700)

    def spoil() -> None:
        groups = writer.ParquetFile(home / "nodes.parquet").metadata
        for group in (groups.row_group(at) for at in range(groups.num_row_groups)):
            for column in (group.column(at) for at in range(group.num_columns)):
                if column.path_in_schema.split(".")[0] not in ("id", "label", "split"):
                    begin = column.dictionary_page_offset or column.data_page_offset
                    damage(home / "nodes.parquet", begin, begin + column.total_compressed_size)

    return Source({"source": str(home)}, spoil)


def ogb(folder: Path, *, name: str = "ogbn_arxiv", x: Any = X) -> Source:
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    for file, array in {"edge": EDGES.T, "num-node-list": [[NODES]], "node-label": LABELS[:, None]}.items():
        np.savetxt(raw / f"{file}.csv.gz", array, fmt="%d", delimiter=",")
    np.savetxt(raw / "node-feat.csv.gz", x, fmt="%.8g", delimiter=",")
    return Source({"source": str(folder / name)}, lambda: cut(raw / "node-feat.csv.gz", 9000))


def ogb_binary(folder: Path, write: Any, x: Any, after: int) -> Source:
    raw = folder / "ogbn_papers100M" / "raw"
    raw.mkdir(parents=True)
    write(raw / "data.npz", edge_index=EDGES, node_feat=x, num_nodes_list=np.array([NODES]))
    np.savez_compressed(raw / "node-label.npz", node_label=LABELS[:, None].astype("float32"))
    return Source({"source": str(raw.parent)}, lambda: damage_member(raw / "data.npz", "node_feat", after))


small = (100 * X).clip(-100, 100).astype("int8")
MAKERS: dict[str, Callable[[Path], Source]] = {
    "npz": lambda folder: npz(folder, x=X),
    "npz, compressed": lambda folder: npz(folder, np.savez_compressed, 20_000, x=X),
    "npz, half": lambda folder: npz(folder, x=X.astype("float16")),
    "npz, small with a scale": lambda folder: npz(folder, x=small, x_scale=np.ones(WIDTH, "float32")),
    "npz, sparse": lambda folder: npz(folder, **sparse()),
    "folder": npy,
    "folder, float64": lambda folder: npy(folder, X.astype("float64")),
    "folder, half": lambda folder: npy(folder, X.astype("float16")),
    "folder, by columns": lambda folder: npy(folder, np.asfortranarray(X, "float64")),
    "folder, one column of columns": lambda folder: npy(folder, np.asfortranarray(X[:, :1], "float64")),
    "folder, small with a scale": lambda folder: npy(folder, small, x_scale=np.ones(WIDTH, "float32")),
    "folder, mapped": lambda folder: npy(folder, mmap=True, edge_index=EDGES.astype("int32")),
    "folder, in memory": lambda folder: npy(folder, mmap=False),
    "folder, sparse": lambda folder: npy(
        folder, None, **sparse(), x_values=np.ones(10 * NODES, "float32")
    ),
    "folder, saved": saved,
    "folder, saved and mapped": lambda folder: saved(folder, mmap=True),
    "csv": table,
    "tsv.gz": lambda folder: table(folder, ".tsv.gz"),
    "csv, nodes beside": lambda folder: table(folder, beside=True),
    "csv, features only": lambda folder: table(folder, facts=False),
    "parquet": lambda folder: parquet(folder, "columns"),
    "parquet, lists": lambda folder: parquet(folder, "list"),
    "parquet, lists of one length": lambda folder: parquet(folder, "fixed"),
    "ogb": ogb,
    "ogb, both ways": lambda folder: ogb(folder, name="ogbn_products"),
    "ogb, binary": lambda folder: ogb_binary(folder, np.savez, X, 200),
    "ogb, binary, compressed half": lambda folder: ogb_binary(
        folder, np.savez_compressed, X.astype("float16"), 20_000
    ),
}  # fmt: skip


def of(graph: Graph) -> GraphSizes:
    """Sizes as a graph has them that was loaded whole."""
    found = GraphSizes(graph.name, graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes)
    if isinstance(graph.x, SparseFeatures):
        return replace(found, row_length=graph.x.rows.values.numel() / graph.num_nodes)
    assert isinstance(graph.x, DenseFeatures)
    dtype = str(graph.x.values.dtype).removeprefix("torch.")
    return replace(found, row_dtype=dtype, has_scale=graph.x.scale is not None)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


@pytest.fixture(params=["pyarrow", "plain"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of reading text."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    else:
        pytest.importorskip("pyarrow")
    return str(request.param)


def check(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = source.load()
    given = {key: value for key, value in source.given.items() if key != "mmap"}
    source.spoil()
    with pytest.raises(InputError):
        source.load()
    times, real = [], datasets.load
    monkeypatch.setattr(datasets, "load", lambda *args, **named: times.append(1) or real(*args, **named))
    graph, about = load_unread(**given)
    assert times == [1]
    assert about == of(whole)
    assert graph.x is None
    assert (graph.name, graph.num_nodes, graph.num_classes) == (
        whole.name,
        whole.num_nodes,
        whole.num_classes,
    )
    for name in ("indptr", "indices", "y", "edge_weight"):
        assert same(getattr(graph, name), getattr(whole, name)), name
    assert (graph.split is None) == (whole.split is None)
    assert sizes(**given) == about


@pytest.mark.parametrize("name", [name for name in MAKERS if not name.startswith(("csv", "tsv", "ogb"))])
def test_unreadable_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check(MAKERS[name](tmp_path), monkeypatch)


@pytest.mark.parametrize("name", [name for name in MAKERS if name.startswith(("csv", "tsv", "ogb"))])
def test_unreadable_features_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, name: str
) -> None:
    check(MAKERS[name](tmp_path), monkeypatch)


@pytest.mark.parametrize(
    "name", ["npz", "npz, sparse", "folder", "folder, in memory", "folder, sparse", "csv, features only"]
)
def test_nodes_that_only_features_count(tmp_path: Path, name: str) -> None:
    """Without labels the number of rows says how many nodes there are, also where the last have no edges."""
    source = MAKERS[name](tmp_path)
    few = EDGES[:, EDGES.max(0) < NODES - 5]
    if name.startswith("npz"):
        more = {"x": X} if name == "npz" else sparse()
        np.savez(source.given["source"], edge_index=few, **more)
    elif name.startswith("folder"):
        home = Path(source.given["source"])
        for file in ("y", "train"):
            (home / f"{file}.npy").unlink()
        np.save(home / "edge_index.npy", few)
    assert load(**source.given).num_nodes == NODES
    given = {key: value for key, value in source.given.items() if key != "mmap"}
    assert load_unread(**given)[0].num_nodes == NODES
    assert sizes(**given).num_nodes == NODES


def test_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], Npz.read
    monkeypatch.setattr(Npz, "read", lambda file, name: read.append(name) or real(file, name))
    graph, about = load_unread("debian-packages", split=4)
    assert not {"x", "x_scale", "x_indptr", "x_indices", "x_data"} & set(read)
    assert read.count("edge_index") == 1
    whole = load("debian-packages", split=4)
    assert about == of(whole)
    assert graph.split is not None
    assert whole.split is not None
    assert torch.equal(graph.split.train, whole.split.train)


@pytest.mark.parametrize(
    "name",
    [
        "sbm:?nodes=300&features=9&classes=3",
        "rmat:?scale=8&classes=4&features=6",
        "synth:arxiv?scale=0.005&features=7",
    ],
)
def test_generated(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole, widths = load(name), []
    real = datasets.synth._features
    monkeypatch.setattr(datasets.synth, "_features", lambda *given: widths.append(given[3]) or real(*given))
    graph, about = load_unread(name)
    assert widths == [0]
    assert about == of(whole)
    assert torch.equal(graph.indices, whole.indices)


class Untouched:
    """Features of an object that says how many rows it has, and nothing else."""

    shape = (4, 3)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"features were asked for {name}")


@pytest.mark.parametrize("kind", ["pyg", "dgl", "mapping", "sequence"])
def test_objects(kind: str) -> None:
    edges, x = torch.tensor([[0, 1], [1, 2]]), Untouched()
    if kind == "pyg":
        source: Any = type("Data", (), {"edge_index": edges, "x": x, "num_nodes": 4})()
    elif kind == "dgl":
        more = {"ndata": {"feat": x}, "edges": lambda self: tuple(edges), "num_nodes": lambda self: 4}
        source = type("DGLGraph", (), more)()
    else:
        source = {"edge_index": edges, "x": x} if kind == "mapping" else (edges, x)
    graph = from_object(source, features="none")
    assert graph.x is None
    assert graph.num_nodes == 4


def test_columns_of_words(tmp_path: Path) -> None:
    """Where the header tells, they are refused as a load refuses them."""
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pa.table({"src": [0, 1], "dst": [1, 2]}), tmp_path / "edges.parquet")
    for columns, message in (
        (
            {"a": [1, 2, 3], "b": ["x", "y", "z"]},
            r"nodes\.parquet: column 'b' is not numeric: it holds string",
        ),
        ({"x": [[1.0], [2.0, 3.0], [4.0]]}, "lists of different lengths in column 'x'"),
    ):
        writer.write_table(pa.table(columns), tmp_path / "nodes.parquet")
        for opening in (load, load_unread):
            with pytest.raises(InputError, match=message.split(":")[0] if opening is load else message):
                opening(str(tmp_path))


@pytest.mark.parametrize("name", ["ogbn_papers100M", "ogbn_products"])
@pytest.mark.parametrize("labels", [LABELS[:, None], np.eye(5)[LABELS], None])
def test_sizes_of_binary_ogb_read_no_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, labels: Any
) -> None:
    raw = tmp_path / name / "raw"
    raw.mkdir(parents=True)
    np.savez(raw / "data.npz", edge_index=EDGES, node_feat=X, num_nodes_list=np.array([NODES]))
    if labels is not None:
        y = labels.astype("float32")
        y[0, 0] = np.nan if y.shape[1] == 1 else y[0, 0]
        np.savez(raw / "node-label.npz", node_label=y)
    whole, read, real = of(load(str(raw.parent), duplicates="keep")), [], Npz.read
    monkeypatch.setattr(Npz, "read", lambda file, name: read.append(name) or real(file, name))
    assert sizes(str(raw.parent)) == sizes(str(raw)) == whole
    assert not {"edge_index", "node_feat"} & set(read)


@pytest.mark.parametrize("name", ["npz", "folder", "ogb, binary"])
def test_rows_for_other_nodes(tmp_path: Path, name: str) -> None:
    source = MAKERS[name](tmp_path)
    if name == "folder":
        np.save(Path(source.given["source"]) / "x.npy", X[:9])
    elif name == "npz":
        np.savez(source.given["source"], edge_index=EDGES, y=LABELS, x=X[:9])
    else:
        raw = Path(source.given["source"]) / "raw"
        np.savez(raw / "data.npz", edge_index=EDGES, node_feat=X[:9], num_nodes_list=np.array([NODES]))
    for opening in (load, load_unread):
        with pytest.raises(InputError, match=r"x: 9 rows for 2000 nodes; expected one|nodes 0 \.\. 8"):
            opening(**source.given)


def test_empty_text(tmp_path: Path) -> None:
    source = ogb(tmp_path)
    file = Path(source.given["source"]) / "raw" / "node-feat.csv.gz"
    file.write_bytes(gzip.compress(b"\n"))
    with pytest.raises(InputError, match=r"node-feat\.csv\.gz: cannot read the first line"):
        load_unread(**source.given)


# ---------------------------------------------------------------- memory

BROAD = 2000


def big_text(folder: Path, rows: int) -> None:
    (folder / "edges.csv").write_text("src,dst\n0,1\n1,2\n")
    header, values = ",".join(f"f{k}" for k in range(BROAD)), ",".join(["0.123456"] * BROAD)
    with (folder / "nodes.csv").open("w") as file:
        file.write(f"label,split,{header}\n")
        file.writelines(f"{v % 3},train,{values}\n" for v in range(rows))


def big_ogb_text(folder: Path, rows: int) -> None:
    raw = folder / "raw"
    raw.mkdir()
    for name, lines in {
        "edge": ["0,1\n"],
        "num-node-list": [f"{rows}\n"],
        "node-feat": [",".join(["0.123456"] * BROAD) + "\n"] * rows,
    }.items():
        with gzip.open(raw / f"{name}.csv.gz", "wt", compresslevel=1) as file:
            file.writelines(lines)


def big_ogb(folder: Path, rows: int) -> None:
    (folder / "raw").mkdir()
    x = np.zeros((rows, BROAD), "float32")
    np.savez(folder / "raw" / "data.npz", edge_index=np.array([[0], [1]]), node_feat=x, num_nodes_list=[rows])


def big_npz(folder: Path, rows: int) -> None:
    np.savez(folder / "big.npz", edge_index=np.array([[0], [1]]), x=np.zeros((rows, BROAD), "float32"))


def big_parquet(folder: Path, rows: int) -> None:
    pa, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(pa.table({"src": [0], "dst": [1]}), folder / "edges.parquet")
    x = pa.FixedSizeListArray.from_arrays(np.random.default_rng(0).random(rows * BROAD, "float32"), BROAD)
    writer.write_table(pa.table({"label": np.arange(rows) % 3, "x": x}), folder / "nodes.parquet")


@pytest.mark.parametrize(
    ("write", "rows", "is_plain", "share"),
    [
        (big_text, 5000, False, 0.6),  # pyarrow reads some 40 MB ahead, however long the file is
        (big_text, 200, True, 0.5),
        (big_ogb_text, 2000, False, 0.1),
        (big_ogb, 2000, False, 0.1),
        (big_npz, 2000, False, 0.1),
        (big_parquet, 2000, False, 0.1),
    ],
)
def test_memory_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, rows: int, is_plain: bool, share: float
) -> None:
    """``share``: of the bytes of all values, as they are in memory or in text, how many may be held at once."""
    pa = pytest.importorskip("pyarrow")
    write(tmp_path, rows)
    if is_plain:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        _, about = load_unread("big" if write is big_npz else str(tmp_path), data_dir=tmp_path)
        most = tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0)
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert (about.num_features, about.num_nodes) == (BROAD, rows)
    all_values = (tmp_path / "nodes.csv").stat().st_size if write is big_text else 4 * rows * BROAD
    assert most < share * all_values
