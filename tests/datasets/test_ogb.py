"""OGB's raw folders, text and binary, with and without pyarrow."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyhop.datasets.ogb import is_ogb, load_ogb
from polyhop.errors import DatasetError, InputError

EDGES = np.array([[0, 1, 3], [1, 2, 0]])


@pytest.fixture(params=["pyarrow", "plain"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    else:
        pytest.importorskip("pyarrow")
    return str(request.param)


def put(path: Path, array: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        np.savetxt(file, np.asarray(array), fmt="%g", delimiter=",")


def write(home: Path, **changes: Any) -> Path:
    files = {
        "raw/edge": EDGES.T, "raw/num-node-list": [[4]], "raw/num-edge-list": [[3]],
        "raw/node-feat": [[0.5, 1], [2, 3], [4, 5], [6, 7]], "raw/node-label": [[0], [1], [1], [0]],
        "split/time/train": [[0], [2]], "split/time/valid": [[1]], "split/time/test": [[3]],
    }  # fmt: skip
    for name, array in {**files, **changes}.items():
        if array is not None:
            put(home / f"{name}.csv.gz", array)
    return home


def test_text_form(tmp_path: Path, reader: str) -> None:
    home = write(tmp_path / "ogbn_arxiv")
    for path in (home, home / "raw"):
        assert is_ogb(path)
        graph = load_ogb(path)
        assert graph.name == "ogbn-arxiv"
        assert graph.edge_index.tolist() == [[3, 0, 1], [0, 1, 2]]
        assert graph.x is not None
        assert graph.x.all()[0].tolist() == [0.5, 1.0]  # type: ignore[index]
        assert graph.y is not None
        assert graph.y.tolist() == [0, 1, 1, 0]
        assert graph.split is not None
        assert [part.tolist() for part in vars(graph.split).values()] == [[0, 2], [1], [3]]


def test_products_gets_the_reverse_edges(tmp_path: Path) -> None:
    graph = load_ogb(write(tmp_path / "ogbn_products"))
    assert graph.num_edges == 6
    assert sorted(zip(*graph.edge_index.tolist(), strict=True)) == [
        (0, 1),
        (0, 3),
        (1, 0),
        (1, 2),
        (2, 1),
        (3, 0),
    ]


def test_multilabel(tmp_path: Path) -> None:
    labels = [[0, 1], [1, 1], [0, 0], [1, 0]]
    graph = load_ogb(write(tmp_path / "ogbn_proteins", **{"raw/node-label": labels, "raw/node-feat": None}))
    assert graph.is_multilabel
    assert graph.metric == "roc_auc"
    assert graph.x is None


def test_binary_form(tmp_path: Path) -> None:
    home = tmp_path / "ogbn_papers100M"
    for name, ids in (("train", [[0]]), ("valid", [[2]]), ("test", [[3]])):
        put(home / "split" / "time" / f"{name}.csv.gz", ids)
    (home / "raw").mkdir()
    np.savez_compressed(
        home / "raw" / "data.npz", edge_index=EDGES, node_feat=np.ones((4, 3), np.float16), num_nodes_list=[4]
    )
    np.savez_compressed(home / "raw" / "node-label.npz", node_label=np.array([[0.0], [np.nan], [1.0], [1.0]]))
    graph = load_ogb(home)
    assert graph.y is not None
    assert graph.y.tolist() == [0, -1, 1, 1]
    assert (graph.num_features, graph.num_edges) == (3, 3)
    assert load_ogb(home, features="none").x is None


def test_without_split_or_labels(tmp_path: Path) -> None:
    changes = {f"split/time/{name}": None for name in ("train", "valid", "test")}
    assert load_ogb(write(tmp_path / "a", **changes)).split is None
    assert load_ogb(write(tmp_path / "b", **{**changes, "raw/node-label": None})).y is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw/edge": [[0, 1], [9, 2]]}, "= 9, but the graph has nodes 0 .. 3"),
        ({"raw/edge": [[0], [1]]}, "expected two numbers per line"),
        ({"raw/num-node-list": [[4], [5]]}, "2 graphs; expected one large graph"),
        ({"raw/node-feat": [[1, 2]]}, "1 rows for 4 nodes"),
        ({"raw/node-label": [[0], [1]]}, r"y: expected int64 \[4\]"),
        ({"raw/node-label": [[0], [1], [np.nan], [0]]}, "node 2 has no label"),
        ({"split/time/valid": [[0]]}, "in both train and val"),
        ({"split/time/valid": None}, r"valid\.csv\.gz: no such file"),
        ({"raw/num-node-list": None}, r"num-node-list\.csv\.gz: no such file"),
    ],
)
def test_wrong_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_ogb(write(tmp_path / "g", **changes))


def test_damaged_and_textual(tmp_path: Path, reader: str) -> None:
    home = write(tmp_path / "g")
    file = home / "raw" / "node-feat.csv.gz"
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(DatasetError, match=r"node-feat\.csv\.gz: cannot read"):
        load_ogb(home)
    with gzip.open(file, "wt") as out:
        out.write("a,b\n" * 4)
    with pytest.raises(DatasetError, match=r"node-feat\.csv\.gz: cannot read"):
        load_ogb(home)


def test_typed_and_other_folders(tmp_path: Path) -> None:
    put(tmp_path / "raw" / "num-node-dict.csv.gz", [[1]])
    with pytest.raises(DatasetError, match="typed OGB graphs"):
        load_ogb(tmp_path)
    with pytest.raises(DatasetError, match="not an OGB folder"):
        load_ogb(tmp_path / "elsewhere")
