"""What ranks would see of a graph of which only statistics are at hand: any number of parts, all of them alike.

Totals of one part are foreseen from the histogram of degrees, a node's draws falling on readers in proportion to their
degrees: of a part's own mini-batch in two populations, its own nodes and all others, of which only the halo is read from
inside. Where ranks have looked at some numbers of parts, each total is corrected by what was seen over what is foreseen
there, on a line in logarithms between them and as at the nearest beyond them.

Legend: N nodes, P parts, L layers or hops, M cells of degrees, q share of edges that are cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyhop.comm.collective import is_summed_everywhere
from polyhop.exchange import bucket_sizes
from polyhop.exchange.pool import pool_row_bytes
from polyhop.forecast.sight import POOL_BYTES, Cut, InputRows, LayerCut, Sight, caches_to_compare
from polyhop.forecast.statistics import GraphStatistics
from polyhop.forecast.training import Training
from polyhop.sample.reuse import Reuse
from polyhop.strategies import macro_plan
from polyhop.strategies.data_cost import account_gradients
from polyhop.strategies.flows import Flows, Pairs, expected_pairs
from polyhop.strategies.halo import Config
from polyhop.strategies.halo_plan import Plan
from polyhop.strategies.macro_auto import ID_BYTES, NODE_BYTES, READ_BYTES_PER_S

__all__ = ["alike_sight", "totals_of", "way_of"]


def way_of(training: Training) -> str:
    """Of which training totals are: the same for all that draw the same, or whose layers read the same."""
    if training.num_neighbors is not None:
        drawn = ",".join(map(str, training.num_neighbors))
        return f"fan-outs {drawn}, mini-batches of {training.batch_size}"
    plan = Plan.of(training.model, Config(), training.graph_sizes)
    layers = " ".join("sums" if each else "rows" for each in plan.sums)
    return f"full graph, {layers}, {'what the loss reads' if plan.skips else 'all rows'}"


def alike_sight(statistics: GraphStatistics, training: Training, num_parts: int) -> Sight:
    """As ``look_at`` would find it, if all parts were alike."""
    drawn = _Drawn(statistics, training, num_parts) if training.num_neighbors is not None else None
    foreseen = _totals(statistics, training, num_parts, drawn)
    totals = {
        name: value * _correction(statistics, training, num_parts, name) for name, value in foreseen.items()
    }
    cut = _cut(statistics, num_parts)
    if drawn is None:
        return Sight(cut, _layers(totals, training, num_parts), is_alike=True, busiest=totals["busiest"])
    flows = drawn.flows(totals)
    caches = caches_to_compare(training, num_parts)
    cached = {each: drawn.with_cache(flows, totals, each) for each in caches}
    windows = drawn.windows(totals) if num_parts > 1 else None
    last = drawn.hops[-1]
    inputs = InputRows(drawn.nodes, last.own, last.others, last.shared)
    return Sight(cut, (), flows, windows, cached, is_alike=True, inputs=inputs, busiest=totals["busiest"])


def totals_of(sight: Sight) -> dict[str, float]:
    """Of a part, on average over all: what ``alike_sight`` foresees, as ranks have seen it."""
    parts = sight.cut.num_parts
    found = {"busiest": _busiest(sight)}
    for at, layer in enumerate(sight.layers):
        found[f"edges {at}"] = float(layer.edges.sum() + layer.marginal_edges.sum()) / parts
        found[f"marginal {at}"] = float(layer.marginal_edges.sum()) / parts
        found[f"rows {at}"] = float(layer.rows.sum()) / parts
    if sight.flows is not None:
        flows = sight.flows
        for hop in range(flows.num_hops + 1):
            inner = float(flows.own[hop].rows.diagonal().sum()) / parts
            found[f"own {hop}"] = inner
            found[f"others {hop}"] = float(flows.own[hop].rows.sum()) / parts - inner
            found[f"shared {hop}"] = float(flows.shared[hop].sum()) / parts
        for hop in range(flows.num_hops):
            inner = float(flows.own_edges[hop].diagonal().sum()) / parts
            found[f"own edges {hop}"] = inner
            found[f"others' edges {hop}"] = float(flows.own_edges[hop].sum()) / parts - inner
            found[f"shared edges {hop}"] = float(flows.shared_edges[hop].sum()) / parts
            found[f"crossing {hop}"] = float(flows.crossing[hop].rows.sum()) / parts
    return found


def _busiest(sight: Sight) -> float:
    """Rows that the rank with most of them sends, or receives, over the mean of all."""
    crossing = sum((layer.rows for layer in sight.layers), torch.zeros_like(sight.cut.halo))
    if sight.flows is not None:
        last = sight.flows.own[-1].rows
        crossing = last - last.diag().diag()
    most = max(float(crossing.sum(0).max()), float(crossing.sum(1).max()))
    return most * sight.cut.num_parts / float(crossing.sum()) if crossing.any() else 1.0


def _totals(
    statistics: GraphStatistics, training: Training, num_parts: int, drawn: _Drawn | None
) -> dict[str, float]:
    found = _read(statistics, training, num_parts) if drawn is None else drawn.totals()
    return found | {"busiest": 1.0}


def _correction(statistics: GraphStatistics, training: Training, num_parts: int, name: str) -> float:
    """What was seen over what is foreseen, at so many parts."""
    ratios = _ratios(statistics, training)
    known = sorted(parts for parts in ratios if name in ratios[parts])
    if not known:
        return 1.0
    below = max((parts for parts in known if parts <= num_parts), default=known[0])
    above = min((parts for parts in known if parts >= num_parts), default=known[-1])
    first, last = ratios[below][name], ratios[above][name]
    if below >= above:
        return first if below <= num_parts else last
    share = math.log(num_parts / below) / math.log(above / below)
    return float(first ** (1 - share) * last**share)


def _ratios(statistics: GraphStatistics, training: Training) -> Mapping[int, Mapping[str, float]]:
    """Kept with the training: the same for all numbers of parts."""
    kept: dict[int, Mapping[int, Mapping[str, float]]] = training.__dict__.setdefault("_ratios", {})
    if id(statistics) not in kept:
        way, found = way_of(training), {}
        for each in statistics.seen:
            if each.what == way:
                drawn = _Drawn(statistics, training, each.num_parts) if training.num_neighbors else None
                foreseen = _totals(statistics, training, each.num_parts, drawn)
                found[each.num_parts] = {
                    name: each.totals[name] / value
                    for name, value in foreseen.items()
                    if value > 0 and each.totals.get(name, 0) > 0
                }
        kept[id(statistics)] = found
    return kept[id(statistics)]


# Full graph


def _cut(statistics: GraphStatistics, num_parts: int) -> Cut:
    nodes, edges = statistics.num_nodes / num_parts, statistics.num_edges / num_parts
    marginal_nodes, marginal_edges = _marginal(statistics, num_parts)
    return Cut(
        _each(nodes, num_parts),
        _each(edges, num_parts),
        _each(marginal_nodes * nodes, num_parts),
        _each(marginal_edges * edges, num_parts),
        _pairs(0.0, statistics.replicas(num_parts) * nodes, num_parts),
        statistics.replicas,
    )


def _marginal(statistics: GraphStatistics, num_parts: int) -> tuple[float, float]:
    """(share of the nodes that read another part, of all edges those into them)."""
    nodes, degree, _ = statistics.cells.unbind(1)
    reads = 1 - (1 - statistics.cut(num_parts)) ** degree
    return float((nodes * reads).sum() / nodes.sum()), float(
        (nodes * degree * reads).sum() / statistics.num_edges
    )


def _read(statistics: GraphStatistics, training: Training, num_parts: int) -> dict[str, float]:
    """A row of the last layer is read if its node trains; of the one below if a reader is such a node or is one itself."""
    plan = Plan.of(training.model, Config(), training.graph_sizes)
    nodes, degree, readers = statistics.cells.unbind(1)
    read = nodes * 0 + (statistics.num_train / statistics.num_nodes if plan.skips else 1.0)
    replicas = statistics.replicas(num_parts) * statistics.num_nodes
    times = statistics.cut(num_parts) * statistics.num_edges / max(replicas, 1e-9)
    marginal = 1 - (1 - statistics.cut(num_parts)) ** degree
    found: dict[str, float] = {}
    for at in range(training.counts.num_layers - 1, -1, -1):
        edges = nodes * degree * read
        mean = min(1.0, float(edges.sum()) / statistics.num_edges)  # of the readers at the ends of edges
        crossing = replicas * (1 - (1 - mean) ** times)
        if plan.sums[at]:
            crossing = statistics.sums(num_parts) * min(crossing, mean * replicas)
        found[f"edges {at}"] = float(edges.sum()) / num_parts
        found[f"marginal {at}"] = float((edges * marginal).sum()) / num_parts
        found[f"rows {at}"] = crossing / num_parts
        read = 1 - (1 - read) * (1 - mean) ** readers
    return found


def _layers(totals: Mapping[str, float], training: Training, num_parts: int) -> list[LayerCut]:
    found = []
    for at in range(training.counts.num_layers):
        marginal = min(totals[f"marginal {at}"], totals[f"edges {at}"])
        central = totals[f"edges {at}"] - marginal
        rows = _pairs(0.0, totals[f"rows {at}"], num_parts)
        found.append(LayerCut(_each(central, num_parts), _each(marginal, num_parts), rows))
    return found


def _each(value: float, num_parts: int) -> Tensor:
    return torch.full((num_parts,), value, dtype=torch.float64)


def _expected(own: float, others: float, num_parts: int, size: float) -> Pairs:
    """Of two parts, then of all: they are alike."""
    two = expected_pairs(_pairs(own, others / max(1, num_parts - 1), 2), _each(size, 2))
    return Pairs(
        _pairs(own, others, num_parts), _pairs(0.0, float(two.ids[0, 1]) * (num_parts - 1), num_parts)
    )


def _pairs(own: float, others: float, num_parts: int) -> Tensor:
    """float64 [P, P]: so much of the own part, and of all others together."""
    found = torch.full((num_parts, num_parts), others / max(1, num_parts - 1), dtype=torch.float64)
    return found.fill_diagonal_(own)


# Mini-batches


@dataclass(frozen=True)
class _Hop:
    """float64 [M]: how likely a node is known to a part's own mini-batch, and to the shared one."""

    own: Tensor  # of the part itself
    others: Tensor
    shared: Tensor

    def beyond(self, before: _Hop) -> _Hop:
        """What is known that was not before."""
        return _Hop(self.own - before.own, self.others - before.others, self.shared - before.shared)


