"""Rows that intervals lend each other: who may go on when, what goes to other servers, and that no old row is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("msgspec")

from polyhop.graph import Block
from polyhop.serverless import wire
from polyhop.serverless.epochs import Epochs
from polyhop.serverless.intervals import Interval, Intervals, Reader
from polyhop.serverless.lending import Lending, as_tensor
from polyhop.serverless.tables import StalenessError, Table

PLACE, OTHER = 1, 1  # a graph operation; a server


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def intervals() -> Intervals:
    """Intervals 0 and 1 here, of two rows each; 2 on another server, which reads row 3 and lends one. 0 reads 0, 1 and 2."""
    nothing = Block(ids(0, 0, 0), ids().int(), 2)
    first = Interval(0, 0, 2, nothing, ids(0, 1, 2, 4), ids(0, 0, 1, 2), (0, 1, 2), (Reader(0, ids(0, 1), ids(0, 1)),),
                     {}, {OTHER: ids(3)})  # fmt: skip
    readers = Reader(0, ids(2), ids(0)), Reader(1, ids(0, 1), ids(0, 1)), Reader(2, ids(0), ids(1))
    second = Interval(1, 2, 4, nothing, ids(2, 3), ids(1, 1), (1,), readers, {OTHER: ids(1)}, {})
    return Intervals((first, second), {2: slice(4, 5)}, 3)


class Sent(list[tuple[int, Any, dict[str, Any]]]):
    def __call__(self, server: int, header: Any, arrays: Any) -> None:
        self.append((server, header, dict(arrays)))


def lending(staleness: int | None = None) -> tuple[Lending, Sent]:
    """In the first epoch of a run, 0."""
    epochs, sent = Epochs([0, 1], staleness), Sent()
    epochs.go(0)
    return Lending(intervals(), {PLACE: Table(5, 3, {"m": 1}, torch.float32)}, epochs, sent), sent


def rows(*values: float) -> dict[str, Tensor]:
    return {"m": torch.tensor(values, dtype=torch.float32)[:, None]}


def from_other(lent: Lending, epoch: int, value: float = 9.0) -> None:
    lent.take(wire.Rows(PLACE, 2, epoch, ()), {"m": np.full((1, 1), value, np.float32)})


def test_an_interval_goes_on_once_all_rows_that_it_reads_are_there() -> None:
    lent, sent = lending()
    lent.publish(0, PLACE, 0, rows(1, 2))
    lent.wait(0, PLACE, 0, is_backward=False)
    assert lent.released(PLACE, False) == []
    lent.publish(1, PLACE, 0, rows(3, 4))
    lent.wait(1, PLACE, 0, is_backward=False)
    assert lent.released(PLACE, False) == [1]  # reads its own alone
    assert lent.released(PLACE + 2, False) == lent.released(PLACE, True) == []  # others' places
    from_other(lent, 0)
    assert lent.released(PLACE, False) == [0]
    assert lent.released(PLACE, False) == []  # once
    assert lent.read(0, PLACE, 0).copied("m")[:, 0].tolist() == [1, 2, 3, 9]
    assert lent.ages.seen == {0: 3}
    ((server, header, arrays),) = sent
    assert (server, header) == (OTHER, wire.Rows(PLACE, 1, 0, ()))
    assert arrays["m"].tolist() == [[4.0]]  # of the two rows the one that it reads


def test_old_rows_will_do_within_the_bound() -> None:
    for staleness, released in ((None, []), (0, []), (1, [0])):
        lent, _ = lending(staleness)
        lent.publish(1, PLACE, 0, rows(3, 4))
        from_other(lent, 1)
        lent.publish(0, PLACE, 2, rows(1, 2))
        lent.wait(0, PLACE, 2, is_backward=False)
        assert lent.released(PLACE, False) == released
        assert lent.tags(0, PLACE, False) == [2, 0, 1]


def test_a_read_out_of_bounds_is_an_error() -> None:
    lent, _ = lending(0)
    for number in range(2):
        lent.publish(number, PLACE, 0, rows(1, 2))
    from_other(lent, 0)
    lent.read(0, PLACE, 1)
    with pytest.raises(StalenessError, match="rows of epoch 0 were read in epoch 2"):
        lent.read(0, PLACE, 2)
    with pytest.raises(StalenessError):
        lent.collected(1, PLACE, 0)  # nobody has given anything


def test_gradients_go_to_their_owners_and_are_summed_once_all_readers_gave() -> None:
    lent, sent = lending()
    lent.give(0, PLACE, 0, rows(1, 2, 10, 50))
    assert [(server, header, arrays["m"].tolist()) for server, header, arrays in sent] == [
        (OTHER, wire.Sums(PLACE, 0, 0, ()), [[50.0]])
    ]
    lent.give(1, PLACE, 0, rows(100, 200))
    lent.wait(1, PLACE, 0, is_backward=True)
    assert lent.released(PLACE, True) == []
    given = np.full((1, 1), 1000, np.float32)
    lent.take(wire.Sums(PLACE, 2, 0, ()), {"m": given})
    given[:] = 0.0  # the message's memory, not the table's
    assert lent.released(PLACE, True) == [1]
    assert lent.collected(1, PLACE, 0)["m"][:, 0].tolist() == [110, 1200]
    assert lent.collected(0, PLACE, 0)["m"][:, 0].tolist() == [1, 2]


def test_arrays_of_a_message_are_copied_only_where_they_may_not_be_written_to() -> None:
    array = np.ones(2)
    shared = as_tensor(array)
    array[0] = 5.0
    assert shared.tolist() == [5.0, 1.0]
    array.flags.writeable = False
    own = as_tensor(array)
    own[0] = 7.0
    assert array.tolist() == [5.0, 1.0]
