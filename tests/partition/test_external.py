"""Out of core: byte for byte the folder of the graph in memory, whatever the memory, whenever it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from polyhop import datasets
from polyhop.errors import ConfigError, DatasetError, GraphError, PartitionError, UnsupportedError
from polyhop.graph import Graph
from polyhop.partition import is_out_of_core, open_parts, partition, partition_files, save_parts
from polyhop.partition.external.budget import parse_bytes, show_bytes
from polyhop.partition.external.work import Work

METHODS = ("hash", "block", "ldg", "fennel")
NODES, EDGES, MEMORY = 3000, 100_000, 210_000


def _edges(nodes: int = NODES, edges: int = EDGES, seed: int = 0) -> np.ndarray:
    """int64 [2, about E], shuffled: groups of about 50 nodes, ids scattered, a few hubs, loops; no repeats."""
    rng = np.random.default_rng(seed)
    dst = rng.integers(0, nodes, edges)
    near = dst // 50 * 50 + rng.integers(0, 50, edges)
    hub = (rng.random(edges) ** 6 * nodes).astype(np.int64)
    kind = rng.random(edges)
    src = np.where(kind < 0.6, near, np.where(kind < 0.9, rng.integers(0, nodes, edges), hub)) % nodes
    pairs = np.unique(np.stack([src, dst], 1), axis=0)
    scattered = rng.permutation(nodes)
    return np.ascontiguousarray(scattered[rng.permutation(pairs)].T)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def _same(ours: Path, theirs: Path) -> None:
    a, b = _files(ours), _files(theirs)
    assert sorted(a) == sorted(b)
    assert [name for name in a if a[name] != b[name]] == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("memory", [MEMORY, 10**7])
def test_same_folder_as_in_memory(method: str, memory: int, tmp_path: Path) -> None:
    edges = _edges()
    np.save(tmp_path / "edges.npy", edges.astype(np.int32))
    graph = Graph.from_edges(edges, num_nodes=NODES, name="edges")
    save_parts(graph, partition(graph, 4, method, seed=3), tmp_path / "whole")
    folder = partition_files(tmp_path / "edges.npy", 4, method, tmp_path / "parts", memory=memory, seed=3)
    folder.check()
    _same(tmp_path / "parts", tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["edges.npy", "parts", "whole"]


def test_many_bins_and_levels_on_disk(tmp_path: Path) -> None:
    """Groups of nodes that do not fit in memory either; and that small memory means what these tests mean by it."""
    edges = _edges(20_000, 100_000)
    np.save(tmp_path / "edges.npy", edges)
    told: dict[str, int] = {}

    def tell(stage: str, done: int, total: int) -> None:
        told[stage] = told.get(stage, 0) + 1
        assert 0 <= done <= total

    partition_files(tmp_path / "edges.npy", 3, "fennel", tmp_path / "parts", memory=1_000_000, tell=tell)
    assert told["scan"] > 10
    assert told["sorting pairs"] > 10  # bins
    assert told["writing parts"] > 5
    assert told["filing groups, level 1"] > 10
    assert told["clusters, pass 1, level 1"] > 5
    graph = Graph.from_edges(edges, name="edges")
    save_parts(graph, partition(graph, 3, "fennel"), tmp_path / "whole")
    _same(tmp_path / "parts", tmp_path / "whole")


def _with_nodes(folder: Path, *, is_multi: bool = False, weighted: bool = True) -> Graph:
    """A graph with everything, saved as a folder of .npy files with the edges in the user's order."""
    rng = np.random.default_rng(5)
    edges = _edges(600, 6000)
    order = rng.permutation(600)
    arrays = {
        "edge_index": edges,
        "x": (rng.normal(size=(600, 5)) * 20).astype(np.int8),
        "x_scale": rng.random(5).astype(np.float32),
        "y": (rng.random((600, 3)) < 0.5).astype(np.float32) if is_multi else rng.integers(0, 4, 600),
        "train": np.sort(order[:100]),
        "val": order[100:300],
        "test": np.isin(np.arange(600), order[300:]),
    }
    if weighted:
        arrays["edge_weight"] = rng.random(edges.shape[1]).astype(np.float32)
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    (folder / "graph.json").write_text('{"name": "mine", "metric": "f1_micro"}')
    return datasets.load(folder)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_multi", [False, True])