class _Drawn:
    """A mini-batch of a part, foreseen hop by hop."""

    def __init__(self, statistics: GraphStatistics, training: Training, num_parts: int) -> None:
        self.statistics, self.training, self.num_parts = statistics, training, num_parts
        fan_outs = training.num_neighbors
        assert fan_outs is not None, "mini-batches have fan-outs"
        self.nodes, degree, self.readers = statistics.cells.unbind(1)
        self.draws = [degree if fanout < 0 else degree.clamp(max=fanout) for fanout in fan_outs]
        self.cut = statistics.cut(num_parts)
        self.halo, self.times = self._halo()
        self.degree, self.train_share = degree, statistics.num_train / statistics.num_nodes
        self.hops = self._hops(training.chance * self.train_share, self.draws)

    def _halo(self) -> tuple[Tensor, Tensor]:
        """float64 [M]: the chance that a node is in another part's halo, and its readers there if it is."""
        peers = self.num_parts - 1
        if peers == 0:
            return self.nodes * 0, self.nodes * 0
        spread = self.statistics.spread(self.num_parts)
        share = -torch.expm1(self.readers * math.log1p(-min(spread / self.num_parts, 1 - 1e-12)))
        given = self.statistics.replicas(self.num_parts) / peers * float(self.nodes.sum())
        share = (share * given / float((share * self.nodes).sum().clamp(min=1e-12))).clamp(max=1)
        return share, self.readers * self.cut / peers / share.clamp(min=1e-12)

    def _rates(self, hop: _Hop, draws: Tensor) -> tuple[float, float, float]:
        """Chances of an edge to be drawn: into the own part, into others, in the shared mini-batch."""
        edges = float((self.nodes * self.degree).sum())
        own, others, shared = (
            float((self.nodes * likely * draws).sum()) / edges for likely in (hop.own, hop.others, hop.shared)
        )
        return min(own, 1.0), min(others, 1.0), min(shared, 1.0)

    def _hops(self, share: float, draws_of_hops: Sequence[Tensor]) -> list[_Hop]:
        """From seeds that are so many of the nodes."""
        start = self.nodes * 0 + share
        hops, since = [_Hop(start, start * 0, start)], list[tuple[_Hop, Tensor]]()
        for (
            draws
        ) in draws_of_hops:  # since: who became known when, and what of its list it has not drawn so far
            fresh = hops[0] if len(hops) == 1 else hops[-1].beyond(hops[-2])
            missed = 1 - draws / self.degree.clamp(min=1e-12)
            since = [(known, left * missed) for known, left in [*since, (fresh, torch.ones_like(missed))]]
            hops.append(self._next(since, hops[0], hops[-1]))
        return hops

    def _next(self, since: Sequence[tuple[_Hop, Tensor]], start: _Hop, last: _Hop) -> _Hop:
        """As ``sample/inclusion.py`` has it: what a node drew in earlier hops it draws in vain."""
        each = torch.tensor([self._rates(known, (1 - left) * self.degree) for known, left in since])
        own, others, shared = each.sum(0).clamp(max=1).tolist()
        peers = max(1, self.num_parts - 1)
        inner = (1 - own) ** (self.readers * (1 - self.cut)) * (1 - others) ** (self.readers * self.cut)
        reached = 1 - self.halo + self.halo * (1 - own) ** self.times
        outer = reached * (1 - others) ** (self.readers * (1 - self.cut / peers))
        return _Hop(
            (1 - (1 - start.own) * inner).maximum(last.own),
            (1 - outer).maximum(last.others),
            (1 - (1 - start.shared) * (1 - shared) ** self.readers).maximum(last.shared),
        )

    def totals(self) -> dict[str, float]:
        """Per part."""
        found, own = {}, self.nodes / self.num_parts
        others = own * (self.num_parts - 1)
        for at, hop in enumerate(self.hops):
            found[f"own {at}"] = float((own * hop.own).sum())
            found[f"others {at}"] = float((others * hop.others).sum())
            found[f"shared {at}"] = float((own * hop.shared).sum())
        for at, draws in enumerate(self.draws):
            hop = self.hops[at]
            found[f"own edges {at}"] = float((own * hop.own * draws).sum())
            found[f"others' edges {at}"] = float((others * hop.others * draws).sum())
            found[f"shared edges {at}"] = float((own * hop.shared * draws).sum())
            found[f"crossing {at}"] = float((others * self._crossing(at)).sum())
        return found

    def _crossing(self, at: int) -> Tensor:
        """float64 [M]: the chance that one other part reads a node in the draws of a hop of the shared mini-batch."""
        _, _, shared = self._rates(self.hops[at], self.draws[at])
        return self.halo * (1 - (1 - shared) ** self.times)

    def flows(self, totals: Mapping[str, float]) -> Flows:
        parts, hops = self.num_parts, len(self.draws)
        own = [self._pairs(totals[f"own {at}"], totals[f"others {at}"]) for at in range(hops + 1)]
        edges = [
            _pairs(totals[f"own edges {at}"], totals[f"others' edges {at}"], parts) for at in range(hops)
        ]
        crossing = [self._pairs(0.0, totals[f"crossing {at}"]) for at in range(hops)]
        without = Flows(
            own,
            torch.stack(edges),
            own[-1],
            torch.stack([_each(totals[f"shared {at}"], parts) for at in range(hops + 1)]),
            torch.stack([_each(totals[f"shared edges {at}"], parts) for at in range(hops)]),
            crossing,
            crossing[-1],
            _each(0.0, parts),
            _each(totals[f"shared {hops}"], parts),
            is_alike=True,
        )
        return self.with_cache(without, totals, self.training.cache_bytes)

    def with_cache(self, flows: Flows, totals: Mapping[str, float], num_bytes: int) -> Flows:
        """The same where ranks have memory for rows of others. Own rows of which only copies are read are loaded too."""
        most = num_bytes // (8 + 4 * max(1, self.training.inputs.num_features))
        if most == 0:
            return flows
        hops = len(self.draws)
        others, crossing = totals[f"others {hops}"], totals[f"crossing {hops - 1}"]
        foreseen, theirs = self.totals(), self.nodes / self.num_parts * (self.num_parts - 1)
        kept = _of_likeliest(self.hops[-1].others, theirs, most)
        read = self._crossing(hops - 1) / self.halo.clamp(min=1e-12)
        copied = _of_likeliest(read, theirs * self.halo, most)
        kept = min(others, kept * _ratio(others, foreseen[f"others {hops}"]))
        copied = min(crossing, copied * _ratio(crossing, foreseen[f"crossing {hops - 1}"]))
        return replace(
            flows,
            fetched=self._pairs(totals[f"own {hops}"], others - kept),
            uncopied=self._pairs(0.0, crossing - copied),
            copied=_each(copied, self.num_parts),
        )

    def _pairs(self, own: float, others: float) -> Pairs:
        return _expected(own, others, self.num_parts, self.statistics.num_nodes / self.num_parts)

    def _reached(self) -> _Hop:
        """How likely any mini-batch of the run knows a node at all: train nodes are the same in every epoch."""
        missed = [1 - draws / self.degree.clamp(min=1e-12) for draws in self.draws]
        drawn = [self.degree * (1 - each**self.training.num_epochs) for each in missed]
        return self._hops(self.train_share, drawn)[-1]

    def windows(self, totals: Mapping[str, float]) -> macro_plan.Facts:
        """As ``macro_auto.gather_facts`` finds them; a forecast puts its own seconds in."""
        training, inputs, hops = self.training, self.training.inputs, len(self.draws)
        last, reached, foreseen = self.hops[-1], self._reached(), self.totals()
        names = [(last.others, reached.others, self.num_parts - 1, f"others {hops}")]
        if not inputs.are_read_in_place:
            names.append((last.own, reached.own, 1, f"own {hops}"))
        hazards, counts = [], []
        for mean, share, times, name in names:
            likely = (mean / share.clamp(min=1e-12)).clamp(max=1 - 1e-12)
            hazards.append(-torch.log1p(-likely))
            nodes = share * self.nodes / self.num_parts * times
            counts.append(nodes * _ratio(totals[name], foreseen[name]))
        reuse = Reuse(torch.cat(hazards).clamp(min=1e-15), torch.cat(counts))
        structure = sum(
            ID_BYTES * totals[f"others {at}"] + 4 * totals[f"others' edges {at}"] for at in range(1, hops)
        )
        edges = sum(totals[f"own edges {at}"] + totals[f"others' edges {at}"] for at in range(hops))
        held = 4 * edges + NODE_BYTES * (totals[f"own {hops}"] + totals[f"others {hops}"])
        width = inputs.num_features if inputs.row_length is None else 2 * round(inputs.row_length) + 2
        others = Reuse(hazards[0].clamp(min=1e-15), counts[0])
        pool, sizes = pool_row_bytes(training.layout, width, 4), bucket_sizes(training.weights)
        gradients = account_gradients(sizes, training.value_bytes, self.num_parts, rank=0).total_bytes
        is_small = is_summed_everywhere(max(sizes) * training.value_bytes, self.num_parts)
        return macro_plan.Facts(
            training.num_steps,
            hops,
            self.num_parts,
            reuse,
            float(training.layout.row_bytes or pool),
            float(pool),
            structure_bytes=structure,
            block_bytes=held,
            gradient_bytes=gradients,
            gradient_rounds=1 if is_small else 2,
            row_cpu_s=4 * pool / READ_BYTES_PER_S,
            memory_bytes=training.pool_bytes or POOL_BYTES,
            num_epochs=training.num_epochs,
            num_rounds=4 * hops,
            is_overlapped=training.prefetch > 0,
            crossing=others if len(names) > 1 else None,
        )


def _ratio(corrected: float, foreseen: float) -> float:
    return corrected / foreseen if foreseen > 0 else 1.0


def _of_likeliest(likely: Tensor, nodes: Tensor, most: float) -> float:
    """Rows that are read of the ``most`` likeliest ones."""
    order = torch.sort(likely, descending=True).indices
    before = nodes[order].cumsum(0) - nodes[order]
    return float((likely[order] * (most - before).clamp(min=0).minimum(nodes[order])).sum())
