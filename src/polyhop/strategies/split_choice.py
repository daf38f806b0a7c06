"""Which strategy, and how deep a split, is expected to take least time: arithmetic on what a step asks of every rank.

Sampling and loading run ahead in a thread of their own, beside training. Of rank r, with c ranks to a core:

    ahead_r   rounds * latency + bytes / bandwidth + max(1, c) * CPU of nodes, edges, rows, messages and their bytes
    train_r   rounds * latency + bytes / bandwidth + max(1, c) * CPU of aggregated values, products, messages
    step      the largest of
                  max_r ahead_r, max_r train_r         whichever is slower sets the pace; ranks wait for the slowest
                  max_r bytes of both / bandwidth      both use one link; sent or received, whichever is more
                  c * mean_r CPU of both               both use the same cores, where there are fewer than threads
              or max_r ahead_r + max_r train_r where nothing runs ahead

All strategies here train the same mini-batches to the same weights, to rounding; fewer bits are approximate and are looked
at only where the user allows them.

Legend: P ranks, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polyhop.comm import Cost
from polyhop.plan import Law
from polyhop.strategies.flows import Flows
from polyhop.strategies.shape import Shape
from polyhop.strategies.work import Variant, Work, work_of

__all__ = [
    "Ranked",
    "Rates",
    "Seconds",
    "expected",
    "rank_strategies",
    "ranked",
    "reason",
    "seconds",
    "variants",
]


@dataclass(frozen=True)
class Rates:
    """What ranks can do in a second; the same on all of them."""

    bytes_per_s: float  # that a rank sends, and receives, while all do
    latency_s: float  # of a round of messages between all ranks
    gather_bytes_per_s: float  # of input rows read and put together, on one core
    law: Law  # of computing, on one core
    node_s: float  # to sample: of a node that is asked for, looked up, renumbered
    edge_s: float  # of a drawn edge
    message_s: float  # CPU of a message, at both ends
    byte_s: float  # CPU of a byte, at both ends
    crowding: float = 0.0  # ranks to a core
    is_overlapped: bool = True  # loading runs ahead of training

    @property
    def is_sharing(self) -> bool:
        """Whether the two threads of a rank compete for cores."""
        return self.crowding > 0.5


@dataclass(frozen=True)
class Seconds:
    """Of a step, and of what it is made of."""

    step: float
    ahead: float  # the slowest rank's sampling and loading, with nothing beside it
    train: float
    link: float  # the busiest rank's bytes
    compute: float  # of the cores that ranks share; 0 where each thread has its own


def seconds(works: Sequence[Work], rates: Rates) -> Seconds:
    """``works``: of every rank."""
    crowd = max(1.0, rates.crowding)
    ahead_cpu = [_ahead_cpu(work, rates) for work in works]
    train_cpu = [_train_cpu(work, rates) for work in works]
    ahead_bytes = _crossing([work.ahead_to for work in works])
    train_bytes = _crossing([work.train_to for work in works])
    ahead = train = link = compute = 0.0
    for r, work in enumerate(works):
        ahead = max(ahead, _wire(work.ahead.rounds, ahead_bytes[r], rates) + crowd * ahead_cpu[r])
        train = max(train, _wire(work.train.rounds, train_bytes[r], rates) + crowd * train_cpu[r])
        link = max(link, (ahead_bytes[r] + train_bytes[r]) / rates.bytes_per_s)
    if rates.is_sharing:
        compute = rates.crowding * (sum(ahead_cpu) + sum(train_cpu)) / len(works)
    step = max(ahead, train, link, compute) if rates.is_overlapped else ahead + train
    return Seconds(step, ahead, train, link, compute)


def _crossing(sent: Sequence[Sequence[float]]) -> list[float]:
    """Bytes on each rank's link: sent or received, whichever is more. ``sent[r][q]``: from rank r to rank q."""
    return [max(sum(own), sum(each[r] for each in sent)) for r, own in enumerate(sent)]


def _wire(rounds: float, num_bytes: float, rates: Rates) -> float:
    return rounds * rates.latency_s + num_bytes / rates.bytes_per_s


def _messages_cpu(cost: Cost, rates: Rates) -> float:
    return cost.total_messages * rates.message_s + cost.total_bytes * rates.byte_s


