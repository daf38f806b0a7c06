"""k chosen by itself: facts gathered before the first window, a choice, and second thoughts after the first windows.

``macro_plan`` decides; here is what it is told. Before the run: how likely every node is an input (one pass over the edges
for each hop, by all ranks together), how fast the links are (measured), and a guess at the computing. After a few windows:
how long steps and loading really took and how many rows there were, the worst over all ranks; and from there on the clock:
windows of other sizes are tried. All ranks choose alike.

Legend: n own nodes, P ranks, L hops.
"""

from __future__ import annotations

import math
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.comm.probe import measure_link
from polyhop.errors import ConfigError
from polyhop.exchange import Loaded, RowFormat
from polyhop.graph import SharedGraph
from polyhop.sample.reuse import Reuse, reuse_of_ranks
from polyhop.strategies.macro_climb import Climb
from polyhop.strategies.macro_plan import (
    Choice,
    Facts,
    Measured,
    candidates,
    choose,
    fits,
    memory,
    revise,
    slots,
)

__all__ = [
    "ID_BYTES",
    "NODE_BYTES",
    "READ_BYTES_PER_S",
    "SecondThoughts",
    "gather_facts",
    "lowered",
    "most_facts",
    "ranks_to_a_core",
]

_RETHINK_AFTER = 2  # windows: the first one has trained by then
_TIMED_STEPS = 8  # at least, of windows of one size
_WORTH_WINDOWS = 8  # left in the run, for a size to be tried
_CORES = 1024  # of a host, told apart
ID_BYTES = 2.5  # of a node asked for at a hop, and of the count that comes back
NODE_BYTES = 8 + 8 + 4 + 8  # of a mini-batch's input node, held: row, user's id, degree, bounds of its list
_BUSY_ROUND_S = (
    0.003  # of a round whose ranks share cores with what they train: 3 to 5 ms, 4 ranks on 2 cores
)
_WINDOW_CPU_S = (
    0.02  # 20 to 25 ms, 3 hops between 4 ranks: exchanges of a dozen messages each, and the pool's books
)
READ_BYTES_PER_S = 4e9  # of rows summed, on one core: a guess until steps were timed


def gather_facts(
    hops: Sequence[Tensor],
    graph: SharedGraph,
    num_neighbors: Sequence[int],
    layout: RowFormat,
    line: Collective,
    *,
    has_own: bool,
    num_pinned: int,
    num_steps: int,
    num_epochs: int,
    pool_row_bytes: int,
    gradient_bytes: float,
    gradient_rounds: float,
    memory_bytes: float,
    is_delta: bool,
    is_overlapped: bool,
) -> Facts:
    """The same on every rank, which call it together.

    ``hops`` [L + 1] float64 [n, P]: how likely each own node is known to each rank's mini-batch after each hop.
    ``num_pinned``: rows that this rank keeps for good.
    """
    others = reuse_of_ranks(hops[-1], line)
    everyone = reuse_of_ranks(hops[-1], line, has_own=True) if has_own else others
    counts = [1] * line.num_ranks
    kept = min(int(n) for n in line.all_gather(torch.tensor([num_pinned]), kind="sizes", counts=counts))
    rank = max(range(line.num_ranks), key=lambda r: everyone[r].distinct(1))
    busiest = everyone[rank].without(kept)
    link = measure_link(line)
    structure, edges, nodes = _sizes(hops, graph, num_neighbors, line)
    block_bytes = 4 * edges + NODE_BYTES * nodes
    crowding = ranks_to_a_core(line)
    is_sharing = crowding > 0.5  # each has a thread that loads beside the one that trains
    return Facts(
        num_steps,
        len(num_neighbors),
        line.num_ranks,
        busiest,
        float(layout.row_bytes or pool_row_bytes),
        float(pool_row_bytes),
        structure_bytes=structure,
        block_bytes=block_bytes,
        gradient_bytes=gradient_bytes,
        gradient_rounds=gradient_rounds,
        latency_s=max(link.latency_s, _BUSY_ROUND_S if is_sharing else 0.0),
        bytes_per_s=link.bytes_per_s,
        compute_s=3 * edges * pool_row_bytes / READ_BYTES_PER_S,
        batch_cpu_s=block_bytes / READ_BYTES_PER_S,
        row_cpu_s=4 * pool_row_bytes / READ_BYTES_PER_S,
        window_cpu_s=_WINDOW_CPU_S,
        memory_bytes=memory_bytes,
        num_epochs=max(1, num_epochs),
        num_rounds=4 * len(num_neighbors),  # lengths and messages, requests and replies; and the agreement
        is_overlapped=is_overlapped,
        is_delta=is_delta,
        is_sharing=is_sharing,
        crowding=max(1.0, crowding),
        crossing=others[rank].without(kept) if has_own else None,
    )


