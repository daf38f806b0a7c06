"""What many tests need: the folder of real graphs, if this machine has one, and a small graph that a GNN can learn."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before numpy is loaded, which reads it once: products of several threads at a time have other bits than those of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

if TYPE_CHECKING:
    from polyhop.graph import Graph

# One thread unless told: two threads that wait for each other on a busy machine make tiny graphs slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A package that is on a relative path must be found by processes that start elsewhere, too.
if os.environ.get("PYTHONPATH"):
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in given)

# A shell starts background commands with Ctrl-C ignored, which children inherit: the tests of Ctrl-C need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]

# Plans rest on figures of the host, which the user's cache keeps: tests have a cache of their own, with figures that nobody
# has to measure. Processes that tests start inherit it.
_CACHE = tempfile.mkdtemp(prefix="polyhop-cache-")
os.environ["POLYHOP_CACHE"] = _CACHE
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


def pytest_configure() -> None:
    from polyhop.plan import Law, Link, Machine, save_machine
    from polyhop.planner import ANY_MODEL

    law = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6)
    link = Link(1e9, 2e-4)
    save_machine(
        Machine(
            "of the tests", 2, 24e9, 32e6, 2.5e9, 2.5e9, 2e-7, 3e-9, 1e-4, 4e-10, 1.2e-10, 3e8, 1e9, 1.9, link,
            {ANY_MODEL: law}, source="made up for tests",
        )
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in a hook of its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that use the pool of ranks go to one process of pytest-xdist (--dist loadgroup), so there is one pool."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Any]:
    """The pool itself; started by its first job."""
    spec = importlib.util.spec_from_file_location("rank_pool", ROOT / "tests" / "rank_pool.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pool = module.RankPool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(rank_pool: Any) -> Callable[..., list[Any]]:
    """``ranks(num_ranks, function, *args)``: function(collective, *args) on 1 .. 4 gloo ranks; results in rank order."""
    run: Callable[..., list[Any]] = rank_pool.run
    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where this user may mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True)
    if made.returncode:
        pytest.skip("this machine does not let us mount a small file system")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real graphs: $POLYHOP_DATA, else ../shared/data beside the repository."""
    given = os.environ.get("POLYHOP_DATA")
    folder = Path(given) if given else ROOT.parent / "shared" / "data"
    if not (folder / "cora.npz").is_file():
        pytest.skip(f"no real graphs in {folder} (set POLYHOP_DATA to a folder that has cora.npz)")
    return folder


def _two_communities(num_nodes: int = 80, num_features: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of a graph in the .npz format: two communities, noisy features, split 1/2, 1/4, 1/4. Learnt in seconds."""
    rng = np.random.default_rng(seed)
    y = (np.arange(num_nodes) % 2).astype(np.int8)
    close = y[:, None] == y[None, :]
    joined = np.triu(rng.random((num_nodes, num_nodes)) < np.where(close, 0.12, 0.02), 1)
    edge_index = np.stack(np.nonzero(joined | joined.T)).astype(np.int32)
    x = (rng.normal(size=(num_nodes, num_features)) + y[:, None] * 0.5).astype(np.float32)
    code = rng.permutation(np.array([1, 2, 1, 3] * ((num_nodes + 3) // 4), dtype=np.uint8)[:num_nodes])
    return {
        "edge_index": edge_index,
        "x": x,
        "y": y,
        "train_mask": code == 1,
        "val_mask": code == 2,
        "test_mask": code == 3,
        "num_nodes": np.int64(num_nodes),
        "num_classes": np.int64(2),
    }


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one small graph, ``tiny``."""
    folder = tmp_path_factory.mktemp("data")
    np.savez(folder / "tiny.npz", **_two_communities())
    return folder


@pytest.fixture(scope="session")
def make_graph() -> Callable[..., Graph]:
    """Maker of small planted graphs: ``make_graph(num_nodes=..., kind="single"|"multi", sparse=..., weighted=...)``."""
    return planted_graph


def planted_graph(
    num_nodes: int = 200,
    *,
    num_features: int = 8,
    num_classes: int = 3,
    kind: str = "single",
    sparse: bool = False,
    weighted: bool = False,
    seed: int = 0,
) -> Graph:
    """Communities with noisy features, a few loops and isolated nodes; split 1/2, 1/4, 1/4; one train label is missing."""
    import torch

    from polyhop.graph import DenseFeatures, Graph, SparseFeatures, SparseRows, Split

    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(num_nodes) % num_classes
    close = y[:, None] == y[None, :]
    joined = torch.rand(num_nodes, num_nodes, generator=rng) < torch.where(close, 12.0, 2.0) / num_nodes
    joined = joined | joined.T
    joined[: num_nodes // 20] = False
    joined[:, : num_nodes // 20] = False
    dst, src = joined.nonzero(as_tuple=True)
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_nodes).cumsum(0)
    x = torch.randn(num_nodes, num_features, generator=rng)
    x[:, :num_classes] += torch.nn.functional.one_hot(y, num_classes) * 1.5
    if sparse:
        csr = (x * (x > 0.3)).to_sparse_csr()
        rows = SparseRows(csr.crow_indices(), csr.col_indices().int(), csr.values(), num_features)
    order = torch.randperm(num_nodes, generator=rng)
    quarter = num_nodes // 4
    train, val, test = (
        part.sort().values for part in order.split([num_nodes - 2 * quarter, quarter, quarter])
    )
    labels = torch.nn.functional.one_hot(y, num_classes).float() if kind == "multi" else y.clone()
    if kind == "single":
        labels[train[0]] = -1
    return Graph(
        indptr,
        src.int(),
        x=SparseFeatures(rows) if sparse else DenseFeatures(x),
        y=labels,
        split=Split(train, val, test),
        edge_weight=torch.rand(src.numel(), generator=rng) + 0.5 if weighted else None,
        num_classes=num_classes,
        name="planted",
    )


@pytest.fixture(scope="session")
def two_communities() -> Callable[..., dict[str, np.ndarray]]:
    """``two_communities(num_nodes=80, num_features=12, seed=0)`` -> arrays of a graph in the .npz format."""
    return _two_communities