def test_features_labels_splits_weights(method: str, is_multi: bool, tmp_path: Path) -> None:
    graph = _with_nodes(tmp_path / "data", is_multi=is_multi)
    save_parts(graph, partition(graph, 3, method), tmp_path / "whole")
    partition_files(tmp_path / "data", 3, method, tmp_path / "parts", memory=200_000)
    _same(tmp_path / "parts", tmp_path / "whole")


def test_a_saved_data_set(tmp_path: Path) -> None:
    """In-edge lists (indptr.npy, indices.npy), as ``datasets.save`` writes them."""
    graph = _with_nodes(tmp_path / "data")
    datasets.save(graph, tmp_path / "saved")
    again = datasets.load(tmp_path / "saved")
    save_parts(again, partition(again, 3, "ldg"), tmp_path / "whole")
    partition_files(tmp_path / "saved", 3, "ldg", tmp_path / "parts", memory=200_000)
    _same(tmp_path / "parts", tmp_path / "whole")


def test_a_file_of_edges_with_a_folder_of_nodes(tmp_path: Path) -> None:
    graph = _with_nodes(tmp_path / "data", weighted=False)
    (tmp_path / "data" / "edge_index.npy").rename(tmp_path / "mine.npy")
    save_parts(graph, partition(graph, 2, "hash"), tmp_path / "whole")
    partition_files(
        tmp_path / "mine.npy", 2, "hash", tmp_path / "parts", memory=200_000, nodes=tmp_path / "data"
    )
    _same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    "layout", ["[2, E] int64", "[E, 2] int32", "[2, E] Fortran", "[E, 2] Fortran", "a view of more"]
)
def test_layouts_of_npy(layout: str, tmp_path: Path) -> None:
    edges = _edges(200, 2000)
    given = {
        "[2, E] int64": edges,
        "[E, 2] int32": np.ascontiguousarray(edges.T.astype(np.int32)),
        "[2, E] Fortran": np.asfortranarray(edges),
        "[E, 2] Fortran": np.asfortranarray(edges.T),
        "a view of more": np.concatenate([edges, edges], 1)[:, : edges.shape[1]],
    }[layout]
    np.save(tmp_path / "edges.npy", given)
    graph = Graph.from_edges(edges, name="edges")
    save_parts(graph, partition(graph, 3, "hash"), tmp_path / "whole")
    partition_files(tmp_path / "edges.npy", 3, "hash", tmp_path / "parts", memory=200_000)
    _same(tmp_path / "parts", tmp_path / "whole")


def _write_table(path: Path, columns: dict[str, object]) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.csv
    import pyarrow.parquet

    table = arrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=500)
    else:
        pyarrow.csv.write_csv(table, path)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("ids", ["numbers", "gaps", "words", "rows"])
@pytest.mark.parametrize("method", ["hash", "fennel"])
def test_tables(kind: str, ids: str, method: str, tmp_path: Path) -> None:
    """Ids of every kind; with a node table, except where edges hold the numbers alone."""
    rng = np.random.default_rng(1)
    edges = _edges(300, 4000)
    names = {
        "numbers": np.arange(300),
        "rows": np.arange(300),
        "gaps": rng.permutation(10**6)[:300] + 10**7,
        "words": np.array([f"n{k}" for k in rng.permutation(300)]),
    }[ids]
    file, nodes = tmp_path / f"mine.{kind}", None
    _write_table(
        file, {"source": names[edges[0]], "target": names[edges[1]], "weight": rng.random(edges.shape[1])}
    )
    if ids not in ("numbers", "gaps"):
        nodes = tmp_path / f"nodes.{kind}"
        code = rng.permutation(np.array(["train", "val", "test", ""] * 75))
        columns = {
            "label": rng.choice(["a", "b", "c"], 300),
            "split": code,
            "f": rng.random(300),
            "g": np.arange(300),
        }
        _write_table(nodes, columns if ids == "rows" else {"id": names, **columns})
    graph = datasets.load(file, nodes=nodes)
    save_parts(graph, partition(graph, 3, method), tmp_path / "whole")
    partition_files(file, 3, method, tmp_path / "parts", memory=200_000, nodes=nodes)
    _same(tmp_path / "parts", tmp_path / "whole")