def ranks_to_a_core(line: Collective) -> float:
    """On the fullest host: its ranks over the cores that they may run on, whether pinned or not. The same on all ranks."""
    cores = os.sched_getaffinity(0)
    told = torch.zeros(1 + _CORES, dtype=torch.int64)
    told[0] = zlib.crc32(_machine().encode())
    told[[1 + core % _CORES for core in cores]] = 1
    everyone = torch.stack(line.all_gather(told, kind="sizes", counts=[told.numel()] * line.num_ranks))
    hosts = [everyone[everyone[:, 0] == host, 1:] for host in set(everyone[:, 0].tolist())]
    return max(ranks.shape[0] / int(ranks.amax(0).sum()) for ranks in hosts)


def _machine() -> str:
    """The same for all that share its cores: containers and network namespaces of one machine have names of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()


def most_facts(
    graph: SharedGraph,
    num_neighbors: Sequence[int],
    batch_size: int,
    layout: RowFormat,
    num_ranks: int,
    *,
    num_steps: int,
    num_epochs: int,
    pool_row_bytes: int,
    memory_bytes: float,
    is_delta: bool,
    is_overlapped: bool,
) -> Facts:
    """The same where edges are computed, not stored, and nobody knows how likely a node is: what memory must be ready for.

    Every mini-batch reads as many rows as its fan-outs and the mean degree allow, and no row twice: on a graph much larger
    than what a run reads of it, that is nearly so.
    """
    mean, degree = batch_size / num_ranks, graph.num_edges / max(1, graph.num_nodes)
    most = math.ceil(mean + 4 * math.sqrt(mean))  # seeds fall to ranks by chance
    nodes, edges = float(min(batch_size, most)), 0.0
    for fanout in num_neighbors:
        drawn = nodes * (degree if fanout < 0 else min(fanout, degree))
        nodes, edges = nodes + drawn, edges + drawn
    never_twice = 1e-9
    rate = torch.tensor([never_twice], dtype=torch.float64)
    return Facts(
        num_steps,
        len(num_neighbors),
        num_ranks,
        Reuse(rate, nodes / rate),
        float(layout.row_bytes or pool_row_bytes),
        float(pool_row_bytes),
        block_bytes=4 * edges + NODE_BYTES * nodes,
        window_cpu_s=_WINDOW_CPU_S,
        memory_bytes=memory_bytes,
        num_epochs=max(1, num_epochs),
        is_overlapped=is_overlapped,
        is_delta=is_delta,
    )


def _sizes(
    hops: Sequence[Tensor], graph: SharedGraph, num_neighbors: Sequence[int], line: Collective
) -> tuple[float, float, float]:
    """Of one mini-batch of the busiest rank: bytes of ids and lists that others send it, edges, input nodes."""
    part = graph.stored("a choice of k")
    degree = part.in_degree[: part.num_nodes].double()
    is_other = torch.ones(line.num_ranks, dtype=torch.float64)
    is_other[line.rank] = 0
    sums = torch.zeros(3, line.num_ranks, dtype=torch.float64)
    for hop, fanout in enumerate(num_neighbors):
        edges = hops[hop].T @ (degree if fanout < 0 else degree.clamp(max=fanout))
        sums[1] += edges
        if hop:
            sums[0] += is_other * (ID_BYTES * hops[hop].sum(0) + 4 * edges)
    sums[2] = hops[-1].sum(0)
    structure, edges, nodes = line.all_reduce(sums, kind="ids").amax(1).tolist()
    return structure, edges, nodes


def lowered(facts: Facts, size: int) -> Choice:
    """The k asked for, or the largest below it that fits the memory; the reason is empty for the former.

    ConfigError if none fits.
    """
    for given in (facts, replace(facts, is_overlapped=False)):
        for k in range(size, 0, -1):
            needs = memory(given, k)
            if needs <= given.memory_bytes:
                told = f"windows of {k} mini-batches, not {size}: more would not fit the memory given"
                told += "" if given.is_overlapped == facts.is_overlapped else ", nor would loading ahead"
                is_less = k < size or given is not facts
                return Choice(
                    k, 0.0, needs, slots(given, k), 0.0, told if is_less else "", given.is_overlapped
                )
    return choose(replace(facts, num_steps=1))  # says what one mini-batch needs


class SecondThoughts:
    """Called after each window, in the loading thread of every rank; answers with another k, or None.

    Once the first windows have trained, the facts are revised and k is chosen again; from there on windows of other sizes
    are tried (``Climb``), timed where they train: ``seconds_of`` windows, waiting for rows included, None where one has not
    trained.
    """

    def __init__(
        self,
        facts: Facts,
        k: int,
        line: Collective,
        notes: list[str],
        step_seconds: Callable[[], float],
        seconds_of: Callable[[range], float | None],
    ) -> None:
        self._facts, self._line, self._notes = facts, line, notes
        self._k, self._step_seconds, self._seconds_of = k, step_seconds, seconds_of
        self._seen: list[Loaded] = []
        self._climb: Climb | None = None
        self._timed = range(0)  # windows
        self._num_steps = 0  # loaded so far

    @property
    def is_settled(self) -> bool:
        """k changes no more. The same on all ranks."""
        return self._climb is not None and self._climb.is_settled

    def __call__(self, loaded: Loaded) -> int | None:
        self._num_steps += loaded.num_steps
        if self.is_settled:
            return None
        if self._climb is not None:
            return self._compare(self._climb, loaded.window)
        # The first has nothing to compare with: all its rows are new, and nothing trains beside it.
        if loaded.window:
            self._seen.append(loaded)
        return self._rethink(loaded.window) if loaded.window == _RETHINK_AFTER else None

    def _rethink(self, window: int) -> int | None:
        """By the model, with what was measured so far."""
        self._facts = revise(self._facts, self._measured().worst(self._line))
        self._seen.clear()
        try:
            choice = choose(self._facts)
        except ConfigError:  # windows that do not fit are cut: slower than foreseen, but they go on
            choice = None
        if choice is not None and choice.k != self._k:
            self._notes.append(f"after {window + 1} windows: {choice.reason}")
            self._k = choice.k
        self._climb = Climb(self._k, candidates(self._facts.num_steps))
        self._time_from(window)
        return self._k

    def _time_from(self, window: int) -> None:
        """The windows to time, after this one has loaded: the next is the first of its size, and is not waited for alike."""
        self._timed = range(window + 2, window + 2 + max(1, math.ceil(_TIMED_STEPS / self._k)))

    def _compare(self, climb: Climb, window: int) -> int | None:
        if window < self._timed.stop + 1:  # while a window loads, the one before it trains
            return None
        pace = self._pace()
        if pace is None:
            self._time_from(window)
            return None
        before, self._k = self._k, climb.tell(pace, self._may_try)
        if climb.is_settled:
            self._notes.append(f"after {window + 1} windows: {_measured_line(climb)}")
        self._time_from(window)
        return self._k if self._k != before else None

    def _pace(self) -> float | None:
        """Seconds of a mini-batch in the windows timed, on the slowest rank; None if one has not trained on some rank."""
        seconds = self._seconds_of(self._timed)
        told = torch.tensor([-1.0 if seconds is None else seconds], dtype=torch.float64)
        everyone = self._line.all_gather(told, kind="sizes", counts=[1] * self._line.num_ranks)
        found = [float(each) for each in everyone]
        return None if min(found) < 0 else max(found)

    def _may_try(self, k: int) -> bool:
        left = self._facts.num_steps * self._facts.num_epochs - self._num_steps
        return k * _WORTH_WINDOWS <= left and fits(self._facts, k)

    def _measured(self) -> Measured:
        """Means over the windows seen."""
        steps = sum(each.num_steps for each in self._seen)
        k = max(1, round(steps / len(self._seen)))
        each = k / steps  # of a window of k

        def mean(of: Callable[[Loaded], float]) -> float:
            return sum(map(of, self._seen)) * each

        return Measured(
            k,
            distinct_rows=mean(lambda one: one.num_nodes),
            fetched_rows=mean(lambda one: one.num_fetched),
            compute_s=self._step_seconds(),
            load_s=mean(lambda one: one.seconds),
            load_cpu_s=mean(lambda one: one.cpu_s),
            block_bytes=mean(lambda one: one.block_bytes) / k,
        )


def _measured_line(climb: Climb) -> str:
    """For the user."""
    times = {k: f"{1000 * seconds:.1f} ms" for k, seconds in climb.paces.items()}
    chosen = f"windows of {climb.k}: {times.pop(climb.k)} a mini-batch measured"
    others = ", ".join(f"{k}: {took}" for k, took in sorted(times.items()))
    return f"{chosen} ({others})" if others else chosen
