"""What macrobatches send: accounted from realised windows, estimated from inclusion probabilities.

A window of k mini-batches is sampled in the messages of one, and fetches each remote row that the pool lacks once:

    ids        sum_h sum_q varint(pairs (mini-batch, node) asked of q)  +  sum_h sum_r (pairs + 4 E_hr)  +  rows asked for
    features   sum_r n_r (4 F + 8),   n_r rows that rank r asks for: U(k), the union, minus what its pool holds
    sizes      8 (P - 1) for each message whose length only its sender knows, and 32 (P - 1) to agree how many steps fit
    gradients  those of ``data``, k times

Legend: N nodes, P ranks, k mini-batches of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyhop.comm import Cost
from polyhop.exchange import RowFormat
from polyhop.sample import MiniBatch
from polyhop.sample.wire import Wire
from polyhop.strategies.data_cost import (
    Facts,
    account_gradients,
    account_hops,
    account_rows,
    estimate_hops,
    estimate_rows,
)

__all__ = ["AGREEMENT_BYTES", "account", "agreement", "estimate"]

AGREEMENT_BYTES = 32  # to each peer, for each window


def account(
    windows: Sequence[Sequence[MiniBatch]],
    fetched: Sequence[Tensor],
    new_ids: Tensor,
    bounds: Tensor,
    wire: Wire,
    layout: RowFormat,
    num_neighbors: Sequence[int],
    rank: int,
    *,
    row_lengths: Tensor | None = None,
) -> Cost:
    """What ``rank`` sends to sample and load one window, to the byte; gradients apart (``account_gradients``).

    ``windows[r]`` are rank r's mini-batches, by the user's ids; ``fetched[r]`` int64: the new ids that it fetches: the
    union of their input nodes, minus those it reads in place and those its pool holds.
    """
    sampled = account_hops(windows, new_ids, bounds, wire, num_neighbors, rank)
    loaded = account_rows(fetched, new_ids, bounds, wire, layout, rank, row_lengths=row_lengths)
    return sampled + agreement(len(windows)) + loaded


def agreement(num_ranks: int) -> Cost:
    """Every rank tells every other how many steps fit its pool."""
    peers = num_ranks - 1
    return Cost({"sizes": AGREEMENT_BYTES * peers}, {"sizes": peers}) if peers else Cost()


def estimate(facts: Facts, rank: int, size: int, *, is_delta: bool = True) -> Cost:
    """What ``rank`` is expected to send in a window of ``size`` steps, gradients included.

    ``is_delta``: the pool has room for two windows, and one went before.
    """
    missed = [(1 - of[-1]) ** size for of in facts.likely]  # by a whole window
    fetched = [(1 - each) * (each if is_delta else 1) for each in missed]
    if facts.cached is not None:
        fetched = [each * ~kept for each, kept in zip(fetched, facts.cached, strict=True)]
    gradients = account_gradients(facts.bucket_sizes, facts.value_bytes, len(facts.likely), rank)
    loaded = (
        estimate_hops(facts, rank, size) + agreement(len(facts.likely)) + estimate_rows(facts, fetched, rank)
    )
    return loaded + gradients * size
