"""Columns of epochs keep sums, means and maxima while rows are merged."""

from __future__ import annotations

import numpy as np
import pytest

from polyhop.report.traces.epochs import EpochTable


def test_a_row_for_every_epoch_at_first() -> None:
    table = EpochTable(max_rows=8)
    for epoch in (1, 2, 3):
        table.add(epoch, {"s": epoch * 10.0, ("own", "x"): 1.0})
    assert (table.num_rows, table.width, table.last_epochs()) == (3, 1, [1, 2, 3])
    assert table.values("s").tolist() == [10.0, 20.0, 30.0]
    assert table.mean("s") == 20.0
    assert table.values("unknown").tolist() == [0.0, 0.0, 0.0]


def test_many_epochs_share_rows() -> None:
    table = EpochTable(max_rows=8)
    for epoch in range(1, 101):
        table.add(epoch, {"s": float(epoch)})
    assert table.width == 16
    assert table.num_rows == 7
    assert table.means("s")[0] == pytest.approx(np.mean(range(1, 17)))
    assert table.values("s").sum() == sum(range(1, 101))
    assert table.mean("s") == pytest.approx(50.5)


def test_maxima_stay_maxima() -> None:
    table = EpochTable(np.maximum, max_rows=4)
    for epoch in range(1, 17):
        table.add(epoch, {"peak": float(epoch % 5)})
    assert table.values("peak").tolist() == [4.0, 3.0, 4.0, 4.0]


def test_epochs_that_are_missing_are_not_zero() -> None:
    table = EpochTable(max_rows=8)
    table.add(3, {"s": 6.0})
    means = table.means("s")
    assert np.isnan(means[:2]).all()
    assert means[2] == 6.0
    assert table.mean("s") == 6.0


def test_an_epoch_that_was_trained_again_counts_twice() -> None:
    table = EpochTable(max_rows=8)
    table.add(1, {"s": 1.0})
    table.add(1, {"s": 3.0})
    assert table.means("s").tolist() == [2.0]
