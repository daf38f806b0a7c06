"""How many mini-batches make a window: predicted from facts, decided by time within memory, told in one line.

With k mini-batches to a window, nb to an epoch, U(m) distinct rows of m mini-batches (``sample/reuse.py``):

    load(k)     rounds * latency + (k structure + sent new(k) row) / bandwidth + CPU of a window, k batches, new(k) rows;
                sent: of the rows those of other ranks
    new(k)      U(m + k) - U(m), the pool holding the rows of the last m mini-batches: U(m) = its slots, once it is full
    train(k)    k (compute + gradients)
    period(k)   what a window takes while the next one loads: the larger of train and load; never less than the bytes of
                both on the link, or, where loading and training share a processor, the computing of both
    epoch       nb / k periods; the run besides loads its first window, and trains its last, with nothing beside it
    memory(k)   rows of two windows + blocks of two windows + rows on their way in and out

The choice is the smallest k whose epoch is within 3 % of the best that fits: smaller windows start sooner and leave more
memory to the pool. The pool gets all memory that is left, up to every row that the run can ask for.

Legend: k mini-batches of a window, nb of an epoch, U distinct rows, P ranks, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch

from polyhop.comm import Collective
from polyhop.errors import ConfigError
from polyhop.sample.reuse import Reuse

__all__ = [
    "Choice",
    "Facts",
    "Measured",
    "candidates",
    "choice_of",
    "choose",
    "fits",
    "memory",
    "revise",
    "room",
    "rows",
    "seconds",
    "sent_share",
    "slots",
]

_NEAR = 1.03  # times the best time: as good
_SPREAD = 1.1  # of a window's rows over their expectation, and of predictions over what comes
_TRUST = 64.0  # a link is revised by no more than this at once


@dataclass(frozen=True, eq=False)
class Facts:
    """What the choice depends on; the same on all ranks, so that all choose alike. Rows are the busiest rank's."""

    num_steps: int  # nb
    num_layers: int
    num_ranks: int
    reuse: Reuse  # of rows that go through the pool
    row_bytes: float  # on the wire
    pool_row_bytes: float  # as held: floats, facts, books
    structure_bytes: float = 0.0  # ids and drawn lists of a mini-batch, on the wire
    block_bytes: float = 0.0  # a sampled mini-batch, held
    gradient_bytes: float = 0.0  # that a rank sends in a step
    gradient_rounds: float = 2.0  # that it waits for
    latency_s: float = 0.0  # of one exchange between all ranks
    bytes_per_s: float = math.inf  # that a rank sends, and receives
    compute_s: float = 0.0  # of a step, gradients' way apart
    batch_cpu_s: float = 0.0  # to sample and join a mini-batch
    row_cpu_s: float = 0.0  # to send, receive and store a row
    window_cpu_s: float = 0.0  # of a window, whatever is in it: exchanges, books
    memory_bytes: float = math.inf
    num_epochs: int = 1
    num_rounds: int | None = None  # exchanges that a window waits for one after the other; None: 2 L
    num_copies: float = 2.0  # of rows on their way: sent and received
    slots: int | None = None  # of a pool that is there already; None: as many as fit
    crossing: Reuse | None = None  # of the rows those of other ranks, which are sent; None: all of them
    is_overlapped: bool = True  # a window loads while the one before trains
    is_delta: bool = True  # the pool keeps rows for later windows
    is_sharing: bool = False  # loading and training compete for one processor
    crowding: float = 1.0  # ranks to a core, where there are more: a second of loading takes as many


@dataclass(frozen=True)
class Choice:
    """A number of mini-batches, and what it is expected to mean."""

    k: int
    seconds: float  # of an epoch
    memory_bytes: float
    slots: int  # rows of the pool
    rows: float  # that the busiest rank fetches in an epoch
    reason: str  # one line for the user
    is_overlapped: bool = True  # whether a window loads while the one before trains


@dataclass(frozen=True)
class Measured:
    """Means over the first whole windows of a run; 0 where it was not measured."""

    k: int
    distinct_rows: float = 0.0  # of a window, that go through the pool
    fetched_rows: float = 0.0  # of a window
    compute_s: float = 0.0  # of a step
    load_s: float = 0.0  # of a window
    load_cpu_s: float = 0.0  # of that, computing
    structure_bytes: float = 0.0  # of a mini-batch
    block_bytes: float = 0.0  # of a mini-batch

    def worst(self, line: Collective) -> Measured:
        """The largest of every figure over all ranks, which call it together."""
        own = torch.tensor([float(getattr(self, each.name)) for each in fields(self)], dtype=torch.float64)
        everyone = line.all_gather(own, kind="sizes", counts=[own.numel()] * line.num_ranks)
        k, *others = torch.stack(everyone).amax(0).tolist()
        return Measured(int(k), *others)


