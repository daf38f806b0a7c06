"""What an interval has so far: rows as they travel, gradients beside each other."""

from __future__ import annotations

import numpy as np
import torch

from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.segments import Dense
from polyhop.serverless.states import State

PIECE = Dense(
    Program({"x": Row((2,)), "y": Row((2,))}, {}, (Call("add", ("x", "y"), ("z",)),), ("z",)),
)


def test_rows_of_a_piece_travel_as_arrays_without_a_copy() -> None:
    x, y = torch.ones(3, 2), np.ones((3, 2), np.float32)
    state = State(4, values={"x": x, "y": y, "other": None})
    rows = state.rows(PIECE)
    assert list(rows) == ["x", "y"]
    assert rows["y"] is y
    x[0] = 7.0
    assert rows["x"][0, 0] == 7.0


def test_gradients_are_added_without_writing_to_any() -> None:
    state, first, second = State(), torch.ones(2), torch.full((2,), 2.0)
    state.add_grad("x", first)
    assert state.grads["x"] is first
    state.add_grad("x", second)
    assert state.grads["x"].tolist() == [3.0, 3.0]
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])
