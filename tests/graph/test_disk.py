"""Features on disk are those of the same file in memory, to the bit, whatever is asked for and by how many threads."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import ConfigError, InputError
from polyhop.graph import (
    DenseFeatures,
    DiskFeatures,
    FeatureStore,
    Graph,
    MatrixFeatures,
    SparseFeatures,
    SparseRows,
    in_feature_store,
    kept_in,
)
from polyhop.kernels.read_rows import Disk, plan_reads

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint8)
SEEKS = Disk(reads_per_s=1e9, bytes_per_s=1e9)


def some_values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    gen = torch.Generator().manual_seed(3)
    if dtype.is_floating_point:
        return torch.randn(rows, columns, generator=gen, dtype=torch.float64).to(dtype)
    low = -128 if dtype == torch.int8 else 0
    return torch.randint(low, low + 256, (rows, columns), generator=gen).to(dtype)


def saved(
    folder: Path, values: Tensor, scale: Tensor | None = None, disk: Disk | None = None
) -> DiskFeatures:
    path = folder / f"x-{str(values.dtype).removeprefix('torch.')}-{values.shape[0]}.npy"
    stored = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    np.save(path, stored.numpy())
    return DiskFeatures(path, scale=scale, dtype=values.dtype, disk=disk)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[DiskFeatures, DenseFeatures]]:
    folder = tmp_path_factory.mktemp("stores")
    made = {}
    for dtype in DTYPES:
        for scaled in (False, True):
            values = some_values(700, 37, dtype)
            scale = torch.rand(37) + 0.5 if scaled else None
            made[f"{dtype}{' scaled' if scaled else ''}"] = (
                saved(folder, values, scale),
                DenseFeatures(values, scale),
            )
    return made


KINDS = [f"{dtype}{scaled}" for dtype in DTYPES for scaled in ("", " scaled")]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_matrix(stores, kind: str) -> None:
    disk, dense = stores[kind]
    assert isinstance(disk, FeatureStore)
    assert isinstance(disk, MatrixFeatures)
    assert (disk.num_rows, disk.num_features, disk.dtype) == (700, 37, dense.dtype)
    gen = torch.Generator().manual_seed(0)
    for ids in (
        torch.randint(700, (300,), generator=gen),  # any order, some twice
        torch.randperm(700, generator=gen),
        torch.arange(700),
        torch.arange(100, 140),
        torch.tensor([699]),
        torch.tensor([5, 5, 5]),
        torch.zeros(0, dtype=torch.int64),
    ):
        got, expected = disk.gather(ids), dense.gather(ids)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
        stored = disk.stored(ids)
        assert stored.dtype == dense.dtype
        assert torch.equal(stored, dense.stored(ids))
    assert torch.equal(disk.all(), dense.all())
    assert disk.all().dtype == dense.all().dtype


@pytest.mark.parametrize("kind", KINDS)
def test_sorted_rows_into_given_memory(stores, kind: str) -> None:
    disk, dense = stores[kind]
    rows = torch.arange(3, 700, 5)
    expected = dense.gather(rows)
    assert torch.equal(disk.gather_sorted(rows), expected)
    out = torch.zeros_like(expected)
    assert disk.gather_sorted(rows, out=out) is out
    assert torch.equal(out, expected)
    with pytest.raises(InputError, match="out must be"):
        disk.gather_sorted(rows, out=out[:3])


def test_sorted_rows_must_rise(stores) -> None:
    disk, _ = stores["torch.float32"]
    for wrong in ([4, 3], [3, 3]):
        with pytest.raises(InputError, match="expected ascending distinct rows"):
            disk.gather_sorted(torch.tensor(wrong))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 699), max_size=80), st.sampled_from(KINDS))
def test_any_ids(stores, ids: list[int], kind: str) -> None:
    disk, dense = stores[kind]
    wanted = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(disk.gather(wanted), dense.gather(wanted))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (1, 1), (3, 5000)])
def test_odd_shapes(tmp_path: Path, rows: int, columns: int) -> None:
    values = some_values(rows, columns, torch.float32)
    disk = saved(tmp_path, values)
    assert torch.equal(disk.gather(torch.arange(rows).flip(0)), values.flip(0))
    assert torch.equal(disk.all(), values)
    assert disk.gather(torch.zeros(0, dtype=torch.int64)).shape == (0, columns)


@pytest.mark.parametrize("ids", [[700], [-1], [3, 700, 1], [5, -1]])
def test_ids_outside(stores, ids: list[int]) -> None:
    disk, _ = stores["torch.float32"]
    with pytest.raises(InputError, match=r"outside the 700 stored rows \(0 \.\. 699\)"):
        disk.gather(torch.tensor(ids))


def test_wrong_ids(stores) -> None:
    disk, _ = stores["torch.float32"]
    with pytest.raises(InputError, match="int64"):
        disk.gather(torch.tensor([1], dtype=torch.int32))
    with pytest.raises(InputError, match="int64"):
        disk.gather(torch.tensor([[1]]))


def test_raw_files(tmp_path: Path) -> None:
    values = some_values(60, 9, torch.bfloat16)
    (tmp_path / "x.bin").write_bytes(b"head" + values.view(torch.int16).numpy().tobytes())
    disk = DiskFeatures(tmp_path / "x.bin", shape=(60, 9), dtype=torch.bfloat16, offset=4)
    ids = torch.tensor([59, 0, 30])
    assert torch.equal(disk.gather(ids), values[ids].float())
    assert torch.equal(disk.all(), values.float())


def test_a_wrong_scale(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a scale of \[4\], one per feature, got \[3\]"):
        saved(tmp_path, some_values(5, 4, torch.int8), torch.ones(3))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    disk = saved(tmp_path, some_values(600, 40, torch.float32))
    disk.gather(torch.tensor([599]))
    with disk.paths[0].open("r+b") as file:
        file.truncate(128 + 500 * 160)
    assert disk.gather(torch.tensor([499])).shape == (1, 40)
    with pytest.raises(
        InputError, match=r"x-float32-600\.npy: ends after 80,128 bytes, expected at least 96,128"
    ):
        disk.gather(torch.tensor([599]))
    with pytest.raises(InputError, match=r"x-float32-600\.npy: 80,128 bytes, expected 96,128"):
        disk.all()


def test_counts_are_those_of_the_plans(tmp_path: Path) -> None:
    values = some_values(5000, 128, torch.float32)
    disk = saved(tmp_path, values, disk=SEEKS)
    everything = saved(tmp_path, values, disk=Disk(1.0, 1e9))
    assert disk.counts == everything.counts
    assert disk.counts.num_reads == 0
    rows = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:100].sort().values
    plan = plan_reads(rows, 512, offset=128, disk=SEEKS)
    disk.gather(torch.cat([rows.flip(0), rows]))
    counts = disk.counts
    assert (counts.num_rows, counts.num_reads, counts.num_scans) == (100, plan.num_reads, 0)
    assert (disk.pages_read, disk.bytes_read, disk.num_reads, disk.num_scans) == (
        plan.pages_read,
        plan.bytes_read,
        plan.num_reads,
        0,
    )
    assert counts.pages_wanted == len(
        {p for r in rows.tolist() for p in ((128 + 512 * r) // 4096, (639 + 512 * r) // 4096)}
    )
    disk.gather(rows)
    assert disk.counts.bytes_read == 2 * plan.bytes_read
    everything.gather(rows)
    assert everything.num_scans == 1
    assert 500 < everything.counts.pages_read <= 5000 // 8 + 3
    assert everything.counts.pages_wanted == counts.pages_wanted


def test_many_threads_at_once(tmp_path: Path) -> None:
    values = some_values(4000, 64, torch.float32)
    disk = saved(tmp_path, values, disk=SEEKS)
    wanted = [torch.randint(4000, (200,), generator=torch.Generator().manual_seed(k)) for k in range(24)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(disk.gather, wanted))
    assert all(torch.equal(rows, values[ids]) for rows, ids in zip(got, wanted, strict=True))
    assert disk.counts.num_rows == sum(torch.unique(ids).numel() for ids in wanted)
    assert disk.counts.bytes_read == sum(
        plan_reads(torch.unique(ids), 256, offset=128, disk=SEEKS).bytes_read for ids in wanted
    )


def test_several_files_as_one(tmp_path: Path) -> None:
    values = some_values(100, 6, torch.uint8)
    scale = torch.rand(6)
    folders = [tmp_path / str(k) for k in range(4)]
    pieces = values.split([40, 0, 59, 1])
    for folder in folders:
        folder.mkdir()
    made = [saved(folder, piece, scale) for folder, piece in zip(folders, pieces, strict=True)]
    joined, dense = DiskFeatures.joined(made), DenseFeatures(values, scale)
    assert joined.num_rows == 100
    assert len(joined.paths) == 4
    for ids in (
        torch.arange(100),
        torch.tensor([99, 0, 39, 40, 98, 0]),
        torch.tensor([41]),
        torch.arange(100).flip(0),
    ):
        assert torch.equal(joined.gather(ids), dense.gather(ids))
    assert torch.equal(joined.all(), dense.all())
    other = saved(tmp_path, some_values(5, 7, torch.uint8))
    with pytest.raises(InputError, match="expected the same"):
        DiskFeatures.joined([made[0], other])


def test_a_copy_reads_the_same_file(tmp_path: Path) -> None:
    values = some_values(50, 5, torch.float32)
    disk = saved(tmp_path, values)
    disk.gather(torch.tensor([1]))
    other = pickle.loads(pickle.dumps(disk))
    assert torch.equal(other.gather(torch.arange(50)), values)
    assert "rows=50" in repr(other)


def mapped(path: Path, scale: Tensor | None = None) -> DenseFeatures:
    return DenseFeatures(torch.from_numpy(np.load(path, mmap_mode="c")), scale, is_mapped=True, path=path)


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_are_kept_where_they_are_asked_for(tmp_path: Path, scaled: bool) -> None:
    values, scale = some_values(30, 4, torch.int8), torch.rand(4) if scaled else None
    saved(tmp_path, values)
    x = mapped(tmp_path / "x-int8-30.npy", scale)
    expected = DenseFeatures(values, scale).all()
    disk, memory = kept_in(x, "disk"), kept_in(x, "memory")
    assert isinstance(disk, DiskFeatures)
    assert isinstance(memory, DenseFeatures)
    assert not memory.is_mapped
    assert memory.dtype == torch.int8
    assert kept_in(x, "auto") is x
    assert kept_in(x, "mapped") is x
    assert kept_in(disk, "disk") is disk
    assert kept_in(memory, "memory") is memory
    back = kept_in(disk, "mapped")
    assert isinstance(back, DenseFeatures)
    assert back.is_mapped
    assert isinstance(kept_in(back, "disk"), DiskFeatures)
    assert isinstance(kept_in(memory, "disk"), DiskFeatures)
    read = kept_in(disk, "memory")
    for store in (disk, memory, back, read):
        assert torch.equal(store.gather(torch.arange(30)), expected)


def test_rows_without_a_file_cannot_be_read_from_one() -> None:
    dense = DenseFeatures(torch.ones(3, 2))
    sparse = SparseFeatures(SparseRows(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), 2))
    assert kept_in(dense, "memory") is dense
    assert kept_in(sparse, "memory") is sparse
    with pytest.raises(
        ConfigError, match="feature_store='disk': the graph's features are in memory, of no file"
    ):
        kept_in(dense, "disk")
    with pytest.raises(ConfigError, match="not rows of equal length"):
        kept_in(sparse, "disk")
    with pytest.raises(ConfigError, match=r"unknown feature_store 'dsk'.*'disk'"):
        kept_in(dense, "dsk")


def test_a_graph_with_features_on_disk(tmp_path: Path) -> None:
    values = some_values(4, 3, torch.float32)
    saved(tmp_path, values)
    graph = Graph.from_edges(torch.tensor([[0, 1], [1, 2]]), mapped(tmp_path / "x-float32-4.npy"))
    moved = in_feature_store(graph, "disk")
    assert isinstance(moved.x, DiskFeatures)
    assert moved.num_features == 3
    assert isinstance(moved, Graph)
    moved.check()
    assert in_feature_store(graph, "auto") is graph
    bare = Graph.from_edges(torch.tensor([[0, 1], [1, 2]]))
    assert in_feature_store(bare, "disk") is bare