def candidates(num_steps: int) -> list[int]:
    """Numbers to choose from: powers of two below an epoch, and the epoch."""
    return [1 << i for i in range(num_steps.bit_length()) if 1 << i < num_steps] + [num_steps]


def memory(facts: Facts, k: int) -> float:
    """Bytes that windows of k need at the least."""
    first = facts.reuse.distinct(k) * _SPREAD  # all of them are new, and the pool has no others
    held = _needed(facts, k) * facts.pool_row_bytes + _moving(facts, k)
    filling = first * (facts.pool_row_bytes + facts.num_copies * facts.row_bytes)
    return _blocks(facts, k) + max(held, filling)


def slots(facts: Facts, k: int) -> int:
    """Rows that the pool is expected to hold with windows of k: what there is room for, up to all that the run asks for."""
    epochs = (
        facts.num_epochs if facts.is_delta else 1
    )  # a pool that forgets has no use for more than two windows
    most = facts.reuse.distinct(facts.num_steps * epochs) * _SPREAD * (1 if facts.is_delta else 2)
    most = max(most, _needed(facts, k))
    if facts.slots is not None:
        return min(facts.slots, math.ceil(most))
    return min(room(facts, k), math.ceil(most))


def room(facts: Facts, k: int) -> int:
    """Rows that memory has room for beside windows of k: what a pool may take, since rows may be more than foreseen."""
    if math.isinf(facts.memory_bytes):
        return 1 << 62
    left = facts.memory_bytes - _blocks(facts, k) - _moving(facts, k)
    return max(0, math.floor(left / facts.pool_row_bytes))


def rows(facts: Facts, k: int) -> float:
    """Rows that are fetched in an epoch, the mean over the run."""
    full, rest = divmod(facts.num_steps, k)
    later = sum(
        each.num_epochs * (full * each.of_window + (each.of_rest if rest else 0.0))
        for each in _phases(facts, k)
    )
    return (facts.reuse.distinct(k) + later) / facts.num_epochs


def sent_share(facts: Facts, k: int) -> float:
    """Of the rows that are fetched: others lie with the rank itself."""
    if facts.crossing is None:
        return 1.0
    return min(1.0, facts.crossing.distinct(k) / max(facts.reuse.distinct(k), 1e-9))


def seconds(facts: Facts, k: int) -> float:
    """Expected seconds of an epoch, the mean over the run."""
    run = sum(each.num_epochs * _epoch(facts, k, each) for each in _phases(facts, k))
    ends = _load(facts, k, facts.reuse.distinct(k)) + _train(facts, facts.num_steps % k or k)
    return (run + ends) / facts.num_epochs


def choose(facts: Facts) -> Choice:
    """The best k that fits. ConfigError if none does."""
    for given in (facts, replace(facts, is_overlapped=False)):  # without overlap one window must fit, not two
        fitting = [k for k in candidates(given.num_steps) if fits(given, k)]
        if fitting:
            times = {k: seconds(given, k) for k in fitting}
            best = min(times.values())
            k = next(k for k in fitting if times[k] <= _NEAR * best)
            return choice_of(given, k)
    needed = memory(replace(facts, is_overlapped=False), 1)
    given_bytes = min(facts.memory_bytes, (facts.slots or math.inf) * facts.pool_row_bytes)
    raise ConfigError(
        f"one mini-batch needs {_size(needed)} on the busiest rank ({facts.reuse.distinct(1):.0f} rows of other ranks), "
        f"memory is {_size(given_bytes)}: give at least that, a smaller batch_size or smaller fan-outs"
    )


