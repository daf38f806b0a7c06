"""What ``estimate`` says before a run is what ranks then count: by kind, and message by message, for every option."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.datasets import load
from polyhop.exchange.crossing import DIRECTIONS, Direction
from polyhop.graph import Graph, Sizes
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.strategies import Team, halo, place
from polyhop.strategies.halo_cost import Facts, account, crossed, crossings, estimate, expected
from polyhop.strategies.halo_estimate import Pairs, facts_of, facts_of_pairs, facts_of_rows
from polyhop.strategies.halo_plan import GraphSizes, Plan
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
SEEDING = threading.Lock()
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gcn": lambda f, c: nn.GCN(f, 16, num_layers=3, out_channels=c),
    "gcn-batch": lambda f, c: nn.GCN(f, 16, num_layers=3, out_channels=c, norm="batch"),
    "sage": lambda f, c: nn.GraphSAGE(f, 16, num_layers=3, out_channels=c),
    "sage-narrow": lambda f, c: nn.GraphSAGE(f, 4, num_layers=2, out_channels=c),
    "gat": lambda f, c: nn.GAT(f, 8, num_layers=3, out_channels=c, heads=2),
    "deepgcn": lambda f, c: nn.DeepGCN(f, 12, num_layers=3, out_channels=c),
}
PERIOD = {"bits_period": 3}
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "without sums": {"halo_sums": False},
    "naive": {"naive_halo": True},
    "16 bits": {"bits": 16},
    "8 bits": {"bits": 8},
    "2 bits": {"bits": 2},
    "delta": {"bits": "delta"},
    "random": {"bits": "random", **PERIOD},
    "stale": {"halo": "stale"},
    "sampled": {"halo": "sampled", "halo_share": 0.3},
    "sampled, 4 bits": {"halo": "sampled", "halo_share": 0.3, "bits": 4},
    "sequential": {"halo": "sequential"},
    "sequential, 8 bits": {"halo": "sequential", "bits": 8},
    "skipping": {"halo": "skipping", "halo_age": 1},
}


Place = tuple[int, str, int]  # layer, direction, peer


@dataclass(frozen=True)
class Run:
    """Steps that are counted, and those before."""

    before: int = 1
    steps: int = 1
    precision: str = "32-true"


CHOSEN = Run(before=4, steps=3)  # a period after the first choice of widths


def model_of(name: str, graph: Graph, precision: str = "32-true") -> torch.nn.Module:
    with SEEDING:
        torch.manual_seed(7)
        model = MODELS[name](graph.num_features, graph.num_classes).train()
        return model.to(place("cpu", precision).dtype)


def config_of(options: dict[str, Any]) -> halo.Config:
    given = Trainer("halo", device="cpu", progress="none", **options)
    return halo.Config(**{f.name: getattr(given, f.name) for f in fields(halo.Config)})


class Watched:
    """A channel's line that notes what leaves by it."""

    def __init__(self, channel: Any, noted: Counter[Place]) -> None:
        self._line, self._channel, self._noted = channel.line, channel, noted
        self._direction: Direction = "forward"
        for direction in DIRECTIONS:
            self._follow(f"begin_{direction}", direction)

    def _follow(self, name: str, direction: Direction) -> None:
        begin = getattr(self._channel, name)

        def begun(*given: Any) -> None:
            self._direction = direction
            begin(*given)

        setattr(self._channel, name, begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    def start_all_to_all(self, pieces: list[Tensor], **given: Any) -> Any:
        for peer, piece in enumerate(pieces):
            if peer != self._line.rank and piece.numel():
                place = (self._channel.spans.layer, self._direction, peer)
                self._noted[place] += piece.numel() * piece.element_size()
        return self._line.start_all_to_all(pieces, **given)


@dataclass
class Counted:
    """Of a step, on average: what left, and bytes of rows by layer, direction and peer."""

    sent: Cost
    by_message: dict[Place, float]


def built(
    line: Collective,
    graph: Graph,
    owner: Tensor,
    name: str,
    options: dict[str, Any],
    precision: str = "32-true",
) -> tuple[Any, torch.nn.Module]:
    """A rank's step and its model."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    config, team, model = config_of(options), Team(line), model_of(name, graph, precision)
    whole = halo.hold(held, place("cpu", precision), team, config)
    assert held.split is not None
    assert isinstance(held.y, Tensor)
    train = held.split.train[held.y[held.split.train] >= 0]
    step = halo.build(model, held, config, train_ids=train, whole=whole, loss=cross_entropy_sum, team=team)
    return step, model


def on_rank(
    line: Collective, graph: Graph, owner: Tensor, name: str, options: dict[str, Any], run: Run
) -> Counted:
    step, _ = built(line, graph, owner, name, options, run.precision)
    for epoch in range(run.before):
        step.gradients(0, Key(3, epoch))
    noted: Counter[Place] = Counter()
    for channel in step._channels.channels:
        channel.line = Watched(channel, noted)
    line.barrier()
    before = line.traffic.now()
    for epoch in range(run.before, run.before + run.steps):
        step.gradients(0, Key(3, epoch))
    sent = line.traffic.now() - before
    step.close()
    return Counted(sent * (1 / run.steps), {where: size / run.steps for where, size in noted.items()})


def compared(
    graph: Graph, owner: Tensor, name: str, options: dict[str, Any], run: Run | None = None, **more: Any
) -> list[tuple[Counted, Facts]]:
    """What each rank counted, and what was known before."""
    run, num_ranks = run or Run(), int(owner.max()) + 1
    placement = place("cpu", run.precision)
    parts, config = Partition(owner, num_ranks), config_of(options)
    facts = facts_of(graph, parts, model_of(name, graph, run.precision), config, placement=placement, **more)
    return [(each, facts) for each in run_in_threads(num_ranks, on_rank, graph, owner, name, options, run)]


def assert_equal(found: list[tuple[Counted, Facts]]) -> None:
    """Where nothing is random: every kind, and every message, to the byte."""
    for rank, (counted, facts) in enumerate(found):
        said = estimate(facts, rank)
        assert dict(said.bytes) == pytest.approx(dict(counted.sent.bytes), rel=1e-9)
        assert dict(said.messages) == pytest.approx(dict(counted.sent.messages), rel=1e-9)
        messages = {(each.layer, each.direction, each.peer): each.num_bytes for each in expected(facts, rank)}
        assert messages == pytest.approx(counted.by_message, rel=1e-9)


def worst(found: list[tuple[Counted, Facts]], kind: str = "hidden") -> float:
    """The largest relative error of a rank."""
    return max(
        abs(estimate(facts, rank).bytes[kind] / counted.sent.bytes[kind] - 1)
        for rank, (counted, facts) in enumerate(found)
    )


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [
        *((way, 4) for way in WAYS),
        *((way, 2) for way in ("exact", "without sums", "naive", "sampled", "2 bits")),
    ],
)
def test_the_estimate_is_what_is_counted(make_graph: MakeGraph, way: str, num_ranks: int) -> None:
    graph, run = make_graph(), CHOSEN if way in ("random", "sampled") else Run()
    assert_equal(compared(graph, partition(graph, num_ranks, "hash").owner, "sage", WAYS[way], run))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gcn", "exact"),
        ("gcn", "naive"),
        ("gcn", "2 bits"),
        ("gcn", "sequential"),
        ("gat", "exact"),
        ("gat", "naive"),
        ("gat", "8 bits"),
        ("sage-narrow", "sequential"),  # input rows are mapped before they cross, so gradients return
        ("gcn-batch", "exact"),
        ("deepgcn", "sequential"),
        ("deepgcn", "naive"),
    ],
)
def test_other_models(make_graph: MakeGraph, name: str, way: str) -> None:
    graph = make_graph()
    assert_equal(compared(graph, partition(graph, 3, "hash").owner, name, WAYS[way]))


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["sage", "gat"])
def test_other_numbers(make_graph: MakeGraph, name: str, precision: str) -> None:
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    assert_equal(compared(graph, owner, name, {}, Run(precision=precision)))


@pytest.mark.parametrize("way", ["exact", "without sums", "sequential"])
def test_few_train_nodes_and_unlike_parts(make_graph: MakeGraph, way: str) -> None:
    """Rows that the loss does not read stay, of nodes without a label too; edges one way only; some parts hold little."""
    graph = directed(make_graph())
    assert graph.split is not None
    assert isinstance(graph.y, Tensor)
    train, y = graph.split.train[-5:], graph.y.clone()
    y[train[0]] = -1
    graph = replace(graph, y=y, split=replace(graph.split, train=train))
    nodes = torch.arange(graph.num_nodes)
    owner = torch.where(nodes % 5 == 4, nodes % 3, 0).int()
    found = compared(graph, owner, "gcn", WAYS[way])
    assert_equal(found)
    first, last = (
        sum(float(each.rows.sum()) for each in found[0][1].layers if each.layer == at) for at in (1, 2)
    )
    assert 0 < last < 0.8 * first


def directed(graph: Graph) -> Graph:
    """The same nodes, two of three edges, and not their reverse."""
    src = graph.indices.long()
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())
    keep = (src + 2 * dst) % 3 != 0
    indptr = torch.zeros_like(graph.indptr)
    indptr[1:] = torch.bincount(dst[keep], minlength=graph.num_nodes).cumsum(0)
    return replace(graph, indptr=indptr, indices=graph.indices[keep])


def test_sums_save(make_graph: MakeGraph) -> None:
    """What the estimate would miss if it did not know of them."""
    graph = make_graph()
    parts = partition(graph, 4, "hash")
    for name, most in (("sage", 0.9), ("gat", 1.0)):
        exact, plain = (
            facts_of(graph, parts, model_of(name, graph), config_of(WAYS[way]))
            for way in ("exact", "without sums")
        )
        ratio = estimate(exact, 0).bytes["hidden"] / estimate(plain, 0).bytes["hidden"]
        assert ratio < most or ratio == most == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gcn", {"bits_group": 4}),
        ("gcn", {"bits_group": 100}),
        ("sage", {"bits_group": 4}),
        ("sage", {"bits_group": 4, "bits_lambda": 0.05}),
        ("gat", {"bits_group": 4, "bits_lambda": 0.98}),
    ],
)
def test_widths_that_will_be_chosen(make_graph: MakeGraph, name: str, options: dict[str, Any]) -> None:
    graph = make_graph()
    given = {"bits": "adaptive", **PERIOD, **options}
    found = compared(graph, partition(graph, 2, "hash").owner, name, given, CHOSEN)
    assert worst(found) < 0.25
    assert worst(found, "widths") < 1e-9


@pytest.mark.parametrize("is_alike", [False, True])
@pytest.mark.parametrize("bits", ["adaptive", "random"])
def test_less_than_half_a_row_is_not_free(bits: str, is_alike: bool) -> None:
    """Where ranks are many, few rows are expected between two of them: messages are those of 8 bits, their sizes alike."""
    model, messages = nn.GCN(24, 16, num_layers=3, out_channels=5), []
    for given in (bits, 8):
        options = config_of({"bits": given})
        plan = Plan.of(model, options, GraphSizes(2700, 10_000, 24, is_sparse=False))
        rows = [0.3 * (1 - torch.eye(6, dtype=torch.float64)) * bool(seen.columns) for seen in plan.seen]
        messages.append(expected(facts_of_rows(model, options, plan, rows, is_alike=is_alike), rank=0))
    chosen, eight = messages
    assert len(chosen) == len(eight) > 0
    assert all(0.2 < a.num_bytes / b.num_bytes < 5 for a, b in zip(chosen, eight, strict=True))


def test_a_mean_width_may_be_given(make_graph: MakeGraph) -> None:
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    found = compared(graph, owner, "sage", {"bits": "adaptive"}, mean_bits=8)
    assert worst(found) == 0  # before any choice


def accounted(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]) -> tuple[float, float]:
    """Bytes of rows that a step sends, and what is said to."""
    step, model = built(line, graph, owner, "sage", options)
    naive = config_of(options).naive_halo
    sizes = Sizes(graph.num_nodes, graph.num_nodes, graph.num_edges if naive else 1 << 40)
    seen = crossings(model, graph.num_features, sizes, num_plain=0, sends_narrow=not naive)
    before = line.traffic.now()
    step.gradients(0, Key(3))
    sent = (line.traffic.now() - before).bytes["hidden"]
    messages = crossed(step._channels.channels, seen=seen)
    step.close()
    return sent, account(messages, [1], 4, line.num_ranks, line.rank).bytes["hidden"]


@pytest.mark.parametrize("way", ["naive", "sequential"])
def test_the_account_knows_which_rows_need_no_gradients(make_graph: MakeGraph, way: str) -> None:
    graph = make_graph()
    for sent, said in run_in_threads(2, accounted, graph, partition(graph, 2, "hash").owner, WAYS[way]):
        assert sent == said


def test_skipping_sends_at_most_so_much(make_graph: MakeGraph) -> None:
    graph = make_graph()
    way = {"halo": "skipping", "halo_drift": 1e9, "halo_age": 100}
    for rank, (counted, facts) in enumerate(compared(graph, partition(graph, 2, "hash").owner, "sage", way)):
        said = estimate(facts, rank)
        assert said.bytes["sizes"] == counted.sent.bytes["sizes"]
        assert 0.45 * said.bytes["hidden"] < counted.sent.bytes["hidden"] < 0.55 * said.bytes["hidden"]


def pairs_of(graph: Graph, parts: Partition, **more: Any) -> Pairs:
    owner, src = parts.owner.long(), graph.indices.long()
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())
    cut = owner[src] != owner[dst]
    read = torch.unique(src[cut] * parts.num_parts + owner[dst[cut]])
    rows = torch.zeros(parts.num_parts, parts.num_parts, dtype=torch.int64)
    rows.index_put_(
        (owner[read // parts.num_parts], read % parts.num_parts), torch.tensor(1), accumulate=True
    )
    assert graph.split is not None
    return Pairs(
        rows, graph.num_nodes, graph.num_edges, graph.num_features, readers=int(cut.sum()) / read.numel(),
        train_share=graph.split.train.numel() / graph.num_nodes,
        **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("way", "num_train", "error"),
    [*((way, 100, 0.25) for way in WAYS), ("exact", 10, 0.5), ("without sums", 10, 0.5)],
)
def test_few_numbers_of_each_pair_are_nearly_enough(
    make_graph: MakeGraph, way: str, num_train: int, error: float
) -> None:
    """Against the counted facts; the share that sums leave is known."""
    graph, config = make_graph(), config_of(WAYS[way])
    assert graph.split is not None
    graph = replace(graph, split=replace(graph.split, train=graph.split.train[-num_train:]))
    parts, model = partition(graph, 3, "hash"), model_of("sage", graph)
    exact = facts_of(graph, parts, model, config)
    rough = facts_of_pairs(pairs_of(graph, parts, sums_share=0.9), model, config)
    for counted, guessed in zip(exact.layers, rough.layers, strict=True):
        assert float(guessed.rows.sum()) == pytest.approx(float(counted.rows.sum()), rel=error)
    for rank in range(3):
        one, other = estimate(exact, rank), estimate(rough, rank)
        assert one.bytes.keys() == other.bytes.keys()
        assert other.bytes["hidden"] == pytest.approx(one.bytes["hidden"], rel=error)
        assert len(expected(exact, rank)) == len(expected(rough, rank))


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("minesweeper", "exact"),
        ("minesweeper", "without sums"),
        ("minesweeper", "naive"),
        ("minesweeper", "sampled"),
        ("minesweeper", "sequential"),
        ("cora", "sequential"),  # sparse input rows stay where they are
        ("cora", "2 bits"),
    ],
)
def test_a_real_graph(data_dir: Path, name: str, way: str) -> None:
    graph = load(name, data_dir=data_dir)
    owner = partition(graph, 4, "ldg").owner
    assert_equal(compared(graph, owner, "gcn", WAYS[way], Run(before=0)))


@pytest.mark.realdata
def test_widths_that_will_be_chosen_on_a_real_graph(data_dir: Path) -> None:
    graph = load("minesweeper", data_dir=data_dir)
    found = compared(
        graph, partition(graph, 2, "ldg").owner, "sage", {"bits": "adaptive", "bits_period": 2}, Run(3, 2)
    )
    assert worst(found) < 0.25
