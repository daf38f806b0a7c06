"""Softmax over the in-edges of each destination, for attention that functions compute: forward and gradient in numpy alone.

Legend: n destinations, s sources, E edges, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from polyhop.errors import InputError

__all__ = ["edge_softmax", "edge_softmax_gradient", "edge_softmax_shapes"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def edge_softmax_shapes(
    shapes: Sequence[tuple[int, ...]], attrs: Mapping[str, Any]
) -> tuple[tuple[int, ...], ...]:
    """Of one edge."""
    indptr, indices, src, dst = shapes
    if indptr != () or indices != () or len(src) != 1 or src != dst:
        raise InputError(
            "expected indptr [n + 1], indices [E] and scores [s, H], [n, H], got rows of "
            + ", ".join(str(list(shape)) for shape in shapes)
        )
    return (src,)


def edge_softmax(
    inputs: Sequence[Array], attrs: Mapping[str, Any]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Attention weights [E, H], or [E + n, H] with ``self_loop``: those of added loops follow those of the edges.

    Inputs: indptr [n + 1], indices [E], a_src [s, H], a_dst [n, H]. With ``self_loop`` destination i has one edge from
    source row ``dst_start`` + i, and stored loops weigh 0. ``slope`` is that of the leaky relu on scores.
    """
    edges = _Edges(inputs, attrs)
    score = edges.scores()
    score = np.where(score > 0, score, score * score.dtype.type(attrs["slope"]))
    top = edges.reduced(np.maximum, score, -np.inf)
    power = np.exp(score - top[edges.dst])
    total = edges.reduced(np.add, power, 0)
    out = np.zeros((edges.num_out, score.shape[1]), score.dtype)
    out[edges.at] = power / total[edges.dst]
    return (out,), (out,)


def edge_softmax_gradient(
    grads: Sequence[Array | None],
    saved: Sequence[Array],
    inputs: Sequence[Array],
    attrs: Mapping[str, Any],
    wanted: Sequence[bool],
) -> Sequence[Array | None]:
    """None for the edges, [s, H] for the sources' scores, [n, H] for the destinations'."""
    edges, grad = _Edges(inputs, attrs), grads[0]
    assert grad is not None
    weight, flow = saved[0][edges.at], grad[edges.at]
    mean = edges.reduced(np.add, weight * flow, 0)
    score = edges.scores()
    back = weight * (flow - mean[edges.dst])
    back = np.where(score > 0, back, back * back.dtype.type(attrs["slope"]))
    src = np.zeros_like(inputs[2])
    np.add.at(src, edges.src, back)
    return [None, None, src, edges.reduced(np.add, back, 0)]


class _Edges:
    """The edges that count, grouped by destination, added loops last in each group. ``at``: their place in the output."""

    def __init__(self, inputs: Sequence[Array], attrs: Mapping[str, Any]) -> None:
        indptr, indices, self._a_src, self._a_dst = inputs
        num_dst, num_edges, num_src = indptr.size - 1, indices.size, self._a_src.shape[0]
        self._num_dst = num_dst
        if indptr[0] != 0 or indptr[-1] != num_edges or self._a_dst.shape[0] != num_dst:
            raise InputError(
                f"edge_softmax: indptr [{indptr.size}] ends at {indptr[-1]}, there are {num_edges} edges and "
                f"{self._a_dst.shape[0]} destinations"
            )
        if num_edges and not (indices.min() >= 0 and indices.max() < num_src):
            raise InputError(
                f"edge_softmax: edges read sources {indices.min()}..{indices.max()} of 0..{num_src - 1}"
            )
        dst = np.repeat(np.arange(num_dst), np.diff(indptr))
        src, at = indices.astype(np.int64), np.arange(num_edges)
        self.num_out = num_edges
        if attrs["self_loop"]:
            own = np.arange(num_dst)
            start = attrs["dst_start"]
            if not 0 <= start <= num_src - num_dst:
                raise InputError(
                    f"edge_softmax: destinations {start}..{start + num_dst} exceed {num_src} sources"
                )
            kept = src != dst + start
            src, dst = np.concatenate([src[kept], own + start]), np.concatenate([dst[kept], own])
            at = np.concatenate([at[kept], num_edges + own])
            order = np.argsort(dst, kind="stable")
            src, dst, at = src[order], dst[order], at[order]
            self.num_out += num_dst
        self.src, self.dst, self.at = src, dst, at
        self._starts = np.flatnonzero(np.diff(dst, prepend=-1))
        self._owners = dst[self._starts]

    def scores(self) -> Array:
        found: Array = self._a_src[self.src] + self._a_dst[self.dst]
        return found

    def reduced(self, how: np.ufunc, values: Array, none: float) -> Array:
        """[n, H]: over the edges of each destination; ``none`` where it has none."""
        out = np.full((self._num_dst, values.shape[1]), none, values.dtype)
        if self._starts.size:
            out[self._owners] = how.reduceat(values, self._starts, axis=0)
        return out