def test_a_parquet_table_with_lists_of_features(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    edges = _edges(100, 800)
    _write_table(tmp_path / "edges.parquet", {"src": edges[0], "dst": edges[1]})
    rows = rng.random((100, 4)).astype(np.float32)
    _write_table(tmp_path / "nodes.parquet", {"x": list(rows), "other": np.arange(100)})
    graph = datasets.load(tmp_path)
    save_parts(graph, partition(graph, 2, "hash"), tmp_path / "whole")
    partition_files(tmp_path, 2, "hash", tmp_path / "parts", memory=200_000)
    _same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("method", [*METHODS, "file"])
@pytest.mark.parametrize("kind", ["no edges", "no nodes", "one loop", "more parts than nodes"])
def test_odd_graphs(method: str, kind: str, tmp_path: Path) -> None:
    pairs = {"one loop": [(0, 0)], "more parts than nodes": [(0, 1), (1, 2), (2, 2)]}.get(kind, [])
    nodes = {"no edges": 9, "no nodes": 0, "one loop": 1, "more parts than nodes": 3}[kind]
    edges = np.array(pairs, np.int64).reshape(-1, 2).T
    np.save(tmp_path / "edges.npy", np.ascontiguousarray(edges))
    np.save(tmp_path / "owner.npy", np.arange(nodes) % 5)
    options = {"path": tmp_path / "owner.npy"} if method == "file" else {}
    graph = Graph.from_edges(edges, num_nodes=nodes, name="edges")
    save_parts(graph, partition(graph, 5, method, **options), tmp_path / "whole")
    partition_files(
        tmp_path / "edges.npy", 5, method, tmp_path / "parts", memory=10**6, num_nodes=nodes, options=options
    )
    _same(tmp_path / "parts", tmp_path / "whole")


def test_duplicates(tmp_path: Path) -> None:
    edges = np.array([[3, 1, 3, 0], [2, 2, 2, 1]])
    np.save(tmp_path / "edges.npy", edges)
    with pytest.raises(
        PartitionError, match=r"duplicate edges, such as 3 -> 2 \(1 among .*--duplicates keep"
    ):
        partition_files(tmp_path / "edges.npy", 2, "hash", tmp_path / "parts")
    graph = Graph.from_edges(edges, name="edges", duplicates="keep")
    save_parts(graph, partition(graph, 2, "hash"), tmp_path / "whole")
    partition_files(tmp_path / "edges.npy", 2, "hash", tmp_path / "parts", duplicates="keep")
    _same(tmp_path / "parts", tmp_path / "whole")
    with pytest.raises(ConfigError, match="duplicates"):
        partition_files(tmp_path / "edges.npy", 2, "hash", tmp_path / "other", duplicates="drop")


class _StopError(Exception):
    """Stands for a kill: nothing after it runs."""


@pytest.mark.parametrize("method", ["hash", "ldg", "fennel"])
def test_goes_on_after_a_kill_at_any_moment(method: str, tmp_path: Path) -> None:
    """Stopped at every stage in turn, in one go: the folder is that of an undisturbed run, and no stage is done twice."""
    graph = _with_nodes(tmp_path / "data")
    save_parts(graph, partition(graph, 3, method), tmp_path / "whole")
    begun: list[str] = []
    real = Work.stage

    def stage(self: Work, name: str, make):
        def made():
            begun.append(name)
            result = make()
            if begun.count(name) == 1 and name != "owner":
                raise _StopError  # the work was done, but not recorded
            return result

        return real(self, name, made)

    attempts = 0
    while not (tmp_path / "parts").exists():
        attempts += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Work, "stage", stage)
            try:
                partition_files(tmp_path / "data", 3, method, tmp_path / "parts", memory=200_000)
            except _StopError:
                assert (tmp_path / ".tmp-parts" / ".work").is_dir()
    assert attempts > 8
    # "owner" holds stages of its own, so it begins as often as one of them stops the run.
    assert {begun.count(name) for name in begun if name != "owner"} == {2}
    _same(tmp_path / "parts", tmp_path / "whole")
    assert not (tmp_path / ".tmp-parts").exists()


