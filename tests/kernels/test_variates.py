"""Numbers that turn from step to step: each uniform, neighbours alike, and the same bits in both implementations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from polyhop.errors import ConfigError
from polyhop.kernels import draw, native, reference
from polyhop.kernels.keys import Key, Purpose
from polyhop.kernels.procedural import Virtual, virtual_draw
from polyhop.kernels.sample import Sampler, sample_reference
from polyhop.kernels.variates import (
    Variates,
    check_dependence,
    normal_quantile,
    normal_share,
    packed_keys,
    sample_key,
    turned,
)

KAPPA = 8
IDS = torch.arange(1 << 17)


def numbers(step: int, kappa: int = KAPPA, ids: Tensor = IDS) -> Tensor:
    """float64: u of each source."""
    key = sample_key(Key(3, 1, step), 0, kappa)
    words = reference.philox(key, ids)[0]
    if isinstance(key, Variates):
        words = turned(key, words, reference.philox(key.second, ids)[0])
    assert int(words.min()) >= 0
    assert int(words.max()) < 2**32
    return (words.double() + 0.5) / 2**32


def test_quantile_and_distribution_are_those_of_a_normal_variable() -> None:
    p = torch.cat([torch.linspace(1e-6, 1 - 1e-6, 20001), torch.logspace(-9.5, -1, 999)]).double()
    assert float((normal_quantile(p) - torch.special.ndtri(p)).abs().max()) < 1e-13
    x = torch.linspace(-7, 7, 20001, dtype=torch.float64)
    assert float((normal_share(x) - torch.special.ndtr(x)).abs().max()) < 1e-15
    assert float((normal_share(normal_quantile(p)) / p - 1).abs().max()) < 1e-8


@pytest.mark.parametrize("step", [0, 1, 4, 7, 8, 13])
def test_every_step_is_uniform(step: int) -> None:
    u = numbers(step).sort().values
    ideal = (torch.arange(u.numel()) + 0.5) / u.numel()
    assert float((u - ideal).abs().max()) * math.sqrt(u.numel()) < 1.95  # Kolmogorov: exceeded once in 1000


def test_steps_are_as_alike_as_the_angle_between_them() -> None:
    normal = torch.stack(
        [normal_quantile(numbers(step).clamp(1e-9, 1 - 1e-9)) for step in range(2 * KAPPA + 1)]
    )
    found = torch.corrcoef(normal)
    for step in range(2 * KAPPA):  # neighbours, over the end of a window too
        assert float(found[step, step + 1]) == pytest.approx(math.cos(math.pi / 2 / KAPPA), abs=0.01)
    assert abs(float(found[0, KAPPA])) < 0.01  # a window later nothing is left
    assert abs(float(found[1, 2 * KAPPA])) < 0.01


def test_a_window_of_one_step_draws_anew() -> None:
    key = Key(3, 1, 5)
    assert sample_key(key, 2) == sample_key(key, 2, 1) == key.at(Purpose.SAMPLE, 2)
    assert not isinstance(sample_key(key, 2, 1), Variates)
    first, second = sample_key(Key(3, 1, 7), 2, 4), sample_key(Key(3, 1, 8), 2, 4)
    assert isinstance(first, Variates)
    assert first.second == second  # what one window turns to, the next begins with


def lists(num_rows: int = 300, num_edges: int = 12000) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    dst = torch.randint(num_rows, (num_edges,), generator=made)
    dst[:4000] = 3  # a hub
    indptr = torch.zeros(num_rows + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(dst, minlength=num_rows).cumsum(0)
    indices = torch.randint(num_rows, (num_edges,), generator=made)
    return indptr, indices, torch.randint(1 << 62, (num_rows,), generator=made)


KEYS = [sample_key(Key(2, 0, step), 1, kappa) for step, kappa in ((1, 2), (5, 7), (63, 64))]


@pytest.mark.parametrize("fanout", [1, 7, 40, 3000, -1])
@pytest.mark.parametrize("wide", [False, True])
def test_native_and_reference_draw_the_same(fanout: int, wide: bool) -> None:
    indptr, indices, ids = lists()
    indices, rows = indices if wide else indices.int(), torch.arange(ids.numel())
    for named in (ids, None):
        several = draw(
            indptr,
            indices,
            rows,
            fanout,
            KEYS,
            ids=ids,
            source_ids=named,
            method="labor",
            cuts=[0, 3, 50, 300],
        )
        apart = [
            reference.draw(
                indptr, indices, some, fanout, key, ids=ids[some], source_ids=named, method="labor"
            )
            for key, some in zip(KEYS, rows.split([3, 47, 250]), strict=True)
        ]
        assert torch.equal(several[1], torch.cat([position for _, position in apart]))


def test_whole_mini_batches_are_the_same() -> None:
    indptr, indices, _ = lists()
    seeds, fanouts = torch.arange(0, 300, 7), [5, 3, 9]
    one = Sampler(indptr, indices.int()).sample(seeds, fanouts, KEYS, method="labor")
    other = sample_reference(indptr, indices.int(), seeds, fanouts, KEYS, method="labor")
    assert torch.equal(one.src_ids, other.src_ids)
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.equal(a.indices, b.indices)


def test_computed_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, ids = Virtual(3, 1 << 30, 8), torch.arange(0, 1 << 29, 1 << 22)
    found = virtual_draw(graph, ids, 5, KEYS[1], method="labor")
    monkeypatch.setattr(native, "serves", lambda *_, **__: False)
    expected = virtual_draw(graph, ids, 5, KEYS[1], method="labor")
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[1], virtual_draw(graph, ids, 5, int(KEYS[1]), method="labor")[1])


@pytest.mark.parametrize("step", [0, 3, 5])
def test_every_neighbour_is_drawn_as_often_as_without(step: int) -> None:
    degree, fanout, runs = 20, 6, 4000
    indptr, indices = torch.tensor([0, degree]), torch.arange(degree)
    counts = torch.zeros(degree)
    for seed in range(runs):
        key = sample_key(Key(seed, 0, step), 0, KAPPA)
        position = draw(
            indptr, indices, torch.zeros(1, dtype=torch.int64), fanout, key, ids=indices[:1], method="labor"
        )
        counts[position[1]] += 1
    expected = runs * fanout / degree
    chi = float(((counts - expected) ** 2 / expected).sum()) / (1 - fanout / degree)
    assert chi < 43.8  # of 19 degrees of freedom: exceeded once in 1000


def test_keys_as_the_library_has_them() -> None:
    packed = packed_keys([(1 << 64) - 1, KEYS[0]])
    assert packed[0].tolist()[:2] == [-1, 0]
    assert packed[:, 2:].contiguous().view(torch.float64).tolist()[0] == [1.0, 0.0]
    assert isinstance(KEYS[0], Variates)
    assert packed[1, 2:].contiguous().view(torch.float64).tolist() == [KEYS[0].cos, KEYS[0].sin]


@pytest.mark.parametrize(
    ("given", "method", "expected"),
    [
        (0, "labor", "1 .. 64"),
        (65, "labor", "1 .. 64"),
        (2.0, "labor", "1 .. 64"),
        (4, "uniform", "only sampler='labor'"),
    ],
)
def test_what_cannot_depend_so_is_refused(given: int, method: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_dependence(given, method)
