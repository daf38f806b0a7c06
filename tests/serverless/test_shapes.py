"""Tasks of an epoch: counted by hand for the published order, and for each model and order against autograd's needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyhop.errors import ConfigError, InputError
from polyhop.serverless.shapes import PAPER, Shape, Step, random_ghosts, steps

SMALL = Shape("small", 100, 700, (6, 5, 3))


def names(shape: Shape) -> list[str]:
    return [step.name for step in steps(shape)]


def by_name(shape: Shape) -> dict[str, Step]:
    return {step.name: step for step in steps(shape)}


def test_published_order_has_three_tensor_tasks() -> None:
    assert names(SMALL) == ["A1", "D1", "A2", "D2 and back", "back A2", "back D1"]
    assert names(replace(SMALL, caches_first=True)) == names(SMALL)[1:]


def test_published_order_by_hand() -> None:
    step = by_name(SMALL)
    assert [step[name].edge_columns for name in ("A1", "A2", "back A2")] == [6, 5, 5]
    assert step["D1"] == Step(
        "D1", True, flops=2 * 30, in_bytes=24, out_bytes=20, task_in_bytes=120, scattered_bytes=20
    )
    assert step["D2 and back"] == Step(
        "D2 and back", True, flops=3 * 2 * 15, in_bytes=20 + 8, out_bytes=20, task_in_bytes=60, task_out_bytes=60,
        scattered_bytes=20,
    )  # fmt: skip
    assert step["back D1"] == Step(  # forward anew, gradients of weights, none of inputs
        "back D1",
        True,
        flops=2 * 2 * 30,
        again_flops=2 * 30,
        in_bytes=24 + 20,
        task_in_bytes=120,
        task_out_bytes=120,
    )


def test_kept_activations_save_work_and_cost_bytes() -> None:
    anew, kept = by_name(SMALL)["back D1"], by_name(replace(SMALL, recomputes=False))["back D1"]
    assert anew.flops - kept.flops == 2 * 30
    assert kept.in_bytes - anew.in_bytes == 4 * 5
    mixed = replace(
        SMALL, maps_first=(False, True)
    )  # the activation does not leave its piece: keeping it sends it too
    sent = by_name(replace(mixed, recomputes=False))["D1"].out_bytes - by_name(mixed)["D1"].out_bytes
    assert sent == 4 * 5


def test_mapping_first() -> None:
    step = by_name(replace(SMALL, maps_first=(True, True)))
    assert list(step) == ["D0", "A1", "D1", "A2", "D2 and back", "back A2", "back D1", "back A1", "back D0"]
    assert [step[name].edge_columns for name in ("A1", "A2", "back A2", "back A1")] == [5, 3, 3, 5]
    assert step["D2 and back"].flops == 0  # the loss alone
    assert step["back D1"].flops == 2 * 2 * 15  # of weights and of inputs
    assert step["back D0"].flops == 2 * 30  # of weights alone
    assert step["back D0"].out_bytes == 0
    assert step["back D1"].scattered_bytes == 4 * 5


def test_mixed_orders_share_a_piece() -> None:
    step = by_name(replace(SMALL, maps_first=(False, True)))
    assert list(step) == names(SMALL)
    assert step["D1"].flops == 2 * (30 + 15)
    assert step["D1"].out_bytes == 4 * 3
    assert step["back D1"].flops == 2 * (30 + (30 + 15) + 15)  # anew, weights, inputs of the second product


def test_sage_has_a_product_of_the_own_row() -> None:
    step = by_name(replace(SMALL, model="sage"))
    assert step["D1"].flops == 2 * 2 * 30
    assert step["D1"].in_bytes == 4 * (6 + 6)
    assert step["D2 and back"].out_bytes == 4 * (5 + 5)
    assert step["back D1"].flops == 2 * (60 + 60)  # anew and of weights; inputs need no gradient
    mapped = by_name(replace(SMALL, model="sage", maps_first=(True, True)))
    assert mapped["D1"].out_bytes == 4 * (3 + 5)  # mapped rows, and rows for the own product
    assert mapped["back D1"].out_bytes == 4 * 5  # inputs need no gradient


def test_gat_maps_first_and_gathers_scores() -> None:
    step = by_name(replace(SMALL, model="gat", heads=2, widths=(6, 4, 3)))
    assert step["A1"].edge_columns == 4 + 2
    assert step["A2"].edge_columns == 2 * 3 + 2
    assert step["back A2"].edge_columns == 2 * step["A2"].edge_columns


def test_one_layer() -> None:
    one = replace(SMALL, widths=(6, 3))
    assert names(one) == ["A1", "D1 and back"]
    step = by_name(one)["D1 and back"]
    assert (step.flops, step.out_bytes, step.scattered_bytes) == (2 * 2 * 18, 0, 0)


def test_gcn_gathers_a_loop_of_every_node() -> None:
    assert SMALL.num_gathered == 800
    assert replace(SMALL, model="sage").num_gathered == 700


def test_payloads_are_those_of_the_paper() -> None:
    """AH of one interval: 3.5, 15.3 and 5.2 MB."""
    for name, servers, intervals, expected in (
        ("reddit-small", 2, 80, 3.5),
        ("amazon", 8, 90, 15.3),
        ("friendster", 32, 50, 5.2),
    ):
        shape = PAPER[name]
        rows = shape.num_nodes / servers / intervals
        assert rows * by_name(shape)["D1"].in_bytes / 1e6 == pytest.approx(expected, abs=0.06)


def test_ghosts() -> None:
    assert random_ghosts(100, 1000, 1) == 0
    assert random_ghosts(100, 100, 2) == 0.5
    assert random_ghosts(100, 10**6, 8) == pytest.approx(7)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="unknown model 'gcnn'"):
        replace(SMALL, model="gcnn")
    with pytest.raises(InputError, match="one of each"):
        replace(SMALL, widths=(6, 0, 3))
    with pytest.raises(InputError, match="one of each"):
        replace(SMALL, widths=(6,))
    with pytest.raises(InputError, match="1 orders for 2 layers"):
        replace(SMALL, maps_first=(True,))
