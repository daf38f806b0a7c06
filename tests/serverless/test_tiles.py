"""Programs run: against torch; the same bits however rows arrive, saved or computed again, at once or fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from polyhop.errors import InputError
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.ragged import Ragged
from polyhop.serverless.tiles import TILE, backward, forward, loss_and_backward

HIDDEN = Program(
    {"z": Row((6,)), "own": Row((6,)), "words": Row((9,), "sparse")},
    {"w": (5, 6), "r": (5, 6), "b": (5,), "s": (5, 9), "g": (5,), "o": (5,), "v": (4, 5)},
    (
        Call("linear", ("z", "w", "b"), ("t",)),
        Call("linear", ("own", "r"), ("u",)),
        Call("add", ("t", "u"), ("a",)),
        Call("sparse_linear", ("words", "s"), ("c",)),
        Call("add", ("a", "c"), ("d",)),
        Call("layer_norm", ("d", "g", "o"), ("n",)),
        Call("elu", ("n",), ("e",)),
        Call("normalize", ("e",), ("h",)),
        Call("linear", ("h", "v"), ("m",)),
    ),
    ("h", "m"),
)
LAST = Program(
    {"z": Row((6,)), "labels": Row((), "ids")},
    {"w": (4, 6), "b": (4,)},
    (
        Call("relu", ("z",), ("h",)),
        Call("linear", ("h", "w", "b"), ("logits",)),
        Call("cross_entropy", ("logits", "labels"), ("loss", "count"), {"scale": 0.1}),
    ),
    ("loss", "count", "logits"),
)


def random_of(program: Program, n: int, dtype: Any = np.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(n)
    rows: dict[str, Any] = {}
    for name, row in program.rows.items():
        if row.kind == "sparse":
            counts = rng.integers(0, 5, n)
            indptr = np.concatenate([[0], np.cumsum(counts)])
            total = int(indptr[-1])
            values = rng.standard_normal(total).astype(dtype)
            rows[name] = Ragged(indptr, rng.integers(0, row.shape[0], total), values, row.shape[0])
        elif row.kind == "ids":
            rows[name] = rng.integers(-1, 4, n)
        else:
            rows[name] = rng.standard_normal((n, *row.shape)).astype(dtype)
    return rows, {name: rng.standard_normal(shape).astype(dtype) for name, shape in program.weights.items()}


def blocks(rows: Mapping[str, Any], cuts: list[int]) -> Iterator[dict[str, Any]]:
    """The rows cut at the given places; copies, as they come off a socket."""
    n = next(iter(rows.values())).shape[0]
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    for start, stop in pairwise(edges):
        part = {name: array[start:stop] for name, array in rows.items()}
        yield {name: array if isinstance(array, Ragged) else array.copy() for name, array in part.items()}


def same(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        assert array.shape == theirs[name].shape, name
        assert array.tobytes() == theirs[name].tobytes(), name


def grads_of(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(array.shape).astype(array.dtype) for name, array in outputs.items()}


@given(
    n=st.integers(0, 70), tile=st.sampled_from([1, 7, 16, 100]), cuts=st.lists(st.integers(0, 70), max_size=6)
)
@settings(max_examples=60, deadline=None)
def test_bits_do_not_depend_on_how_rows_arrive(n: int, tile: int, cuts: list[int]) -> None:
    rows, weights = random_of(HIDDEN, n)
    outputs, saved = forward(HIDDEN, rows, weights, tile, keeps=True)
    arrived, kept = forward(HIDDEN, blocks(rows, cuts), weights, tile, num_rows=n, keeps=True)
    same(arrived, outputs)
    same(kept, saved)
    grads = grads_of(outputs)
    found = backward(HIDDEN, rows, weights, grads, tile)
    for row_grads, weight_grads in (
        backward(HIDDEN, rows, weights, grads, tile, saved=saved),
        backward(HIDDEN, blocks(rows, cuts), weights, blocks(grads, cuts[1:]), tile, num_rows=n),
        backward(HIDDEN, blocks(rows, cuts), weights, grads, tile, num_rows=n, saved=blocks(saved, cuts[2:])),
    ):
        same(row_grads, found[0])
        same(weight_grads, found[1])


@given(n=st.integers(0, 40), tile=st.sampled_from([1, 7, 100]), cuts=st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=40, deadline=None)
def test_fused_loss_has_the_bits_of_two_passes(n: int, tile: int, cuts: list[int]) -> None:
    rows, weights = random_of(LAST, n)
    outputs, saved = forward(LAST, rows, weights, tile, keeps=True)
    one = {"loss": np.ones(())}
    fused = loss_and_backward(LAST, blocks(rows, cuts), weights, tile, num_rows=n)
    same(fused[0], outputs)
    for kept in (None, saved):
        apart = backward(LAST, rows, weights, one, tile, saved=kept)
        same(fused[1], apart[0])
        same(fused[2], apart[1])


@pytest.mark.parametrize("tile", [3, TILE])
def test_program_is_torchs(tile: int) -> None:
    rows, weights = random_of(HIDDEN, 23, np.float64)
    outputs, _ = forward(HIDDEN, rows, weights, tile)
    grads = grads_of(outputs)
    row_grads, weight_grads = backward(HIDDEN, rows, weights, grads, tile)
    w = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}
    x = {name: torch.tensor(rows[name], requires_grad=True) for name in ("z", "own")}
    words = torch.zeros(23, 9, dtype=torch.float64)
    ragged = rows["words"]
    at = np.repeat(np.arange(23), np.diff(ragged.indptr))
    words.index_put_(
        (torch.tensor(at), torch.tensor(ragged.indices)), torch.tensor(ragged.values), accumulate=True
    )
    d = F.linear(x["z"], w["w"], w["b"]) + F.linear(x["own"], w["r"]) + F.linear(words, w["s"])
    h = F.normalize(F.elu(F.layer_norm(d, (5,), w["g"], w["o"])), dim=-1)
    torch.autograd.backward([h, F.linear(h, w["v"])], [torch.tensor(grads["h"]), torch.tensor(grads["m"])])
    np.testing.assert_allclose(outputs["h"], h.detach().numpy(), rtol=1e-12, atol=1e-13)
    assert row_grads.keys() == x.keys()
    assert weight_grads.keys() == w.keys()
    for name, leaf in [*x.items(), *w.items()]:
        assert leaf.grad is not None
        np.testing.assert_allclose(
            {**row_grads, **weight_grads}[name], leaf.grad.numpy(), rtol=1e-10, atol=1e-12
        )


def test_tiles_are_computed_while_later_rows_are_on_their_way() -> None:
    seen: list[str] = []
    program = Program({"x": Row((2,))}, {}, (Call("relu", ("x",), ("h",)),), ("h",))
    real = program.calls[0].what

    def told(inputs: Any, attrs: Any) -> Any:
        seen.append(f"tile of {inputs[0].shape[0]}")
        return real.forward(inputs, attrs)

    program.calls[0].__dict__["what"] = replace(real, forward=told)

    def arriving() -> Iterator[dict[str, Any]]:
        for count in (3, 3, 2, 1):
            seen.append(f"block of {count}")
            yield {"x": np.ones((count, 2))}

    forward(program, arriving(), {}, 4, num_rows=9)
    blocks_and_tiles = [
        "block of 3",
        "block of 3",
        "tile of 4",
        "block of 2",
        "tile of 4",
        "block of 1",
        "tile of 1",
    ]
    assert seen == blocks_and_tiles


def test_fixed_rows_get_no_gradient_and_missing_ones_count_as_zero() -> None:
    rows, weights = random_of(HIDDEN, 9)
    fixed = replace(HIDDEN, rows={**HIDDEN.rows, "own": Row((6,), is_fixed=True)})
    outputs, _ = forward(HIDDEN, rows, weights)
    only = {"m": grads_of(outputs)["m"]}
    zero = only | {"h": np.zeros_like(outputs["h"])}
    row_grads, weight_grads = backward(fixed, rows, weights, only)
    assert row_grads.keys() == {"z"}
    expected = backward(HIDDEN, rows, weights, zero)
    np.testing.assert_array_equal(row_grads["z"], expected[0]["z"])
    same(weight_grads, expected[1])


def test_gradients_of_some_outputs_may_come_in_blocks() -> None:
    rows, weights = random_of(HIDDEN, 19)
    only = {"m": grads_of(forward(HIDDEN, rows, weights)[0])["m"]}
    expected = backward(HIDDEN, rows, weights, only, 4)
    found = backward(
        HIDDEN, blocks(rows, [5, 8]), weights, blocks(only, [8]), 4, num_rows=19, grad_names=("m",)
    )
    same(found[0], expected[0])
    same(found[1], expected[1])
    with pytest.raises(InputError, match=r"a block has \['m'\], expected \['h', 'm'\]"):
        backward(HIDDEN, blocks(rows, []), weights, blocks(only, []), 4, num_rows=19)


def test_results_share_no_memory() -> None:
    """What a caller adds in place to one result must not change another, nor what it gave."""
    program = Program({"a": Row((2,)), "b": Row((2,))}, {}, (Call("add", ("a", "b"), ("c",)),), ("c", "a"))
    rows = {"a": np.ones((3, 2)), "b": np.ones((3, 2))}
    outputs, _ = forward(program, rows, {})
    grads = {"c": np.ones((3, 2))}
    found, _ = backward(program, rows, {}, grads)
    arrays = [*rows.values(), *outputs.values(), *grads.values(), *found.values()]
    for at, one in enumerate(arrays):
        assert not any(np.shares_memory(one, other) for other in arrays[at + 1 :])


def test_unused_weight_has_a_zero_gradient() -> None:
    program = Program(
        {"x": Row((2,))}, {"w": (3, 2), "u": (1, 2)}, (Call("linear", ("x", "w"), ("y",)),), ("y",)
    )
    weights = {"w": np.ones((3, 2)), "u": np.ones((1, 2)), "more": np.ones(1)}
    _, found = backward(program, {"x": np.ones((4, 2))}, weights, {"y": np.ones((4, 3))})
    assert found.keys() == {"w", "u"}
    np.testing.assert_array_equal(found["u"], np.zeros((1, 2)))


def test_attention_weights_of_all_edges_at_once() -> None:
    """An op on edges runs whole, also where tiles would be smaller."""
    kinds = {"indptr": Row((), "ids"), "indices": Row((), "ids"), "src": Row((2,)), "dst": Row((2,))}
    program = Program(kinds, {}, (Call("edge_softmax", tuple(kinds), ("weights",)),), ("weights",))
    rng = np.random.default_rng(1)
    rows = {
        "indptr": np.array([0, 2, 2, 5]),
        "indices": np.array([0, 3, 1, 2, 3]),
        "src": rng.standard_normal((4, 2)),
        "dst": rng.standard_normal((3, 2)),
    }
    outputs, saved = forward(program, rows, {}, 1, keeps=True)
    np.testing.assert_allclose(np.add.reduceat(outputs["weights"], [0, 2]), 1, rtol=1e-12)
    grads = {"weights": rng.standard_normal((5, 2))}
    again, kept = backward(program, rows, {}, grads, 1), backward(program, rows, {}, grads, 1, saved=saved)
    assert again[0].keys() == {"src", "dst"}
    same(again[0], kept[0])
    with pytest.raises(InputError, match="all rows at once"):
        forward(program, [rows], {}, num_rows=3)
    with pytest.raises(InputError, match="depends on the edges"):
        program.saved_shapes(3)


def test_what_does_not_fit_is_refused() -> None:
    rows, weights = random_of(LAST, 5)
    with pytest.raises(InputError, match="'labels' is missing"):
        forward(LAST, {"z": rows["z"]}, weights)
    with pytest.raises(InputError, match="weight 'b' is missing"):
        forward(LAST, rows, {"w": weights["w"]})
    with pytest.raises(InputError, match=r"weight 'w': expected \[4, 6\], got \[6, 4\]"):
        forward(LAST, rows, {**weights, "w": weights["w"].T})
    with pytest.raises(InputError, match="expected 5 rows of 'labels', got 4"):
        forward(LAST, {**rows, "labels": rows["labels"][:4]}, weights)
    with pytest.raises(InputError, match="'z' is float64, weights are float32"):
        forward(LAST, {**rows, "z": rows["z"].astype(float)}, weights)
    with pytest.raises(InputError, match="weights are float32, float64"):
        forward(LAST, rows, {**weights, "b": weights["b"].astype(float)})
    with pytest.raises(InputError, match="'labels': expected ids, got float32"):
        forward(LAST, {**rows, "labels": rows["labels"].astype(np.float32)}, weights)
    with pytest.raises(InputError, match=r"'z': expected float \['n', 6\], got ndarray \[5, 3\]"):
        forward(LAST, {**rows, "z": rows["z"][:, :3]}, weights)
    with pytest.raises(InputError, match="num_rows is needed"):
        forward(LAST, blocks(rows, [2]), weights)
    with pytest.raises(InputError, match="expected 6 rows in at least one block, 5 arrived"):
        forward(LAST, blocks(rows, [2]), weights, num_rows=6)
    with pytest.raises(InputError, match=r"a block has \['z'\]"):
        forward(LAST, [{"z": rows["z"]}], weights, num_rows=5)
    with pytest.raises(InputError, match="unknown output 'h'"):
        backward(LAST, rows, weights, {"h": np.ones((5, 4))})
    with pytest.raises(InputError, match=r"'loss\.p' is missing"):
        backward(LAST, rows, weights, {"loss": np.ones(())}, saved={"h": rows["z"]})
    with pytest.raises(InputError, match="expected a loss as its first output"):
        loss_and_backward(replace(LAST, outputs=("logits",)), rows, weights)
    with pytest.raises(InputError, match="tile=0"):
        forward(LAST, rows, weights, 0)
