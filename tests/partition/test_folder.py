"""Partition folders: what is written comes back, and a folder that is not as written is refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polyhop.errors import ConfigError, PartitionError
from polyhop.graph import (
    DenseFeatures,
    DiskFeatures,
    Graph,
    GraphFacts,
    Part,
    SparseFeatures,
    SparseRows,
    fingerprint_graph,
)
from polyhop.partition import Partition, PartitionFolder, cut, open_parts, partition, save_parts, share

NODES = 50


def _graph(kind: str = "dense") -> Graph:
    gen = torch.Generator().manual_seed(2)
    pairs = torch.randint(NODES, (300, 2), generator=gen).unique(dim=0)
    rows = torch.randn(NODES, 6, generator=gen)
    stores = {
        "dense": DenseFeatures(rows),
        "bfloat16": DenseFeatures(rows.to(torch.bfloat16)),
        "int8": DenseFeatures((rows * 20).to(torch.int8), torch.rand(6, generator=gen)),
        "none": None,
    }
    if kind == "sparse":
        kept = torch.where(rows > 0, rows, 0).to_sparse_csr()
        stores[kind] = SparseFeatures(SparseRows(kept.crow_indices(), kept.col_indices(), kept.values(), 6))
    order = torch.randperm(NODES, generator=gen)
    bare = kind == "none"
    return Graph.from_edges(
        pairs.t().contiguous(),
        stores[kind],
        None if bare else torch.randint(3, (NODES,), generator=gen),
        num_nodes=NODES,
        edge_weight=None if bare else torch.rand(len(pairs), generator=gen),
        train=None if bare else order[:20],
        val=None if bare else order[20:30],
        test=None if bare else order[30:],
    )


def _same(ours: Part, theirs: Part) -> None:
    for name, value in vars(theirs).items():
        given = getattr(ours, name)
        if isinstance(value, torch.Tensor):
            assert given.dtype == value.dtype, name
            assert torch.equal(given, value), name
        elif name == "split" and value is not None:
            assert all(torch.equal(getattr(given, s), getattr(value, s)) for s in ("train", "val", "test"))
        elif name == "x" and value is not None:
            a, b = (s.all() if isinstance(s, DenseFeatures) else s.all().dense() for s in (given, value))
            assert torch.equal(a, b)
        else:
            assert given == value, name


@pytest.fixture
def saved(tmp_path: Path) -> PartitionFolder:
    graph = _graph()
    return save_parts(graph, partition(graph, 4, "fennel"), tmp_path / "parts")


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", ["dense", "bfloat16", "int8", "sparse", "none"])
def test_what_is_written_comes_back(tmp_path: Path, kind: str, mmap: bool) -> None:
    graph = _graph(kind)
    owner = torch.arange(NODES, dtype=torch.int32) % 3
    made = Partition(owner + (owner == 2), 4, "file", 7)  # part 2 is empty
    written: list[int] = []
    folder = save_parts(graph, made, tmp_path / "parts", done=written.append)
    assert written == [0, 1, 2, 3]
    assert torch.equal(folder.new_ids(), made.new_ids)
    assert folder.about["method"] == "file"
    assert folder.about["quality"]["cut"] > 0
    for index in range(4):
        _same(folder.part(index, mmap=mmap), cut(graph, made, index))
    folder.check()


@pytest.mark.parametrize("kind", ["dense", "sparse", "none"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_fewer_ranks_than_parts(tmp_path: Path, kind: str, num_ranks: int) -> None:
    graph = _graph(kind)
    fine = partition(graph, 6, "ldg")
    folder = save_parts(graph, fine, tmp_path / "parts")
    coarse = Partition((fine.user_ids.new_zeros(NODES) + fine.owner // (6 // num_ranks)).int(), num_ranks)
    for rank in range(num_ranks):
        mine, expected = folder.for_rank(rank, num_ranks), cut(graph, coarse, rank)
        assert torch.equal(mine.bounds, expected.bounds)
        assert torch.equal(mine.user_ids.sort().values, expected.user_ids.sort().values)
        lists = [
            {
                int(part.user_ids[row]): part.src_ids[
                    part.indices[part.indptr[row] : part.indptr[row + 1]].long()
                ].tolist()
                for row in range(part.num_nodes)
            }
            for part in (mine, expected)
        ]
        assert lists[0] == lists[1]
        facts = [dict(zip(part.src_ids.tolist(), part.out_degree.tolist())) for part in (mine, expected)]
        assert facts[0] == facts[1]
        if kind != "none":
            at = expected.user_ids.argsort()[mine.user_ids.argsort().argsort()]
            assert torch.equal(mine.y, expected.y[at])
            train = [set(part.user_ids[part.split.train].tolist()) for part in (mine, expected)]
            assert train[0] == train[1]
            rows = [part.x.all() if kind == "dense" else part.x.all().dense() for part in (mine, expected)]
            assert torch.equal(rows[0], rows[1][at])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["dense", "bfloat16", "int8"])
def test_features_are_where_they_are_asked_for(tmp_path: Path, kind: str, num_ranks: int) -> None:
    graph = _graph(kind)
    folder = save_parts(graph, partition(graph, 4, "ldg"), tmp_path / "parts")
    for rank in range(num_ranks):
        expected = folder.share(rank, num_ranks).x
        found = {
            where: folder.share(rank, num_ranks, features=where).x for where in ("memory", "mapped", "disk")
        }
        assert isinstance(found["disk"], DiskFeatures)
        assert len(found["disk"].paths) == 4 // num_ranks
        assert not found["memory"].is_mapped
        assert found["mapped"].is_mapped == (num_ranks == 4)  # joined parts are in memory
        ids = torch.arange(expected.num_rows).flip(0)
        for x in found.values():
            assert x.dtype == expected.dtype
            assert torch.equal(x.gather(ids), expected.gather(ids))


def test_sparse_features_are_not_on_disk(tmp_path: Path) -> None:
    graph = _graph("sparse")
    folder = save_parts(graph, partition(graph, 2, "ldg"), tmp_path / "parts")
    with pytest.raises(ConfigError, match=r"feature_store='disk'.*not rows of equal length"):
        folder.part(0, features="disk")
    assert isinstance(folder.part(0, features="memory").x, SparseFeatures)


def test_ranks_that_do_not_divide_the_parts(saved: PartitionFolder) -> None:
    with pytest.raises(PartitionError, match=r"4 parts, which 3 ranks cannot share evenly.*--parts 3"):
        saved.for_rank(0, 3)
    with pytest.raises(PartitionError, match=r"parts 0 \.\. 3, asked for 4"):
        saved.part(4)


def test_the_same_graph_gives_the_same_folder(tmp_path: Path) -> None:
    graph = _graph()
    for name in ("a", "b"):
        save_parts(graph, partition(graph, 3, "hash"), tmp_path / name)
    first = {
        f.relative_to(tmp_path / "a"): f.read_bytes() for f in (tmp_path / "a").rglob("*") if f.is_file()
    }
    again = {
        f.relative_to(tmp_path / "b"): f.read_bytes() for f in (tmp_path / "b").rglob("*") if f.is_file()
    }
    assert first == again


def test_a_truncated_file_is_named(saved: PartitionFolder) -> None:
    file = saved.path / "part-00001" / "indices.npy"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(PartitionError, match=r"part-00001/indices.npy: .* bytes, expected .*damaged"):
        open_parts(saved.path).part(1)
    open_parts(saved.path).part(0)  # the others still serve


def test_a_changed_file_is_named(saved: PartitionFolder) -> None:
    file = saved.path / "part-00002" / "x.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(PartitionError, match=r"part-00002/x.npy: its content changed"):
        saved.part(2)
    with pytest.raises(PartitionError, match=r"part-00002/x.npy"):
        saved.check()


def test_a_missing_file_is_named(saved: PartitionFolder) -> None:
    (saved.path / "part-00000" / "halo.npy").unlink()
    with pytest.raises(PartitionError, match=r"part-00000/halo.npy: No such file"):
        saved.part(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "has format 99, this polyhop reads up to 1: upgrade"),
        ({"format": "x"}, "not a polyhop manifest"),
        ({"bounds": None}, "without bounds"),
    ],
)
def test_a_wrong_manifest(saved: PartitionFolder, change, message) -> None:
    about = {k: v for k, v in {**saved.about, **change}.items() if v is not None}
    (saved.path / "manifest.json").write_text(json.dumps(about))
    with pytest.raises(PartitionError, match=message):
        open_parts(saved.path)


def test_not_a_folder_of_parts(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="is no partition folder"):
        open_parts(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(PartitionError, match="cannot be read"):
        open_parts(tmp_path)


def test_an_existing_folder_is_left_alone(saved: PartitionFolder) -> None:
    graph = _graph()
    with pytest.raises(PartitionError, match="is there already"):
        save_parts(graph, partition(graph, 2, "hash"), saved.path)
    saved.check()


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _graph()
    real, count = os.fsync, [0]

    def full(file: int) -> None:
        count[0] += 1
        if count[0] == 9:
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PartitionError, match=r"cannot write .*No space left"):
        save_parts(graph, partition(graph, 3, "hash"), tmp_path / "parts")
    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_of_an_interrupted_run(tmp_path: Path) -> None:
    def stop(part: int) -> None:
        raise KeyboardInterrupt

    graph = _graph()
    with pytest.raises(KeyboardInterrupt):
        save_parts(graph, partition(graph, 3, "hash"), tmp_path / "parts", done=stop)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".tmp-parts"
    (left / "part-00000").mkdir(parents=True)
    (left / "part-00000" / "indices.npy").write_bytes(b"half")
    graph = _graph()
    save_parts(graph, partition(graph, 2, "hash"), tmp_path / "parts").check()
    assert [p.name for p in tmp_path.iterdir()] == ["parts"]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sparse", "none"])
def test_a_share_is_that_of_the_graph_in_memory(tmp_path: Path, kind: str, mmap: bool) -> None:
    graph = _graph(kind)
    made = partition(graph, 3, "hash")
    folder = open_parts(save_parts(graph, made, tmp_path / "parts").path)
    for rank in range(3):
        ours, theirs = folder.share(rank, 3, mmap=mmap), share(graph, made, rank)
        _same(ours.part, theirs.part)
        assert ours.facts == theirs.facts == folder.facts


def test_facts_say_what_the_whole_graph_is(tmp_path: Path) -> None:
    graph = replace(_graph(), name="made up", metric="roc_auc")
    facts = save_parts(graph, partition(graph, 2, "hash"), tmp_path / "parts").facts
    assert facts == GraphFacts("made up", NODES, graph.num_edges, 6, 3, "roc_auc", fingerprint_graph(graph))


def test_facts_do_not_depend_on_the_parts(tmp_path: Path) -> None:
    """So a checkpoint of four ranks is one of the same graph for two."""
    graph = _graph()
    facts = [
        save_parts(graph, partition(graph, p, m), tmp_path / m).facts for p, m in ((2, "hash"), (4, "fennel"))
    ]
    assert facts[0] == facts[1]


def test_shares_of_fewer_ranks_know_the_same(saved: PartitionFolder) -> None:
    shares = [saved.share(rank, 2) for rank in range(2)]
    assert shares[0].facts == shares[1].facts == saved.facts
    assert [each.part.index for each in shares] == [0, 1]
    assert sum(each.part.num_nodes for each in shares) == NODES


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_that_divide_the_parts(saved: PartitionFolder, num_ranks: int) -> None:
    saved.check_ranks(num_ranks)


@pytest.mark.parametrize("num_ranks", [0, -1, 3, 5, 8])
def test_other_numbers_of_ranks_are_refused(saved: PartitionFolder, num_ranks: int) -> None:
    with pytest.raises(PartitionError, match=f"4 parts, which {num_ranks} ranks cannot share evenly"):
        saved.check_ranks(num_ranks)
    with pytest.raises(PartitionError, match="cannot share evenly"):
        saved.share(0, num_ranks)


def _without(saved: PartitionFolder, *names: str) -> PartitionFolder:
    about = {name: value for name, value in saved.about.items() if name not in names}
    (saved.path / "manifest.json").write_text(json.dumps(about))
    return open_parts(saved.path)


def test_a_folder_without_a_fingerprint_is_known_by_its_files(saved: PartitionFolder, tmp_path: Path) -> None:
    bare = _without(saved, "fingerprint")
    found = bare.facts.fingerprint
    assert sorted(found) == ["files"]
    assert len(found["files"]) == len(saved.about["files"])
    assert bare.share(1, 4).facts.fingerprint == found
    other = replace(_graph(), y=_graph().y.flip(0))
    folder = save_parts(other, partition(other, 4, "fennel"), tmp_path / "other")
    assert _without(folder, "fingerprint").facts.fingerprint != found


def test_a_folder_that_says_little_still_opens(saved: PartitionFolder) -> None:
    facts = _without(saved, "name", "metric", "num_edges", "num_features", "num_classes", "fingerprint").facts
    assert (facts.name, facts.num_nodes, facts.metric) == ("parts", NODES, "accuracy")
    assert (facts.num_edges, facts.num_features, facts.num_classes) == (0, 0, 0)