def _stopped(tmp_path: Path, **given: object) -> None:
    """A run that stops when the first part is written."""

    def tell(stage: str, done: int, total: int) -> None:
        if stage == "writing parts":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        partition_files(
            tmp_path / "edges.npy", 3, "hash", tmp_path / "parts", memory=10**6, tell=tell, **given
        )  # type: ignore[arg-type]
    assert (tmp_path / ".tmp-parts" / ".work" / "journal.json").exists()


@pytest.mark.parametrize("change", ["nothing", "seed", "input", "another boot", "a damaged journal"])
def test_another_command_or_input_starts_afresh(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = _edges(300, 3000)
    np.save(tmp_path / "edges.npy", edges)
    _stopped(tmp_path)
    if change == "input":
        edges = _edges(300, 3000, seed=1)
        np.save(tmp_path / "edges.npy", edges)
    if change == "another boot":
        monkeypatch.setattr("polyhop.partition.external.work._boot", lambda: "after a crash")
    if change == "a damaged journal":
        (tmp_path / ".tmp-parts" / ".work" / "journal.json").write_text('{"command":')
    told = []
    seed = 1 if change == "seed" else 0
    partition_files(
        tmp_path / "edges.npy", 3, "hash", tmp_path / "parts", memory=10**6, seed=seed,
        tell=lambda stage, done, total: told.append(stage),
    )  # fmt: skip
    assert ("scan" in told) == (change != "nothing")
    graph = Graph.from_edges(edges, name="edges")
    save_parts(graph, partition(graph, 3, "hash", seed=seed), tmp_path / "whole")
    _same(tmp_path / "parts", tmp_path / "whole")


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "edges.npy", _edges(300, 3000))

    def again(stage: str, done: int, total: int) -> None:
        with pytest.raises(PartitionError, match="another run is writing it"):
            partition_files(tmp_path / "edges.npy", 3, "hash", tmp_path / "parts")

    partition_files(tmp_path / "edges.npy", 3, "hash", tmp_path / "parts", tell=again)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "edges.npy", _edges(300, 3000))
    real, count = os.fsync, [0]

    def full(file: int) -> None:
        count[0] += 1
        if count[0] == 20:
            raise OSError(28, "No space left on device", "somewhere/indices.npy")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        PartitionError, match=r"indices.npy: No space left on device.*kept in .*\.tmp-parts: make room"
    ):
        partition_files(tmp_path / "edges.npy", 3, "hash", tmp_path / "parts")
    partition_files(tmp_path / "edges.npy", 3, "hash", tmp_path / "parts").check()


