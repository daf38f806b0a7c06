"""The sampling kernel: which subsets are drawn, how often, and that native code, reference and tables agree bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from polyhop.errors import ConfigError, InputError, KernelError
from polyhop.kernels import Key, Purpose, Sampled, Sampler
from polyhop.kernels.sample import sample_reference

# Draws are a function of fixed keys, so these tests cannot flake. Under a right sampler each p-value is uniform: 1e-4 would
# have been crossed by chance with probability 1e-3 over all cases here. The classical off-by-one of Floyd's algorithm
# gives p below 1e-30 (test_chi_square_sees_the_off_by_one).
P_BOUND = 1e-4


def keys(hops: int, seed: int = 0) -> list[int]:
    return [Key(seed).at(Purpose.SAMPLE, hop) for hop in range(hops)]


def csc(lists: Sequence[Sequence[int]], dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    indptr = torch.zeros(len(lists) + 1, dtype=torch.int64)
    indptr[1:] = torch.tensor([len(row) for row in lists]).cumsum(0)
    return indptr, torch.tensor(list(itertools.chain.from_iterable(lists)), dtype=dtype)


def random_graph(
    num_nodes: int = 3000, seed: int = 0, dtype: torch.dtype = torch.int32
) -> tuple[Tensor, Tensor]:
    """Skewed degrees from 0 up, and one hub above the limit of 32-bit draws."""
    rng = np.random.default_rng(seed)
    degree = (4 / (1 - rng.random(num_nodes)) ** 0.9).astype(np.int64).clip(0, 2000) - 4
    degree[0] = 70_000
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.from_numpy(degree).cumsum(0)
    weight = (degree + 1.0) / (degree + 1.0).sum()
    return indptr, torch.from_numpy(rng.choice(num_nodes, int(indptr[-1]), p=weight)).to(dtype)


def assert_same(a: Sampled, b: Sampled) -> None:
    pairs = [(a.src_ids, b.src_ids), (a.in_degree, b.in_degree)]
    assert len(a.layers) == len(b.layers)
    for x, y in zip(a.layers, b.layers):
        assert x.num_src == y.num_src
        assert (x.edge is None) == (y.edge is None)
        pairs += [(x.indptr, y.indptr), (x.indices, y.indices)]
        if x.edge is not None and y.edge is not None:
            pairs.append((x.edge, y.edge))
    for left, right in pairs:
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def subset_counts(positions: np.ndarray, degree: int, fanout: int) -> np.ndarray:
    """How often each of the C(d, f) subsets occurs among rows of ascending positions."""
    code = {subset: at for at, subset in enumerate(itertools.combinations(range(degree), fanout))}
    return np.bincount([code[tuple(row)] for row in positions.tolist()], minlength=len(code))


def draw_alike(degree: int, fanout: int, nodes: int, method: str) -> np.ndarray:
    """Positions [nodes, fanout] drawn by nodes of one degree, each with sources of its own."""
    total = nodes * (degree + 1)
    indptr = torch.cat([torch.arange(nodes + 1) * degree, torch.full((total - nodes,), nodes * degree)])
    indices = torch.arange(nodes, total, dtype=torch.int32)
    sampler = Sampler(indptr, indices, keep_edges=True)
    (layer,) = sampler.sample(torch.arange(nodes), [fanout], keys(1), method=method).layers
    assert layer.edge is not None
    return layer.edge.view(nodes, fanout).numpy() - np.arange(nodes)[:, None] * degree


@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize(
    ("degree", "fanout", "nodes"),
    [
        (2, 1, 20_000),
        (5, 2, 20_000),
        (6, 3, 20_000),
        (7, 6, 20_000),
        (9, 4, 30_000),
        (66, 65, 20_000),
        (67, 65, 40_000),
        (200, 1, 40_000),
    ],
)
def test_all_subsets_are_equally_likely(degree: int, fanout: int, nodes: int, method: str) -> None:
    """Fan-outs up to 64 go through vector lanes, larger ones through the bit map."""
    positions = draw_alike(degree, fanout, nodes, method)
    assert (np.diff(positions, axis=1) > 0).all(), "ascending, so no position twice"
    counts = subset_counts(positions, degree, fanout)
    assert stats.chisquare(counts).pvalue > P_BOUND


def test_chi_square_sees_the_off_by_one() -> None:
    """The bound above has power: Floyd with t in 0 .. j-1 instead of 0 .. j fails it by far."""
    rng = np.random.default_rng(0)
    degree, fanout, rows = 6, 3, []
    for _ in range(20_000):
        picks: list[int] = []
        for j in range(degree - fanout, degree):
            t = int(rng.integers(0, j))
            picks.append(j if t in picks else t)
        rows.append(sorted(picks))
    assert stats.chisquare(subset_counts(np.array(rows), degree, fanout)).pvalue < 1e-30


@pytest.mark.parametrize("fanout", [3, 64, 100])
@pytest.mark.parametrize("degree", [65_536, 65_537, 200_000])
def test_positions_of_a_hub_are_uniform(degree: int, fanout: int) -> None:
    """On both sides of the change from 32-bit to 64-bit draws; 61 bins do not divide the draws' power of two."""
    sampler = Sampler(*csc([[1] * degree, []]), keep_edges=True)
    positions = []
    for seed in range(20_000 // fanout):
        (layer,) = sampler.sample(torch.tensor([0]), [fanout], keys(1, seed)).layers
        assert layer.edge is not None
        assert layer.edge.diff().min() > 0
        positions.append(layer.edge.numpy())
    bins = np.histogram(np.concatenate(positions), bins=61, range=(0, degree))[0]
    edges = np.ceil(np.linspace(0, degree, 62))
    expected = np.diff(edges) / degree * bins.sum()
    assert stats.chisquare(bins, expected).pvalue > P_BOUND


def test_draws_of_hops_and_nodes_are_independent() -> None:
    """One of four, twice: the 16 pairs of (draw at hop 0, draw at hop 1) of a node, and of neighbouring nodes."""
    nodes = 20_000
    indptr = torch.arange(nodes + 1) * 4
    sampler = Sampler(indptr, torch.zeros(4 * nodes, dtype=torch.int32), keep_edges=True)
    first, second = (
        layer.edge.numpy()[:nodes] % 4
        for layer in sampler.sample(torch.arange(nodes), [1, 1], keys(2)).layers
        if layer.edge is not None
    )
    for other in (second, np.roll(first, 1)):
        assert stats.chisquare(np.bincount(first * 4 + other, minlength=16)).pvalue > P_BOUND


@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize("fanouts", [[1], [3, 2], [15, 10, 5], [70, 3], [-1, 2], [4, -1]])
def test_block_semantics(fanouts: list[int], method: str) -> None:
    """min(d, f) distinct edges of the graph per destination; sources are the destinations, then new nodes as they appear."""
    indptr, indices = random_graph()
    seeds = torch.tensor([5, 0, 17, 2999, 3])
    sampled = Sampler(indptr, indices, keep_edges=True).sample(
        seeds, fanouts, keys(len(fanouts)), method=method
    )
    ids = seeds
    for layer, fanout in zip(sampled.layers, fanouts):
        degree = indptr[ids + 1] - indptr[ids]
        wanted = degree if fanout < 0 else degree.clamp(max=fanout)
        torch.testing.assert_close(layer.indptr.diff(), wanted)
        assert layer.edge is not None
        dst = torch.repeat_interleave(ids, wanted)
        assert ((layer.edge >= indptr[dst]) & (layer.edge < indptr[dst + 1])).all()
        start = torch.zeros(layer.edge.numel(), dtype=torch.bool)
        start[layer.indptr[:-1][wanted > 0]] = True
        assert (layer.edge.diff() > 0)[~start[1:]].all(), "ascending within a destination"
        sources = indices[layer.edge].long()
        everyone = torch.cat([ids, sources]).tolist()
        ids = sampled.src_ids[: layer.num_src]
        assert ids.tolist() == list(dict.fromkeys(everyone))
        torch.testing.assert_close(ids[layer.indices.long()], sources)
    assert ids.numel() == sampled.src_ids.numel()
    torch.testing.assert_close(sampled.in_degree, (indptr[ids + 1] - indptr[ids]).to(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("method", ["uniform", "labor"])
@pytest.mark.parametrize("fanouts", [[15, 10, 5], [65, 4], [64], [-1, 3], [2, -1]])
def test_native_equals_reference(fanouts: list[int], method: str, dtype: torch.dtype) -> None:
    indptr, indices = random_graph(dtype=dtype)
    seeds = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:200]
    expected = sample_reference(
        indptr, indices, seeds, fanouts, keys(len(fanouts)), method=method, keep_edges=True
    )
    for table in ("dense", "hash"):
        sampler = Sampler(indptr, indices, keep_edges=True, table=table)
        assert_same(sampler.sample(seeds, fanouts, keys(len(fanouts)), method=method), expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_native_equals_reference_on_any_graph(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 30))
    lists = data.draw(
        st.lists(st.lists(st.integers(0, nodes - 1), max_size=12), min_size=nodes, max_size=nodes)
    )
    fanouts = data.draw(st.lists(st.sampled_from([-1, 1, 2, 3, 7]), min_size=1, max_size=4))
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, nodes - 1), unique=True)), dtype=torch.int64)
    method = data.draw(st.sampled_from(["uniform", "labor"]))
    key = [data.draw(st.integers(0, 2**64 - 1)) for _ in fanouts]
    indptr, indices = csc(lists)
    expected = sample_reference(indptr, indices, seeds, fanouts, key, method=method)
    for table in ("dense", "hash"):
        assert_same(
            Sampler(indptr, indices, table=table).sample(seeds, fanouts, key, method=method), expected
        )


