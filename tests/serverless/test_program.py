"""Programs as values: they travel as plain data, and what makes no sense is refused with words. No torch is loaded."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polyhop.errors import InputError
from polyhop.serverless.program import Call, Program, Row

ROWS = {"x": Row((4,)), "own": Row((3,)), "labels": Row((), "ids")}
WEIGHTS = {"w": (3, 4), "b": (3,), "g": (3,), "o": (3,)}
CALLS = (
    Call("linear", ("x", "w", "b"), ("t",)),
    Call("add", ("t", "own"), ("u",)),
    Call("layer_norm", ("u", "g", "o"), ("n",), {"eps": 1e-3}),
    Call("relu", ("n",), ("h",)),
    Call("cross_entropy", ("h", "labels"), ("loss", "count"), {"scale": 0.25}),
)
PROGRAM = Program(ROWS, WEIGHTS, CALLS, ("loss", "count"))


@pytest.mark.parametrize("module", ["ops", "program", "tiles"])
def test_functions_need_no_torch(module: str) -> None:
    code = f"import sys, json, polyhop.serverless.{module}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout))
    assert f"polyhop.serverless.{module}" in loaded
    ours = {name for name in loaded if name.startswith("polyhop")}
    assert {name.split(".")[0] for name in loaded} & {"torch", "scipy", "safetensors"} == set()
    assert {name.split(".")[1] for name in ours - {"polyhop"}} == {"errors", "serverless"}


def test_round_trip_through_json() -> None:
    assert Program.from_plain(json.loads(json.dumps(PROGRAM.to_plain()))) == PROGRAM


def test_round_trip_through_msgpack() -> None:
    msgpack = pytest.importorskip("msgspec").msgpack
    assert Program.from_plain(msgpack.decode(msgpack.encode(PROGRAM.to_plain()))) == PROGRAM


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"calls": (Call("lineer", ("x", "w"), ("t",)),)}, r"call 0 \(lineer\): unknown op.*'linear'"),
        ({"calls": (*CALLS[:1], Call("lineer", ("x", "w"), ("u",)))}, r"call 1 \(lineer\): unknown op"),
        ({"calls": (Call("linear", ("y", "w"), ("t",)),)}, "unknown value 'y'"),
        ({"calls": (CALLS[1], CALLS[0])}, r"call 0 \(add\): unknown value 't'"),
        ({"calls": (CALLS[0], CALLS[0])}, "'t' is given twice"),
        ({"calls": (Call("linear", ("x", "w"), ("x",)),)}, "'x' is given twice"),
        ({"calls": (Call("linear", ("x", "w"), ("w",)),)}, "'w' is given twice"),
        ({"weights": {**WEIGHTS, "x": (1,)}}, "'x' is given twice, as a row and as a weight"),
        ({"calls": (Call("linear", ("x",), ("t",)),)}, "expected 2 or 3 inputs, got 1"),
        ({"calls": (Call("relu", ("x", "own"), ("t",)),)}, "expected 1 inputs, got 2"),
        ({"calls": (Call("relu", ("x",), ("t", "u")),)}, "expected 1 outputs, got 2"),
        ({"calls": (Call("linear", ("own", "w"), ("t",)),)}, r"weight \[3, 4\] cannot multiply rows of shape \[3\]"),
        ({"calls": (Call("linear", ("x", "w", "w"), ("t",)),)}, r"expected a bias \[3\]"),
        ({"calls": (Call("linear", ("w", "w"), ("t",)),)}, "must be rows"),
        ({"calls": (Call("linear", ("x", "own"), ("t",)),)}, "must be a weight"),
        ({"calls": (Call("add", ("x", "own"), ("t",)),)}, r"call 0 \(add\): expected \[4\] for all inputs"),
        ({"calls": (Call("relu", ("labels",), ("t",)),)}, "must be of kind 'float', it is 'ids'"),
        ({"calls": (*CALLS, Call("relu", ("loss",), ("t",)))}, "'loss' is a sum over rows"),
        ({"calls": (Call("relu", ("x",), ("t",), {"slope": 1.0}),)}, "unknown attr 'slope'"),
        ({"calls": (Call("elu", ("x",), ("t",), {"alpha": "1"}),)}, "alpha='1': expected a float"),
        ({"calls": (Call("elu", ("x",), ("t",), {"alpha": True}),)}, "alpha=True: expected a float"),
        ({"calls": (Call("elu", ("x",), ("t",), {"alpha": float("nan")}),)}, "alpha=nan"),
        ({"calls": (Call("mean_heads", ("x",), ("t",), {"heads": 3}),)}, "4 columns cannot be those of 3 heads"),
        ({"calls": (Call("mean_heads", ("x",), ("t",), {"heads": 0}),)}, "of 0 heads"),
        ({"outputs": ("loss", "hh")}, "outputs: unknown value 'hh'"),
        ({"outputs": ("w",)}, "outputs: unknown value 'w'"),
        ({"outputs": ("loss", "loss")}, "name a value twice"),
        ({"rows": {**ROWS, "x": Row((4,), "floats")}}, "row 'x': unknown kind 'floats'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(PROGRAM, **({"outputs": ()} if "calls" in changed else {}) | changed)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), None, "expected a dict"),
        (("rows",), [], "rows: expected a dict"),
        (("rows", "x"), [[4], "float"], "expected a list of 3"),
        (("rows", "x"), [["4"], "float", False], "expected whole numbers"),
        (("rows", "x"), [[-4], "float", False], "expected whole numbers"),
        (("rows", "x"), [[4], "float", 1], "expected a bool"),
        (("weights", "w"), 3, "shape of 'w': expected a list"),
        (("calls", 0), "linear", "call 0: expected a list"),
        (("calls", 0, 0), 3, "op of call 0: expected a str"),
        (("calls", 0, 1), ["x", 3], "inputs of call 0: expected a str"),
        (("calls", 2, 3), [], "attrs of call 2: expected a dict"),
        (("outputs",), "loss", "outputs: expected a list"),
        (("more",), 1, "expected the fields"),
    ],
)
def test_what_came_damaged_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    plain: Any = copy.deepcopy(PROGRAM.to_plain())
    if not path:
        plain = value
    else:
        at = plain
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
    with pytest.raises(InputError, match=message):
        Program.from_plain(plain)


def test_what_is_saved_has_names_and_sizes() -> None:
    """The norm needs its input, mean and deviation; the relu its output; the loss probabilities. The products need rows."""
    assert PROGRAM.saved_shapes(7, np.float64) == {
        "u": ((7, 3), np.float64),
        "n.mean": ((7,), np.float64),
        "n.rstd": ((7,), np.float64),
        "h": ((7, 3), np.float64),
        "loss.p": ((7, 3), np.float64),
    }
    assert [call.op for call in PROGRAM.recomputed] == [call.op for call in CALLS]


def test_nothing_is_saved_or_made_again_for_one_product() -> None:
    program = Program({"x": Row((4,))}, {"w": (3, 4)}, (Call("linear", ("x", "w"), ("t",)),), ("t",))
    assert program.saved_shapes(5) == {}
    assert program.recomputed == ()
    assert program.flops(10) == 10 * 2 * 12
    assert program.backward_flops(10) == 2 * 10 * 2 * 12
    fixed = replace(program, rows={"x": Row((4,), is_fixed=True)})
    assert fixed.backward_flops(10) == 10 * 2 * 12  # no gradient of x


def test_last_calls_are_not_made_again() -> None:
    calls = (
        Call("relu", ("x",), ("h",)),
        Call("linear", ("h", "w"), ("t",)),
        Call("bias", ("t", "b"), ("y",)),
    )
    program = Program({"x": Row((4,))}, {"w": (3, 4), "b": (3,)}, calls, ("y",))
    assert program.saved_names == ("h",)
    assert program.recomputed == calls[:1]
    assert program.backward_flops(1) - program.backward_flops(1, recomputes=False) == 4


def test_bytes() -> None:
    traffic = PROGRAM.traffic(10, np.float32)
    assert traffic.rows == 10 * (4 * 4 + 4 * 3 + 8)
    assert traffic.weights == traffic.weight_grads == 4 * (12 + 3 + 3 + 3)
    assert traffic.outputs == 4 + 8
    assert traffic.saved == 10 * 4 * (3 + 1 + 1 + 3 + 3)
    assert traffic.row_grads == 10 * 4 * (4 + 3)
    shown = replace(PROGRAM, outputs=("loss", "count", "h")).traffic(10, np.float32)
    assert shown.outputs == 4 + 8 + 120
    assert shown.saved == traffic.saved - 120  # h leaves once
    sparse = Program(
        {"x": Row((100,), "sparse")}, {"w": (3, 100)}, (Call("sparse_linear", ("x", "w"), ("t",)),), ("t",)
    )
    assert sparse.traffic(10, np.float32, num_set=5).rows == 10 * (5 * 8 + 8)
    assert sparse.flops(10, num_set=5) == 10 * 2 * 15