def revise(facts: Facts, measured: Measured) -> Facts:
    """The facts with what was measured in place of what was estimated; rows in proportion."""
    k = measured.k
    reuse, scale = facts.reuse, 1.0
    if measured.distinct_rows:
        scale = measured.distinct_rows / max(reuse.distinct(k), 1.0)
        reuse = reuse.scaled(scale)
    facts = replace(
        facts,
        reuse=reuse,
        crossing=None if facts.crossing is None else facts.crossing.scaled(scale),
        compute_s=measured.compute_s or facts.compute_s,
        structure_bytes=measured.structure_bytes or facts.structure_bytes,
        block_bytes=measured.block_bytes or facts.block_bytes,
    )
    if not measured.load_s:
        return facts
    fetched = measured.fetched_rows
    expected_cpu_s = _load_cpu(facts, k, fetched)
    cpu_s = min(measured.load_cpu_s or expected_cpu_s, measured.load_s)
    if expected_cpu_s:
        scale = cpu_s / expected_cpu_s
        costs = ("batch_cpu_s", "row_cpu_s", "window_cpu_s")
        facts = replace(facts, **{name: getattr(facts, name) * scale for name in costs})
    else:
        facts = replace(facts, batch_cpu_s=cpu_s / k)
    return _with_link(facts, k, fetched, measured.load_s - cpu_s)


def _with_link(facts: Facts, k: int, fetched: float, took_s: float) -> Facts:
    """The facts with a link on which a window that fetches so many rows takes so long, computing apart.

    One time cannot tell latency from bandwidth: what differs from the expectation goes to the larger of the two. So where
    ranks share cores, and a round takes as long as the slowest of them needs to be woken, it is the rounds that are dear.
    """
    bytes_s = _load_bytes(facts, k, fetched) / facts.bytes_per_s
    rounds_s = _load(facts, k, fetched) - _load_cpu(facts, k, fetched) - bytes_s
    smaller, larger = sorted((bytes_s, rounds_s))
    if not larger:
        return facts
    times = min(max((took_s - smaller) / larger, 1 / _TRUST), _TRUST)
    if bytes_s > rounds_s:
        return replace(facts, bytes_per_s=facts.bytes_per_s / times)
    return replace(facts, latency_s=facts.latency_s * times)


# Rows


def _needed(facts: Facts, k: int) -> float:
    """Rows that the pool must hold at once; never more than there are."""
    if not facts.is_overlapped:
        return min(facts.reuse.distinct(k) * _SPREAD, facts.reuse.num_rows)
    if facts.is_delta:
        return min(facts.reuse.distinct(2 * k) * _SPREAD, facts.reuse.num_rows)
    return 2 * min(facts.reuse.distinct(k) * _SPREAD, facts.reuse.num_rows)


@dataclass(frozen=True)
class _Phase:
    """Part of a run, after its first window, in which all windows fetch about the same."""

    num_epochs: float
    of_window: float  # rows fetched by each window of k
    of_rest: float  # by the short one at the end of an epoch


def _phases(facts: Facts, k: int) -> list[_Phase]:
    reuse, rest = facts.reuse, facts.num_steps % k
    batches = facts.num_steps * facts.num_epochs
    if not facts.is_delta:
        return [_Phase((batches - k) / facts.num_steps, reuse.distinct(k), reuse.distinct(rest))]
    kept = max(float(k), reuse.horizon(slots(facts, k)))
    found, age = [], float(k)
    while age < min(kept, batches):  # the pool fills: phases as long as all before them
        length = min(age, kept - age, batches - age)
        of_batch = reuse.fresh(length, age) / length
        found.append(_Phase(length / facts.num_steps, of_batch * k, of_batch * rest))
        age += length
    if age < batches:
        found.append(_Phase((batches - age) / facts.num_steps, reuse.fresh(k, kept), reuse.fresh(rest, kept)))
    return found


# Bytes


def _blocks(facts: Facts, k: int) -> float:
    return (2 if facts.is_overlapped else 1) * k * facts.block_bytes


def _moving(facts: Facts, k: int) -> float:
    """Rows of a window on their way, once the pool is warm."""
    new = facts.reuse.fresh(k, k) if facts.is_delta else facts.reuse.distinct(k)
    return facts.num_copies * new * facts.row_bytes


def fits(facts: Facts, k: int) -> bool:
    """Whether windows of k fit the memory, or the pool that is there already."""
    if facts.slots is None:
        return memory(facts, k) <= facts.memory_bytes
    held = slots(facts, k) * facts.pool_row_bytes + _blocks(facts, k) + _moving(facts, k)
    return (
        _needed(facts, k) / _SPREAD <= facts.slots and held <= facts.memory_bytes
    )  # what does not fit is cut


# Seconds


def _load_cpu(facts: Facts, k: int, new: float) -> float:
    return facts.window_cpu_s + k * facts.batch_cpu_s + new * facts.row_cpu_s