def test_ids_above_32_bits_of_a_key_are_told_apart() -> None:
    """The high half of a 64-bit key matters, also where it sets the sign bit."""
    indptr, indices = random_graph()
    seeds = torch.arange(1, 500)
    low, high = [7], [7 + (1 << 63)]
    one, two = (Sampler(indptr, indices).sample(seeds, [2], key) for key in (low, high))
    assert not torch.equal(one.src_ids, two.src_ids)
    assert_same(two, sample_reference(indptr, indices, seeds, [2], high))


@pytest.mark.parametrize("table", ["dense", "hash"])
def test_batches_leave_no_trace(table: str) -> None:
    """A used sampler gives what a new one gives, after batches of other sizes and after a failed one."""
    indptr, indices = random_graph()
    used = Sampler(indptr, indices, table=table)
    for size in (900, 3, 0, 300):
        used.sample(torch.arange(size), [10, 10, 10], keys(3))
    with pytest.raises(InputError):
        used.sample(torch.tensor([7, 8, 7]), [3], keys(1))
    seeds = torch.arange(100, 200)
    assert_same(
        used.sample(seeds, [4, 4], keys(2)),
        Sampler(indptr, indices, table=table).sample(seeds, [4, 4], keys(2)),
    )


@pytest.mark.parametrize("table", ["dense", "hash"])
def test_marks_run_out_unnoticed(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables tell batches apart by 32-bit marks, which run out after some thousand batches: here, among these."""
    indptr, indices = random_graph()
    monkeypatch.setattr(Sampler, "_first_mark", 2**32 - (7000 if table == "dense" else 3))
    sampler = Sampler(indptr, indices, table=table)
    for step in range(8):
        seeds, key = torch.arange(step, 3000, 7), keys(2, seed=step)
        assert_same(sampler.sample(seeds, [3, 3], key), sample_reference(indptr, indices, seeds, [3, 3], key))


def test_labor_shares_draws() -> None:
    """Destinations with the same sources keep the same ones; a source that two lists share is kept or left by both alike."""
    sources = list(range(10, 50))
    indptr, indices = csc([sources, sources[::-1], sources] + [[]] * 47)
    sampled = Sampler(indptr, indices).sample(torch.tensor([0, 1, 2]), [5], keys(1), method="labor")
    kept = [set(row.tolist()) for row in sampled.layers[0].indices.split(5)]
    assert kept[0] == kept[1] == kept[2]
    assert sampled.src_ids.numel() == 3 + 5
    uniform = Sampler(indptr, indices).sample(torch.tensor([0, 1, 2]), [5], keys(1))
    assert uniform.src_ids.numel() > 3 + 5


def test_labor_reaches_fewer_nodes() -> None:
    """500 nodes that keep 5 of 40 shared sources: about 2,000 / 8 sources have a number small enough to matter."""
    indptr = torch.arange(2001) * 40
    indices = torch.randint(2000, (80_000,), generator=torch.Generator().manual_seed(0))
    uniform, labor = (
        Sampler(indptr, indices).sample(torch.arange(500), [5], keys(1), method=method)
        for method in ("uniform", "labor")
    )
    assert labor.layers[0].indices.numel() == uniform.layers[0].indices.numel()
    assert labor.src_ids.numel() - 500 < 0.5 * (uniform.src_ids.numel() - 500)


def test_labor_breaks_ties_by_position() -> None:
    """The same source many times has one number, small or large: the first positions win."""
    sampler = Sampler(*csc([[1] * 300, []]), keep_edges=True)
    for seed in range(20):
        (layer,) = sampler.sample(torch.tensor([0]), [4], keys(1, seed), method="labor").layers
        assert layer.edge is not None
        assert layer.edge.tolist() == [0, 1, 2, 3]


def test_isolated_and_empty_seeds() -> None:
    indptr, indices = csc([[], [0], []])
    alone = Sampler(indptr, indices).sample(torch.tensor([2, 0]), [3, -1], keys(2))
    assert alone.src_ids.tolist() == [2, 0]
    assert [layer.indptr.tolist() for layer in alone.layers] == [[0, 0, 0]] * 2
    for run in (Sampler(indptr, indices).sample, lambda *a: sample_reference(indptr, indices, *a)):
        nobody = run(torch.empty(0, dtype=torch.int64), [3, -1], keys(2))
        assert nobody.src_ids.numel() == 0
        assert [layer.indptr.tolist() for layer in nobody.layers] == [[0]] * 2


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([0, 3], r"seeds\[1\] = 3: this graph has 3 nodes"),
        ([-1], r"seeds\[0\] = -1"),
        ([2, 1, 2, 1], r"seeds\[2\] = 2 appears before"),
    ],
)
def test_bad_seeds(seeds: list[int], message: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    for table in ("dense", "hash"):
        with pytest.raises(InputError, match=message):
            Sampler(*csc([[1], [2], [0]]), table=table).sample(torch.tensor(seeds), [1], keys(1))


@pytest.mark.parametrize("fanouts", [[], [0], [5, -2], [2.5], ["3"]])
def test_impossible_fanouts(fanouts: list[int]) -> None:
    with pytest.raises(ConfigError, match="num_neighbors"):
        Sampler(*csc([[0]])).sample(torch.tensor([0]), fanouts, keys(len(fanouts)))


def test_other_bad_arguments() -> None:
    sampler = Sampler(*csc([[0]]))
    with pytest.raises(InputError, match="seeds must be int64"):
        sampler.sample(torch.tensor([0.0]), [1], keys(1))
    with pytest.raises(InputError, match="2 fan-outs need as many keys"):
        sampler.sample(torch.tensor([0]), [1, 1], keys(1))
    with pytest.raises(ConfigError, match="Did you mean 'uniform'"):
        sampler.sample(torch.tensor([0]), [1], keys(1), method="unifrom")
    with pytest.raises(ConfigError, match="sampler table"):
        Sampler(*csc([[0]]), table="tree")
    with pytest.raises(InputError, match="indptr must run from 0"):
        Sampler(torch.tensor([0, 2]), torch.tensor([0]))


def test_numpy_fanouts_are_whole_numbers() -> None:
    sampler = Sampler(*csc([[0, 1], [0]]))
    assert sampler.sample(torch.tensor([0]), list(np.array([1, 2])), keys(2)).layers[0].indices.numel() == 1


def test_debug_mode_names_the_bad_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler made before the arrays were spoilt: its own checks, not the constructor's."""
    monkeypatch.setenv("POLYHOP_DEBUG", "1")
    indptr, indices = csc([[1, 2], [0], [1]])
    sampler = Sampler(indptr, indices)
    indices[2] = 9
    with pytest.raises(KernelError, match=r"indices\[2\] = 9, outside 0 .. 2"):
        sampler.sample(torch.tensor([1]), [-1], keys(1))
    indptr[2] = 7
    with pytest.raises(KernelError, match=r"indptr\[1\] .. indptr\[2\]"):
        sampler.sample(torch.tensor([1]), [-1], keys(1))


def digest() -> str:
    """One number for a batch, computed here and in other processes."""
    indptr, indices = random_graph()
    sampled = Sampler(indptr, indices).sample(torch.arange(0, 400, 3), [15, 70, 5], keys(3))
    parts = [sampled.src_ids, *(layer.indices for layer in sampled.layers)]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


@pytest.mark.parametrize("isa", ["base", "avx2"])
def test_every_instruction_set_and_process_draws_alike(isa: str) -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['digest']())"
    env = {**os.environ, "POLYHOP_ISA": isa}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == digest()