def _ahead_cpu(work: Work, rates: Rates) -> float:
    sampled = work.nodes * rates.node_s + work.drawn * rates.edge_s
    return sampled + work.loaded_bytes / rates.gather_bytes_per_s + _messages_cpu(work.ahead, rates)


def _train_cpu(work: Work, rates: Rates) -> float:
    return rates.law.seconds(work.counts) + _messages_cpu(work.train, rates)


# Ranking


@dataclass(frozen=True)
class Ranked:
    """A variant and the time that it is expected to take."""

    variant: Variant
    seconds: Seconds


def variants(
    num_layers: int,
    *,
    has_cache: bool = False,
    must_copy: bool = False,
    by_columns: bool = True,
    bits: Iterable[int] = (32,),
    strategies: Sequence[str] = ("data", "split", "pushpull"),
) -> list[Variant]:
    """Ways to train, the plainest first.

    ``has_cache``: there is memory for rows of others, which ``split`` uses if it ``must_copy``, else where that is faster
    (copies are mapped by every reader). ``by_columns``: the model's first layer can be computed by columns. ``bits``: of
    values between layers, fewer than 32 being approximate.
    """
    found = []
    if "data" in strategies:
        found.append(Variant("data"))
        found += [Variant("data", has_cache=True)] if has_cache else []
    if "split" in strategies:
        ways = ((True,) if must_copy else (False, True)) if has_cache else (False,)
        depths = range(num_layers, 0, -1)
        found += [Variant("split", k, copies, width) for width in bits for copies in ways for k in depths]
    if "pushpull" in strategies and by_columns:
        found.append(Variant("pushpull"))
    return found


def expected(
    flows: Flows, shape: Shape, among: Iterable[Variant]
) -> dict[Variant, list[Work]]:  # fmt: skip
    """What a step of each variant asks of every rank; of one, where all are alike."""
    return {each: [work_of(flows, shape, each, rank) for rank in flows.ranks] for each in among}


def ranked(works: Mapping[Variant, Sequence[Work]], rates: Rates) -> list[Ranked]:
    """The fastest first; of equals, in the order given."""
    timed = [Ranked(variant, seconds(each, rates)) for variant, each in works.items()]
    return sorted(timed, key=lambda each: each.seconds.step)


def rank_strategies(
    flows: Flows,
    shape: Shape,
    rates: Rates,
    *,
    has_cache: bool = False,
    must_copy: bool = False,
    bits: Iterable[int] = (32,),
    strategies: Sequence[str] = ("data", "split", "pushpull"),
) -> list[Ranked]:
    """All ways to train such mini-batches, the fastest first (see ``variants``)."""
    among = variants(
        flows.num_hops,
        has_cache=has_cache,
        must_copy=must_copy,
        by_columns=shape.push is not None,
        bits=bits,
        strategies=strategies,
    )
    return ranked(expected(flows, shape, among), rates)


def reason(order: Sequence[Ranked], most: int = 4) -> str:
    """One line for the user: the first of the order, and what some of the others would take."""
    best, *others = order
    told = [f"{_name(best.variant)}: {_time(best.seconds.step)} a step expected, {_bound(best.seconds)}"]
    seen, listed = {best.variant.strategy}, list[Ranked]()
    for each in others:  # of every other strategy the best first, then the rest
        if each.variant.strategy not in seen:
            seen.add(each.variant.strategy)
            listed.append(each)
    listed += [each for each in others if each not in listed]
    if listed:
        told.append(", ".join(f"{each.variant} {_time(each.seconds.step)}" for each in listed[:most]))
    return "; ".join(told)


def _name(variant: Variant) -> str:
    if variant.strategy != "split":
        return str(variant)
    layers = "the layer" if variant.depth == 1 else f"the {variant.depth} layers"
    said = f"split {layers} nearest the inputs"
    said += ", with copies" if variant.has_cache else ""
    return said if variant.bits == 32 else f"{said}, in {variant.bits} bits"


def _bound(found: Seconds) -> str:
    """What sets the pace."""
    slow = {
        found.compute: "the cores are busy",
        found.link: "the links are busy",
        found.train: "training is slower than loading",
        found.ahead: "loading is slower than training",
    }
    return slow[max(slow)]


def _time(value: float) -> str:
    if value >= 1:
        return f"{value:.1f} s"
    return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
