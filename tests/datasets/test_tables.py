"""CSV and Parquet tables: ids of any kind, labels as words, and every wrong column named. With and without pyarrow."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from polyhop.datasets.tables import _names, _read, find_tables, is_table, load_tables
from polyhop.errors import DatasetError, InputError

EDGES = "src,dst,weight\n3,0,0.5\n0,1,1\n2,0,1.5\n"
NODES = "id,label,split,a,b\n0,cat,train,1,2\n1,dog,val,3,4\n2,,,5,6\n3,cat,test,7,8.5\n"


@pytest.fixture(params=["pyarrow", "plain"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of reading CSV."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    else:
        pytest.importorskip("pyarrow")
    return str(request.param)


def write(folder: Path, edges: str = EDGES, nodes: str | None = NODES) -> tuple[Path, Path | None]:
    (folder / "edges.csv").write_text(edges)
    if nodes is None:
        return folder / "edges.csv", None
    (folder / "nodes.csv").write_text(nodes)
    return folder / "edges.csv", folder / "nodes.csv"


def test_edges_and_nodes(tmp_path: Path, reader: str) -> None:
    graph = load_tables(*write(tmp_path))
    assert (graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes) == (4, 3, 2, 2)
    assert graph.edge_index.tolist() == [[3, 2, 0], [0, 0, 1]]
    assert graph.edge_weight is not None
    assert graph.edge_weight.tolist() == [0.5, 1.5, 1.0]
    assert graph.y is not None
    assert graph.y.tolist() == [0, 1, -1, 0]
    assert graph.meta["classes"] == ["cat", "dog"]
    assert "ids" not in graph.meta
    assert graph.x is not None
    assert graph.x.all().tolist() == [[1, 2], [3, 4], [5, 6], [7, 8.5]]  # type: ignore[union-attr]
    assert graph.split is not None
    assert [part.tolist() for part in vars(graph.split).values()] == [[0], [1], [3]]


def test_string_ids_follow_the_node_table(tmp_path: Path, reader: str) -> None:
    graph = load_tables(
        *write(tmp_path, "source,target\nzoe,bob\nbob,amy\n", "id,label\nzoe,1\namy,0\nbob,1\n")
    )
    assert list(graph.meta["ids"]) == ["zoe", "amy", "bob"]
    assert graph.edge_index.tolist() == [[2, 0], [1, 2]]
    assert graph.y is not None
    assert graph.y.tolist() == [1, 0, 1]


def test_ids_without_a_node_table(tmp_path: Path, reader: str) -> None:
    words = load_tables(*write(tmp_path, "src,dst\nb,a\nc,b\n", None))
    assert list(words.meta["ids"]) == ["a", "b", "c"]
    assert words.edge_index.tolist() == [[1, 2], [0, 1]]
    sparse = load_tables(*write(tmp_path, "src,dst\n1000000,5\n5,70\n", None))
    assert list(sparse.meta["ids"]) == [5, 70, 1_000_000]
    assert sparse.edge_index.tolist() == [[2, 0], [0, 1]]
    dense = load_tables(*write(tmp_path, "src,dst\n0,1\n2,1\n", None))
    assert "ids" not in dense.meta
    assert dense.num_nodes == 3


def test_numeric_ids_out_of_order(tmp_path: Path, reader: str) -> None:
    graph = load_tables(*write(tmp_path, "src,dst\n20,10\n", "id,f\n20,0.5\n10,1.5\n"))
    assert graph.edge_index.tolist() == [[0], [1]]
    assert list(graph.meta["ids"]) == [20, 10]


def test_row_number_is_the_id_without_an_id_column(tmp_path: Path, reader: str) -> None:
    graph = load_tables(*write(tmp_path, "src,dst\n0,2\n", "label\n0\n1\n1\n"))
    assert graph.num_nodes == 3
    assert graph.x is None
    assert graph.num_classes == 2


def test_tsv_and_gz(tmp_path: Path, reader: str) -> None:
    with gzip.open(tmp_path / "edges.tsv.gz", "wt") as file:
        file.write("src\tdst\n1\t0\n")
    assert load_tables(tmp_path / "edges.tsv.gz").edge_index.tolist() == [[1], [0]]
    assert is_table(tmp_path / "edges.tsv.gz")
    assert not is_table(tmp_path / "edges.npz")
    assert find_tables(tmp_path) == (tmp_path / "edges.tsv.gz", None)
    assert find_tables(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("edges", "nodes", "message"),
    [
        ("a,b\n0,1\n", None, r"edges\.csv: no column 'src' \(or 'source'\); it has a, b"),
        ("src,b\n0,1\n", None, "no column 'dst'"),
        ("src,dst,weight\n0,1,heavy\n", None, "column 'weight' is not numeric, e.g. 'heavy'"),
        ("src,dst,weight\n0,1,-2\n", None, "weight -2.0"),
        ("src,dst\n0,1\n0,1\n", None, "1 duplicate edges"),
        ("src,dst\n0,9\n", NODES, r"= 9, but the graph has nodes 0 .. 3"),
        ("src,dst\nx,y\n", "id\nx\nz\n", r"edges\.csv: row 0 names node 'y', which is not in the node table"),
        ("src,dst\nx,z\n", "id\nx\nz\nx\n", r"nodes\.csv: id 'x' stands in 2 rows"),
        (EDGES, NODES.replace("val", "tset"), "unknown set 'tset'. Did you mean 'test'"),
        (EDGES, NODES.replace("train", ""), "train set is empty"),
        (EDGES, NODES.replace("3,4", "three,4"), "column 'a' is not numeric"),
        (EDGES, NODES.replace("3,4", "nan,4"), "node 1, feature 0 is nan"),
        ("", None, r"edges\.csv: cannot read"),
        ("src,dst\n0,1,2\n", None, r"edges\.csv: cannot read"),
    ],
)
def test_wrong_tables(tmp_path: Path, reader: str, edges: str, nodes: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_tables(*write(tmp_path, edges, nodes))


@pytest.mark.parametrize(
    "nodes",
    [
        NODES,
        "split,a\ntrain,1\n,2\n,3\ntest,4\n",
        "label,a\n1,1\n,2\n2,3\n",
        'label,a\n"a,b",1\n"a ""b""",2\n7,3\n',
        "id,label,a\n007,2020-01-01,1\n8,2021-01-01,2\n",
        "a,b\n1,2\n3,4\n",
        "label\n1\n",
        "id,label,a\n",
        "\n\nid,label,a\n0,1,2\n",
        "\ufeffid,label,a\n0,1,2\n",
    ],
)
def test_other_columns_are_the_same_without_features(tmp_path: Path, reader: str, nodes: str) -> None:
    (tmp_path / "nodes.csv").write_text(nodes, encoding="utf-8")
    whole, rows = _read(tmp_path / "nodes.csv")
    wanted = {"id", "label", "split"} & set(whole)
    assert _names(tmp_path / "nodes.csv") == set(whole)
    found, count = _read(tmp_path / "nodes.csv", wanted)
    assert (set(found), count) == (wanted, rows)
    for name, column in found.items():
        assert column.dtype == whole[name].dtype
        assert list(map(str, column)) == list(map(str, whole[name]))


