"""Shapes timed ahead: equal to formulas where there are any, and the authors' choices where they lose and win."""

from __future__ import annotations

import pytest

from polyhop.errors import InputError
from polyhop.strategies.pipeline_schedule import Layout
from polyhop.strategies.pipeline_shape import Links, Work, choose_shape, epoch_s

LAYERS = [100] * 32
FREE = Links(parts=1e30, stages=1e30)


def work(**more: object) -> Work:
    given = {"replicas": {2: 0.5, 8: 2.6}, "compute_s": 8.0, "num_chunks": 32, **more}
    return Work(232_965, LAYERS, 100, **given)  # type: ignore[arg-type]


def test_one_stage_is_computing_and_bytes() -> None:
    links = Links(parts=1e9, stages=1.0)
    sent = 2 * 4 * 232_965 * 2.6 * 3200 / 8 / 1e9
    assert epoch_s(Layout(1, 8), work(), links) == pytest.approx(1.0 + sent)


def test_free_links_leave_the_bubble() -> None:
    """Equal tasks: computing / P over 1 - (S - 1) / (K + S - 1), ticked or not; chunks that compute longer, longer."""
    for keeps_step in (False, True):
        found = epoch_s(Layout(8), work(), FREE, keeps_step=keeps_step)
        assert found == pytest.approx(1.0 * 39 / 32)
        assert epoch_s(Layout(8), work(chunked=1.5), FREE, keeps_step=keeps_step) == pytest.approx(
            1.5 * 39 / 32
        )
        assert epoch_s(Layout(4, 2), work(), FREE, keeps_step=keeps_step) == pytest.approx(1.0 * 19 / 16)


def test_a_hybrid_s_exchange_stays_on_a_host() -> None:
    far, near = (Links(1e9, 1e30, near, 4) for near in (None, 1e10))
    rows = 2 * 4 * 232_965 * 0.5 * 3200 / 8
    assert epoch_s(Layout(4, 2), work(), far) == pytest.approx((1.0 + rows / 1e9) * 19 / 16)
    assert epoch_s(Layout(4, 2), work(), near) == pytest.approx((1.0 + rows / 1e10) * 19 / 16)


def test_each_shape_wins_somewhere() -> None:
    slow, fast = Links(3e9, 6e9), Links(1e12, 1e12)
    assert choose_shape(8, work(), slow)[0].name == "pipeline"
    assert choose_shape(8, work(), fast)[0].name == "halo"
    near = Links(3e9, 1e8, 1e12, 4)
    assert choose_shape(8, work(), near)[0].name == "hybrid of 2 ways"
    assert [shape.seconds for shape in choose_shape(8, work(), slow)] == sorted(
        shape.seconds for shape in choose_shape(8, work(), slow)
    )


def test_what_does_not_fit_is_left_out() -> None:
    shallow = Work(1000, [16] * 4, 16, 1.0, {2: 0.5, 4: 1.0, 8: 2.0}, num_chunks=8)
    assert {shape.layout.num_stages for shape in choose_shape(8, shallow, FREE)} == {1, 2, 4}
    with pytest.raises(InputError, match="divisors of 8"):
        choose_shape(8, shallow, FREE, ways=[3])
    with pytest.raises(InputError, match="not known"):
        epoch_s(Layout(2, 4), work(), FREE)