def test_a_disk_full_in_the_middle_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy reports a short write as an error of its own kind."""
    np.save(tmp_path / "edges.npy", _edges(300, 3000))

    def full(self, *args, **options) -> None:
        raise OSError("3000 requested and 12 written")

    monkeypatch.setattr("polyhop.partition.external.bins.BinFiles.file", full)
    with pytest.raises(PartitionError, match=r"3000 requested and 12 written.*make room"):
        partition_files(tmp_path / "edges.npy", 3, "hash", tmp_path / "parts")


def _cut_short(path: Path) -> None:
    np.save(path, _edges(300, 3000))
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("content", "given", "error", "message"),
    [
        (_cut_short, {}, PartitionError, r"edges.npy: .* bytes, but its header promises .*cut short"),
        (np.array([[0, 1], [1, -2]]), {}, PartitionError, r"edge 1 is 1 -> -2, but ids start at 0"),
        (np.array([[0, 7], [1, 2]]), {"num_nodes": 5}, PartitionError, r"edge 1 is 7 -> 2.*0 \.\. 4.*--num-nodes"),
        (np.zeros((2, 3)), {}, PartitionError, r"expected int32 or int64 \[2, E\]"),
        (np.zeros((3, 3), int), {}, PartitionError, r"or \[E, 2\], got int64 \[3, 3\]"),
        (np.zeros((2, 3), ">i4"), {}, PartitionError, "byte order"),
        (b"\x93NUMPY", {}, PartitionError, "not a readable .npy"),
        (b"hello", {}, PartitionError, "not a readable .npy"),
        (None, {}, PartitionError, "expected edges in a .npy"),
        (_edges(300, 3000), {"memory": 10_000}, ConfigError, r"--memory 10KB is too small: give at least 65.6KB"),
        (_edges(5000, 30_000), {"memory": "100KB"}, ConfigError, r"too small for 5,000 nodes: give at least 2"),
        (np.array([[1] * 9000, [0] * 9000]), {"memory": "70KB", "method": "ldg"}, ConfigError,
         r"node 0 alone has 9,000 edges\): give at least 1"),
        (_edges(300, 3000), {"memory": "much"}, ConfigError, "expected a size such as 1GB"),
        (_edges(300, 3000), {"method": "metis"}, ConfigError, r"'metis' needs the whole .*block, fennel, file, hash, ldg"),
        (_edges(300, 3000), {"method": "file"}, ConfigError, "file of parts is missing"),
        (_edges(300, 3000), {"options": {"passes": 2}}, ConfigError, "'hash': no option passes"),
        (_edges(300, 3000), {"nodes": "x.txt"}, PartitionError, "expected a node table"),
    ],
)  # fmt: skip
def test_refused(content, given, error, message, tmp_path: Path) -> None:
    path = tmp_path / "edges.npy"
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    given = {"method": "hash", **given}
    with pytest.raises(error, match=message):
        partition_files(path, 2, given.pop("method"), tmp_path / "parts", **given)
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    ("name", "array", "error", "message"),
    [
        ("x", np.zeros((599, 5), np.float32), PartitionError, r"x.npy: 599 rows for 600 nodes"),
        ("x", np.asfortranarray(np.zeros((600, 5))), PartitionError, "in C order"),
        ("y", np.full(600, -3), GraphError, "label -3"),
        ("train", np.arange(300), GraphError, "in both"),
        ("edge_weight", np.zeros(7), PartitionError, "one weight per edge"),
        ("x_indices", np.zeros(7), UnsupportedError, "sparse features"),
    ],
)
def test_wrong_node_data(name: str, array, error, message, tmp_path: Path) -> None:
    _with_nodes(tmp_path / "data")
    (tmp_path / "data" / "graph.json").write_text('{"num_nodes": 600}')
    np.save(tmp_path / "data" / f"{name}.npy", array)
    with pytest.raises(error, match=message):
        partition_files(tmp_path / "data", 2, "hash", tmp_path / "parts")


def test_negative_weights_and_wrong_numbers_of_nodes(tmp_path: Path) -> None:
    graph = _with_nodes(tmp_path / "data")
    with pytest.raises(ConfigError, match="--num-nodes 7, but the node data is of 600"):
        partition_files(tmp_path / "data", 2, "hash", tmp_path / "parts", num_nodes=7)
    np.save(tmp_path / "data" / "edge_weight.npy", np.linspace(1, -1, graph.num_edges))
    with pytest.raises(PartitionError, match="has weight -"):
        partition_files(tmp_path / "data", 2, "hash", tmp_path / "parts")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src,dst\n0,1\n1,x\n", r"edges.csv: .*not a whole number|cannot read"),
        ("from,to\n0,1\n", "no column 'src'"),
        ("src,dst\n0,1\n5\n", "cannot read"),
        ("src,dst,weight\n0,1,heavy\n", "not numeric"),
    ],
)
def test_wrong_tables(text: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "edges.csv").write_text(text)
    (tmp_path / "nodes.csv").write_text("label\n0\n1\n")
    with pytest.raises(DatasetError, match=message):
        partition_files(tmp_path / "edges.csv", 2, "hash", tmp_path / "parts", nodes=tmp_path / "nodes.csv")


def test_a_table_that_names_an_unknown_node(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "edges.csv").write_text("src,dst\n" + "10,20\n" * 5 + "10,30\n")
    (tmp_path / "nodes.csv").write_text("id\n10\n20\n")
    with pytest.raises(DatasetError, match="row 5 names node '30', which is not in the node table"):
        partition_files(tmp_path / "edges.csv", 2, "hash", tmp_path / "parts", nodes=tmp_path / "nodes.csv")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GB", 10**9), ("512MiB", 512 << 20), ("1.5g", 15 * 10**8), ("300", 300), ("2 TB", 2 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(10**9, "1GB"), (1_234_567, "1.3MB"), (999, "999B"), (65_536, "65.6KB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert show_bytes(size) == text


def test_when_work_is_out_of_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "e.npy", np.zeros((2, 5), int))
    (tmp_path / "e.csv").write_text("src,dst\n0,1\n")
    assert is_out_of_core(str(tmp_path / "e.npy"), "auto", None)
    assert not is_out_of_core(str(tmp_path / "e.csv"), "auto", None)
    assert is_out_of_core(str(tmp_path / "e.csv"), "auto", "1GB")
    assert not is_out_of_core("cora", "auto", None)
    with pytest.raises(ConfigError, match="cora is no file of edges"):
        is_out_of_core("cora", "auto", "1GB")
    with pytest.raises(ConfigError, match=r"'metis' does not read edges in .npy files; use block"):
        is_out_of_core(str(tmp_path / "e.npy"), "metis", None)
    monkeypatch.setattr("polyhop.partition.external.inputs._LARGE", 10)
    assert is_out_of_core(str(tmp_path / "e.csv"), "auto", None)
    with pytest.raises(ConfigError, match=r"'metis' does not read a file of more than 10B"):
        is_out_of_core(str(tmp_path / "e.csv"), "metis", None)


def _command(tmp_path: Path, method: str, memory: str) -> list[str]:
    return [
        sys.executable, "-m", "polyhop", "partition", "edges.npy", "--parts", "4", "--method", method, "--memory", memory,
        "--duplicates", "keep", "--out", "parts",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hash", "fennel"])
def test_sigkill_at_random_moments(method: str, tmp_path: Path) -> None:
    """5 million edges; the process is killed again and again until it has finished once."""
    rng = np.random.default_rng(7)
    nodes, edges = 400_000, 5_000_000
    dst = rng.integers(0, nodes, edges, dtype=np.int32)
    src = np.where(
        rng.random(edges) < 0.8, dst // 100 * 100 + rng.integers(0, 100, edges), rng.integers(0, nodes, edges)
    )
    np.save(tmp_path / "edges.npy", np.stack([src.astype(np.int32), dst]))
    command = _command(tmp_path, method, "40MB")
    start = time.monotonic()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    whole_s = time.monotonic() - start
    (tmp_path / "parts").rename(tmp_path / "whole")
    kills = 0
    while not (tmp_path / "parts").exists():
        with subprocess.Popen(
            command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        ) as run:
            try:
                run.wait(
                    timeout=whole_s * (0.2 + 0.3 * rng.random()) + kills / 4
                )  # longer each time, so that it ends
                assert run.returncode == 0
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
                kills += 1
        assert kills < 100
    assert kills > 0
    _same(tmp_path / "parts", tmp_path / "whole")
    assert not (tmp_path / ".tmp-parts").exists()
    open_parts(tmp_path / "parts").check()


def test_ctrl_c_says_that_the_work_is_kept(tmp_path: Path) -> None:
    """The real command, interrupted while it works."""
    np.save(tmp_path / "edges.npy", _edges(NODES, 200_000))
    command = _command(tmp_path, "ldg", "300KB")
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        said = ""
        while "filing pairs" not in said:
            said = run.stderr.readline()
            assert said, "ended before it could be interrupted"
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()
    assert run.returncode != 0
    assert "the same command goes on" in rest
    assert (tmp_path / ".tmp-parts" / ".work" / "journal.json").exists()
    started = time.monotonic()
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert time.monotonic() > started
    assert not (tmp_path / ".tmp-parts").exists()
    assert torch.equal(open_parts(tmp_path / "parts").bounds[:1], torch.zeros(1, dtype=torch.int64))
