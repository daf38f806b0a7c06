"""Laws of computing: what was put in comes out again, and nothing is ever negative."""

from __future__ import annotations

import json
import math

import pytest
import torch

from polyhop.errors import InputError
from polyhop.graph import Sizes
from polyhop.nn import GAT, GCN, GCNII, GraphSAGE
from polyhop.nn.counts import Counts, count_model
from polyhop.plan import Law, fit_law
from polyhop.plan.probe import Probe, measure_law

TRUE = Law(near_s=2e-11, far_s=6e-10, flop_s=1.2e-11, row_s=4e-10, call_s=1e-4, cache_bytes=16e6)


def counts(seed: int) -> Counts:
    drawn = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()
    table = 1e6 if seed % 2 else 1e8
    return Counts(((1e9 * drawn[0], table),), 1e10 * drawn[1], 1e8 * drawn[2], round(10 * drawn[3]) + 1.0)


def test_a_law_is_found_again() -> None:
    seen = [counts(seed) for seed in range(20)]
    found = fit_law(seen, [TRUE.seconds(each) for each in seen], TRUE.cache_bytes)
    for each in (counts(99), counts(100)):
        assert found.seconds(each) == pytest.approx(TRUE.seconds(each), rel=1e-6)
    assert found.far_s == pytest.approx(TRUE.far_s)


def test_rows_that_fit_the_cache_are_near() -> None:
    small, large = (Counts(((1e6, table),)) for table in (1e6, 1e12))
    assert TRUE.seconds(small) == pytest.approx(2e-5)
    assert TRUE.seconds(large) == pytest.approx(6e-4, rel=1e-3)
    half = Counts(((1e6, 32e6),))
    assert TRUE.seconds(half) == pytest.approx((2e-5 + 6e-4) / 2)


def test_no_coefficient_is_negative() -> None:
    seen = [counts(seed) for seed in range(6)]
    found = fit_law(seen, [1 / (1 + each.flops) for each in seen])  # more work, less time: nonsense
    assert min(found.near_s, found.far_s, found.flop_s, found.row_s, found.call_s) >= 0


@pytest.mark.parametrize(("seen", "taken"), [([], []), ([Counts()], [1.0, 2.0]), ([Counts()], [0.0])])
def test_what_cannot_be_fitted(seen: list[Counts], taken: list[float]) -> None:
    with pytest.raises(InputError):
        fit_law(seen, taken)


def test_json_and_back() -> None:
    for law in (TRUE, Law(flop_s=1e-11, host="a host")):
        assert Law.from_json(json.loads(json.dumps(law.to_json()))) == law
    assert math.isinf(Law.from_json(Law().to_json()).cache_bytes)


def test_twice_as_slow() -> None:
    assert (TRUE * 2).seconds(counts(3)) == pytest.approx(2 * TRUE.seconds(counts(3)))
    assert (TRUE * 2).cache_bytes == TRUE.cache_bytes


# ---------------------------------------------------------------- counts

WHOLE = Sizes(100, 100, 700)


def test_counts_of_a_layer_that_aggregates_first() -> None:
    counted = count_model(GCN(8, 64, 2, out_channels=4), 8)
    first, last = counted.layers
    assert not first.map_first(WHOLE), "8 columns are fewer than 64"
    found = first.of(WHOLE)
    assert found.values == 700 * 8, "inputs need no gradient"
    assert found.flops == 2 * 2 * 100 * 8 * 64
    assert last.map_first(WHOLE)
    assert last.of(WHOLE).values == 2 * 700 * 4
    assert last.of(WHOLE).flops == 2 * 3 * 100 * 64 * 4


def test_counts_add_up_and_scale() -> None:
    counted = count_model(GraphSAGE(8, 16, 3, out_channels=4), 8)
    total = counted.of([WHOLE] * 3)
    by_hand = counted.around(100, 100)
    for layer in counted.layers:
        by_hand += layer.of(WHOLE)
    assert total == by_hand
    assert (total * 3).flops == 3 * total.flops
    assert (total * 3).values == 3 * total.values


def test_what_is_before_and_after_the_layers_counts_too() -> None:
    counted = count_model(GCNII(32, 16, 4, out_channels=5), 32)
    assert counted.begin == 32 * 16
    assert counted.finish == 16 * 5
    assert count_model(GCN(32, 16, 2, out_channels=5), 32).begin == 0


def test_sparse_inputs_cost_their_values() -> None:
    dense, sparse = (count_model(GCN(2000, 16, 2, out_channels=4), 2000, each) for each in (None, 10.0))
    assert sparse.of([WHOLE] * 2).flops < dense.of([WHOLE] * 2).flops / 10
    assert sparse.layers[0].of(WHOLE).values == 2 * 16 * (700 + 100 * 10)
    assert sparse.layers[1].of(WHOLE) == dense.layers[1].of(WHOLE)


# ---------------------------------------------------------------- probes


def test_a_probe_grows_towards_the_inputs() -> None:
    sizes = Probe(100, 5, 2.0).sizes(3)
    assert [each.num_dst for each in sizes] == [400, 200, 100]
    assert [each.num_src for each in sizes] == [800, 400, 200]
    assert [each.num_edges for each in sizes] == [2000, 1000, 500]


MODELS = [
    GCN(8, 16, 2, out_channels=3, dropout=0.5),
    GAT(8, 16, 2, out_channels=3),
    GCNII(8, 16, 3, out_channels=3),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("input_values", [None, 3.0])
def test_a_model_is_timed_and_left_as_it_was(model: torch.nn.Module, input_values: float | None) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, mode = torch.random.get_rng_state(), model.training
    law = measure_law(
        model, 8, input_values=input_values, probes=(Probe(64, 3), Probe(128, 6, 1.5)), is_fresh=True
    )
    assert law.seconds(count_model(model, 8, input_values).of(Probe(64, 3).sizes(int(model.num_layers)))) > 0  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training == mode
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
