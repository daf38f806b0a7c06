"""Generators: native equals reference bit for bit, for any number of threads, and keeps what it promises."""

from __future__ import annotations

import pytest
import torch

from polyhop.errors import InputError
from polyhop.kernels import native
from polyhop.kernels.synth import Communities, Rmat, feature_rows, permutation, synth_edges

NODES = 1000
COMMUNITIES = Communities(
    key=0xFEDCBA9876543210, num_nodes=NODES, class_start=(0, 300, 500, NODES), num_groups=(3, 1, 4),
    in_group=0.4, in_class=0.3, power=3, class_floor=0.1, group_floor=0.2,
)  # fmt: skip
RMAT = Rmat(key=17, levels=10, a=0.57, b=0.19, c=0.19)


def in_mode(monkeypatch: pytest.MonkeyPatch, mode: str, threads: int = 2) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", mode)
    monkeypatch.setenv("POLYHOP_THREADS", str(threads))


def native_or_skip() -> None:
    if native.status()["cpu"] != "native":
        pytest.skip(native.status()["library"])


def edges(recipe: Communities | Rmat, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return synth_edges(recipe, permutation(3, recipe.num_nodes), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 70_000])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_permutation_holds_every_entry_once(n: int, key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_mode(monkeypatch, "reference")
    expected = permutation(key, n)
    assert torch.equal(expected.sort().values, torch.arange(n, dtype=torch.int32))
    in_mode(monkeypatch, "auto")
    assert torch.equal(permutation(key, n), expected)


def test_permutation_depends_on_its_key() -> None:
    assert not torch.equal(permutation(1, 1000), permutation(2, 1000))


@pytest.mark.parametrize("n", [0, -1, 2**31])
def test_permutation_refuses_sizes_it_cannot_hold(n: int) -> None:
    with pytest.raises(InputError, match="permutation"):
        permutation(0, n)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (COMMUNITIES, {"num_pairs": 5000, "overdraw": 1.3}),  # surplus dropped
        (COMMUNITIES, {"num_pairs": 9000}),  # more must be drawn
        (COMMUNITIES, {"num_pairs": 5000, "exact": False}),
        (RMAT, {"num_pairs": 5000, "exact": False}),
        (RMAT, {"num_pairs": 3000}),
    ],
)
def test_native_equals_reference_for_any_threads(
    recipe: Communities | Rmat, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    native_or_skip()
    in_mode(monkeypatch, "reference")
    expected = edges(recipe, **options)
    for threads in (1, 2, 5):
        in_mode(monkeypatch, "native", threads)
        for got, want in zip(edges(recipe, **options), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_exact_gives_that_many_edges_symmetric_sorted_simple(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "native":
        native_or_skip()
    in_mode(monkeypatch, mode)
    indptr, indices = edges(COMMUNITIES, num_pairs=7000)
    assert indices.numel() == 14_000
    assert int(indptr[0]) == 0
    assert int(indptr[-1]) == 14_000
    destination = torch.repeat_interleave(torch.arange(NODES), indptr.diff())
    code = destination * NODES + indices
    assert bool((code[1:] > code[:-1]).all())  # sorted within lists, no duplicates
    assert bool((destination != indices).all())
    assert torch.equal((indices.long() * NODES + destination).sort().values, code)


def test_too_many_pairs_give_what_there_is_room_for() -> None:
    tiny = Communities(5, 6, (0, 3, 6), (1, 1), in_group=0.0, in_class=1.0, power=1)
    _, indices = edges(tiny, num_pairs=15, overdraw=20.0)
    assert indices.numel() == 2 * 6  # two triangles: no pair joins the classes


def test_shares_of_pairs_follow_the_recipe() -> None:
    recipe = Communities(8, 20_000, (0, 10_000, 20_000), (1, 1), in_group=0.0, in_class=0.7, power=1)
    node_of = torch.arange(20_000, dtype=torch.int32)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=40_000)
    destination = torch.repeat_interleave(torch.arange(20_000), indptr.diff())
    inside = ((destination < 10_000) == (indices < 10_000)).double().mean()
    assert abs(float(inside) - 0.7) < 0.012  # 5 standard deviations of 40,000 draws


def test_higher_power_makes_hubs() -> None:
    plain, skewed = (
        edges(Communities(8, 5000, (0, 5000), (1,), 0.0, 1.0, power=power, class_floor=0.02), num_pairs=25_000)[0]
        .diff().max()
        for power in (1, 3)
    )  # fmt: skip
    assert skewed > 5 * plain


def test_wrong_node_numbers_are_refused() -> None:
    with pytest.raises(InputError, match=r"node_of: expected int32 \[1000\]"):
        synth_edges(COMMUNITIES, torch.arange(NODES), num_pairs=10)


@pytest.mark.parametrize("width", [1, 3, 4, 63, 64, 65, 130])
def test_rows_native_equals_reference(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    centres, klass = torch.randn(5, width), torch.randint(-1, 5, (300,))

    def rows() -> torch.Tensor:
        return feature_rows(2**63 + 5, klass, centres, num_rows=300, width=width, start=2**33)

    in_mode(monkeypatch, "reference")
    expected = rows()
    for threads in (1, 3):
        in_mode(monkeypatch, "native", threads)
        assert torch.equal(rows(), expected)


def test_a_row_is_a_function_of_its_node() -> None:
    whole = feature_rows(9, None, None, num_rows=100, width=20)
    assert torch.equal(feature_rows(9, None, None, num_rows=10, width=20, start=50), whole[50:60])


def test_noise_has_unit_variance() -> None:
    noise = feature_rows(9, None, None, num_rows=20_000, width=16).double()
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    assert float(torch.corrcoef(noise.T).fill_diagonal_(0).abs().max()) < 0.05


def test_rows_are_written_into_out() -> None:
    out = torch.zeros(10, 4)
    assert feature_rows(9, None, None, num_rows=10, width=4, out=out) is out
    assert bool((out != 0).any())