def _load_bytes(facts: Facts, k: int, new: float) -> float:
    return k * facts.structure_bytes + sent_share(facts, k) * new * facts.row_bytes


def _load(facts: Facts, k: int, new: float) -> float:
    """Seconds to load a window of k that fetches so many rows, with nothing beside it."""
    rounds = 2 * facts.num_layers if facts.num_rounds is None else facts.num_rounds
    waits = rounds * facts.latency_s if facts.num_ranks > 1 else 0.0
    return waits + _load_bytes(facts, k, new) / facts.bytes_per_s + _load_cpu(facts, k, new)


def _train(facts: Facts, k: int) -> float:
    """Seconds to train a window. Where ranks outnumber cores, one computes while another waits for gradients."""
    if facts.num_ranks == 1:
        return k * facts.compute_s
    waits = 0.0 if facts.crowding > 1 else facts.gradient_rounds * facts.latency_s
    return k * (facts.compute_s + waits + facts.gradient_bytes / facts.bytes_per_s)


def _epoch(facts: Facts, k: int, phase: _Phase) -> float:
    """Seconds of an epoch like this; its first window loads while the last of the epoch before trains."""
    full, rest = divmod(facts.num_steps, k)
    if rest == 0:
        return full * _period(facts, k, k, phase.of_window)
    ends = _period(facts, k, rest, phase.of_rest) + _period(facts, rest, k, phase.of_window)
    return (full - 1) * _period(facts, k, k, phase.of_window) + ends


def _period(facts: Facts, k: int, next_k: int, new: float) -> float:
    """Seconds in which a window of k trains and one of ``next_k``, which fetches so many rows, loads."""
    train, load = _train(facts, k), _load(facts, next_k, new)
    if not facts.is_overlapped:
        return train + load
    link = (_load_bytes(facts, next_k, new) + k * facts.gradient_bytes) / facts.bytes_per_s
    loading = facts.crowding * _load_cpu(facts, next_k, new)
    shared = k * facts.compute_s + loading if facts.is_sharing else 0.0
    return max(train, load, link, shared)


# The line for the user


def choice_of(facts: Facts, k: int) -> Choice:
    """Windows of ``k``, whatever others would take."""
    pool = slots(facts, k)
    used = pool * facts.pool_row_bytes + _blocks(facts, k) + _moving(facts, k)
    if facts.slots is None:
        used = max(min(used, facts.memory_bytes), memory(facts, k))
    reason = _reason(facts, k, used)
    return Choice(k, seconds(facts, k), used, pool, rows(facts, k), reason, facts.is_overlapped)


def _reason(facts: Facts, k: int, used: float) -> str:
    taken = seconds(facts, k)
    said = [f"{_windows(k)}: {_time(taken)} an epoch expected"]
    if k > 1:
        said[0] += f" (1 at a time: {_time(seconds(facts, 1))})"
    fewer = facts.num_steps * facts.reuse.distinct(1) / max(rows(facts, k), 1e-9)
    if facts.reuse.num_rows and fewer >= 1.05:
        said.append(f"{fewer:.1f} times fewer rows" if fewer < 1000 else "hardly any rows fetched")
    is_bounded = not math.isinf(facts.memory_bytes)
    said.append(_size(used) + (f" of {_size(facts.memory_bytes)}" if is_bounded else ""))
    if not facts.is_overlapped:
        said.append("nothing loaded ahead")
    return ", ".join(said) + "; " + _what_else(facts, k)


def _what_else(facts: Facts, k: int) -> str:
    larger = [other for other in candidates(facts.num_steps) if other > k]
    if not larger:
        return "that is the whole epoch"
    if not fits(facts, larger[0]):
        given = f"the {_size(facts.memory_bytes)} given" if facts.slots is None else "the pool"
        return f"more would not fit {given}"
    best = min((other for other in larger if fits(facts, other)), key=lambda other: seconds(facts, other))
    saved = round(100 * (1 - seconds(facts, best) / max(seconds(facts, k), 1e-12)))
    return f"{best} would save {saved} % more" if saved > 0 else "more would not be faster"


def _windows(k: int) -> str:
    return "mini-batches one at a time" if k == 1 else f"windows of {k} mini-batches"


def _time(taken: float) -> str:
    if taken >= 10:
        return f"{taken:.0f} s"
    return f"{taken:.1f} s" if taken >= 1 else f"{1000 * taken:.0f} ms"


def _size(num_bytes: float) -> str:
    units: Iterable[tuple[str, float]] = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
    for unit, size in units:
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"
