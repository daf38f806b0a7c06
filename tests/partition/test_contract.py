"""What every partition method promises, on ordinary and on odd graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from polyhop.errors import ConfigError, InputError, PartitionError
from polyhop.graph import Graph, Split
from polyhop.partition import METHODS, Partition, partition, quality

CUTTING = ("metis", "fennel", "ldg")


def _graph(num_nodes: int, pairs: list[tuple[int, int]], *, train: int = 0) -> Graph:
    """Edges (source, destination) in the given order within a destination."""
    lists: list[list[int]] = [[] for _ in range(num_nodes)]
    for source, destination in pairs:
        lists[destination].append(source)
    indptr = torch.tensor([0, *np.cumsum([len(one) for one in lists])], dtype=torch.int64)
    indices = torch.tensor([u for one in lists for u in one], dtype=torch.int32)
    split = Split.of(num_nodes, torch.arange(train)) if train else None
    return Graph(indptr, indices, split=split)


def _communities(count: int, size: int, *, seed: int = 0) -> Graph:
    """``count`` groups of ``size`` nodes, ids shuffled, ten edges a node inside its group and one anywhere."""
    gen = torch.Generator().manual_seed(seed)
    nodes = count * size
    shuffled = torch.randperm(nodes, generator=gen)
    own = torch.arange(nodes).repeat_interleave(10)
    near = own // size * size + torch.randint(size, (own.numel(),), generator=gen)
    far = torch.randint(nodes, (nodes,), generator=gen)
    source = torch.cat([near, far])
    destination = torch.cat([own, torch.arange(nodes)])
    pairs = torch.stack([shuffled[source], shuffled[destination]], 1)
    both = torch.cat([pairs, pairs.flip(1)]).unique(dim=0)
    graph = _graph(nodes, [(int(u), int(v)) for u, v in both if u != v])
    train = torch.randperm(nodes, generator=gen)[: nodes // 10]
    return Graph(graph.indptr, graph.indices, split=Split.of(nodes, train))


ODD = {
    "empty": _graph(0, []),
    "one node": _graph(1, []),
    "one loop": _graph(1, [(0, 0)]),
    "disconnected": _graph(9, []),
    "star": _graph(30, [(v, 0) for v in range(1, 30)]),
    "out star": _graph(30, [(0, v) for v in range(1, 30)]),
    "loops only": _graph(12, [(v, v) for v in range(12)]),
    "repeated edges": _graph(8, [(1, 0)] * 5 + [(2, 3)] * 2 + [(3, 2)]),
    "directed path": _graph(20, [(v, v + 1) for v in range(19)]),
    "all train": _graph(20, [(v, v + 1) for v in range(19)], train=20),
    "one train node": _graph(20, [(v, v + 1) for v in range(19)], train=1),
}


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path):
    def make(method: str, graph: Graph, parts: int) -> dict[str, object]:
        if method == "metis":
            pytest.importorskip("pymetis")
        if method != "file":
            return {}
        path = tmp_path / "parts.npy"
        np.save(path, np.arange(graph.num_nodes) % parts)
        return {"path": path}

    return make


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("graph", ODD.values(), ids=ODD)
@pytest.mark.parametrize("method", METHODS)
def test_every_node_gets_one_part(method, graph, parts, options) -> None:
    made = partition(graph, parts, method, **options(method, graph, parts))
    assert made.owner.dtype == torch.int32
    assert made.owner.shape == (graph.num_nodes,)
    assert graph.num_nodes == 0 or 0 <= int(made.owner.min()) <= int(made.owner.max()) < parts
    assert made.bounds.tolist() == [0, *made.sizes.cumsum(0).tolist()]
    assert torch.equal(made.new_ids[made.user_ids], torch.arange(graph.num_nodes))
    for part in range(parts):
        mine = made.nodes_of(part)
        assert torch.equal(mine, (made.owner == part).nonzero()[:, 0])  # the user's order stays inside a part


@pytest.mark.parametrize("method", METHODS)
def test_same_graph_and_seed_give_the_same_parts(method, options) -> None:
    graph = _communities(6, 30)
    first, again = (partition(graph, 4, method, seed=3, **options(method, graph, 4)).owner for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("method", CUTTING)
def test_finds_communities_and_keeps_the_balance(method, options) -> None:
    graph = _communities(8, 100)
    made = quality(graph, partition(graph, 4, method, **options(method, graph, 4)))
    assert made.chance_cut == pytest.approx(0.75, abs=0.01)
    assert made.cut < 0.25  # one edge in eleven leads anywhere; a group torn in two costs more
    assert made.node_balance <= 1.10
    assert made.train_balance <= 1.25


def test_streaming_is_the_same_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _communities(5, 20)
    for method in ("fennel", "ldg"):
        native = partition(graph, 3, method).owner
        monkeypatch.setenv("POLYHOP_KERNELS", "reference")
        assert torch.equal(partition(graph, 3, method).owner, native)
        monkeypatch.delenv("POLYHOP_KERNELS")


def test_hash_depends_on_the_node_and_the_seed_only() -> None:
    small, large = _graph(50, []), _graph(500, [(1, 2)])
    assert torch.equal(partition(small, 5, "hash").owner, partition(large, 5, "hash").owner[:50])
    assert not torch.equal(partition(large, 5, "hash", seed=1).owner, partition(large, 5, "hash").owner)


def test_block_is_contiguous() -> None:
    owner = partition(_communities(5, 40), 6, "block").owner
    assert bool((owner.diff() >= 0).all())


def test_quality_counts_by_hand() -> None:
    graph = _graph(4, [(0, 1), (2, 1), (3, 1), (1, 2), (0, 0)], train=2)
    found = quality(graph, Partition(torch.tensor([0, 0, 1, 1], dtype=torch.int32), 2))
    assert found.cut == pytest.approx(3 / 5)
    assert found.halo == pytest.approx(3 / 4)  # part 0 reads 2 and 3, part 1 reads 1
    assert found.edge_balance == pytest.approx(4 / 2.5)
    assert found.train_balance == pytest.approx(2.0)
    assert "60.0 % of edges" in dict(found.rows())["cut"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([0, 1, 2]), "gives 3 nodes a part, the graph has 4"),
        (np.array([0, 1, 2, 0]), r"node 2 is in part 2, expected 0 \.\. 1 for 2 parts"),
        (np.array([0.0, 1, 0, 1]), "expected whole numbers"),
        (np.array([[0, 1], [1, 0]]), r"expected whole numbers \[N\]"),
        (b"0\n1\nx\n0\n", "expected a .npy of whole numbers, or text"),
        (b"\x93NUMPY broken", "expected a .npy of whole numbers, or text"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content, message) -> None:
    path = tmp_path / "parts.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(PartitionError, match=message):
        partition(_graph(4, []), 2, "file", path=path)


def test_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "graph.part.2"
    path.write_text("0\n1\n1\n0\n")
    assert partition(_graph(4, []), 2, "file", path=path).owner.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("parts", [0, -1, 2.0, "2"])
def test_wrong_number_of_parts(parts) -> None:
    with pytest.raises(ConfigError, match="num_parts"):
        partition(_graph(4, []), parts, "hash")


def test_wrong_names() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'metis'"):
        partition(_graph(4, []), 2, "mettis")
    with pytest.raises(ConfigError, match=r"'hash': .*passes"):
        partition(_graph(4, []), 2, "hash", passes=3)
    with pytest.raises(ConfigError, match=r"'file': .*path"):
        partition(_graph(4, []), 2, "file")


def test_wrong_owners() -> None:
    with pytest.raises(PartitionError, match=r"parts span 0 \.\. 2, expected 0 \.\. 1"):
        Partition(torch.tensor([0, 2], dtype=torch.int32), 2)
    with pytest.raises(InputError, match="expected int32"):
        Partition(torch.tensor([0, 1]), 2)