def test_missing_file(tmp_path: Path, reader: str) -> None:
    with pytest.raises(DatasetError, match="no such file"):
        load_tables(tmp_path / "edges.csv")


def test_parquet_with_a_list_of_features(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"src": [1, 2], "dst": [0, 1]}), tmp_path / "edges.parquet")
    nodes = {"id": [0, 1, 2], "label": [1, 0, 1], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}
    parquet.write_table(pa.table(nodes), tmp_path / "nodes.parquet")
    graph = load_tables(tmp_path / "edges.parquet", tmp_path / "nodes.parquet")
    assert graph.x is not None
    assert graph.x.all().tolist() == nodes["x"]  # type: ignore[union-attr]
    assert graph.edge_index.tolist() == [[1, 2], [0, 1]]
    nodes["x"][1] = [3.0]
    parquet.write_table(pa.table(nodes), tmp_path / "nodes.parquet")
    with pytest.raises(DatasetError, match="lists of different lengths in column 'x'"):
        load_tables(tmp_path / "edges.parquet", tmp_path / "nodes.parquet")


def test_truncated_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "edges.parquet"
    parquet.write_table(pa.table({"src": np.arange(1000), "dst": np.arange(1000)}), path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DatasetError, match=r"edges\.parquet: cannot read"):
        load_tables(path)


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "edges.parquet").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"edges\.parquet needs pyarrow.*pip install 'polyhop\[parquet\]'"):
        load_tables(tmp_path / "edges.parquet")
