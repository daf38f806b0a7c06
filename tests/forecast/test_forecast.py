"""What strategies are foreseen to send is what they send; times follow the links and the cores; parts make up the whole."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.datasets.synth import generate
from polyhop.forecast import Question, Training, labelled, look_at, predictions
from polyhop.graph import Graph, SparseFeatures, SparseRows
from polyhop.nn import GAT, GCN, GCNII, GraphSAGE
from polyhop.partition import Partition, partition, share
from polyhop.plan import Law, Link, Prediction, load_machine
from polyhop.planner import inputs_of, training_of
from polyhop.strategies import Team, find, place
from polyhop.trace import Trace
from polyhop.train import loop
from polyhop.train.loss import cross_entropy_sum
from polyhop.train.optim import build_optimizer
from polyhop.train.state import Session
from polyhop.trainer import Trainer

FAST, SLOW = Link(1e9, 1e-4), Link(1e6, 1e-4)
LAW = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return generate("sbm:?nodes=1500&classes=5&p_in=0.02&p_out=0.001&features=24&seed=3")


def sparse(graph: Graph) -> Graph:
    rows = torch.arange(0, 4 * graph.num_nodes + 1, 4)
    columns = torch.randint(50, (4 * graph.num_nodes,), generator=torch.Generator().manual_seed(1)).int()
    return replace(graph, x=SparseFeatures(SparseRows(rows, columns, torch.ones(columns.numel()), 50)))


def asked(
    graph: Graph,
    model: torch.nn.Module,
    parts: Partition,
    fan_outs: list[int] | None = None,
    link: Link = FAST,
    **more: Any,
) -> Question:
    size = more.pop("batch_size", 256) if fan_outs else None
    trainer = Trainer("auto", num_neighbors=fan_outs, batch_size=size, **more)
    training = training_of(model, graph, trainer, inputs_of(graph), labelled(graph).numel())
    machine = load_machine()
    assert machine is not None
    return Question(training, look_at(graph, parts, training), parts.num_parts, machine, link, LAW, 1.0)


def by_name(question: Question) -> dict[str, Prediction]:
    return {each.name: each for each in predictions(question)}


def sent(
    line: Collective, graph: Graph, parts: Partition, model: Any, given: Prediction, options: dict[str, Any]
) -> Cost:
    """What this rank counts in the second epoch."""
    torch.manual_seed(0)
    held, net = share(graph, parts, line.rank), model()
    trainer = Trainer(given.strategy, **{**options, **given.options})
    strategy = find(given.strategy)
    config = strategy.Config(**{f.name: getattr(trainer, f.name) for f in fields(strategy.Config)})
    team, placement = Team(line), place("cpu", "32-true")
    step = strategy.build(
        net, held, config, train_ids=labelled(held), whole=strategy.hold(held, placement, team, config),
        loss=cross_entropy_sum, team=team,
    )  # fmt: skip
    session = Session(net, build_optimizer("adam", net, lr=0.01), step)
    tools = loop.Tools(
        set_lr=lambda _: 0.01, evaluate=dict, save=lambda: None, on_step=lambda *_: None,
        on_epoch=lambda _: False, stop=lambda: None, trace=Trace(),
    )  # fmt: skip
    loop.train(session, loop.Options(1, 0), tools)
    before = line.traffic.now()
    loop.train(session, loop.Options(3, 0), tools)
    found = (line.traffic.now() - before) * 0.5
    getattr(step, "close", lambda: None)()
    return found


def models(features: int, classes: int) -> dict[str, Any]:
    return {
        "gcn": lambda: GCN(features, 16, 2, out_channels=classes, dropout=0.5),
        "sage": lambda: GraphSAGE(features, 16, 3, out_channels=classes),
        "gat": lambda: GAT(features, 8, 2, out_channels=classes, heads=2),
        "gcnii": lambda: GCNII(features, 16, 4, out_channels=classes),
    }


def one_way(graph: Graph) -> Graph:
    """Only edges from lower ids: what a part sends is not what it reads."""
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degree)
    is_kept = graph.indices.long() < dst
    degree = torch.zeros(graph.num_nodes + 1, dtype=torch.int64)
    degree[1:] = torch.bincount(dst[is_kept], minlength=graph.num_nodes).cumsum(0)
    return replace(graph, indptr=degree, indices=graph.indices[is_kept])


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gcnii"])
@pytest.mark.parametrize("is_directed", [False, True])
def test_bytes_of_the_full_graph_are_exact(graph: Graph, kind: str, is_directed: bool) -> None:
    graph = one_way(graph) if is_directed else graph
    parts = partition(graph, 3, "block" if is_directed else "hash")
    make = models(graph.num_features, graph.num_classes)[kind]
    found = by_name(asked(graph, make(), parts))
    for name in ("halo", "halo, layers computed again", "halo, 8 bits"):
        given = found[name]
        counted = run_in_threads(3, sent, graph, parts, make, given, {})
        busiest = max(counted, key=lambda cost: cost.only("hidden", "gradients").total_bytes)
        for sort in ("hidden", "gradients"):
            assert given.sent.get(sort, 0) == pytest.approx(busiest.bytes.get(sort, 0), rel=1e-9), (
                name,
                sort,
            )


@pytest.mark.parametrize(("kind", "batch_size"), [("gcn", 256), ("sage", 256), ("gat", 256), ("gcn", 5000)])
def test_bytes_of_mini_batches_within_a_tenth(graph: Graph, kind: str, batch_size: int) -> None:
    """5000: one mini-batch of all train nodes, of which there are fewer."""
    parts = partition(graph, 3, "hash")
    make = models(graph.num_features, graph.num_classes)[kind]
    fan_outs = [5] * make().num_layers
    found = by_name(asked(graph, make(), parts, fan_outs, batch_size=batch_size))
    options = {"num_neighbors": fan_outs, "batch_size": batch_size}
    assert {each.strategy for each in found.values()} == {"data", "split", "pushpull", "macro"}
    for given in found.values():
        counted = run_in_threads(3, sent, graph, parts, make, given, options)
        most = max(cost.total_bytes for cost in counted)
        if given.strategy == "macro":  # its pool is warmer in the second epoch than on average over the run
            assert given.sent_bytes <= 1.5 * most
        else:
            assert given.sent_bytes == pytest.approx(most, rel=0.1), given.name


@pytest.mark.parametrize("fan_outs", [None, [5, 5]])
def test_a_slow_link_makes_everything_slower(graph: Graph, fan_outs: list[int] | None) -> None:
    parts = partition(graph, 4, "hash")
    make = models(graph.num_features, graph.num_classes)["gcn"]
    fast, slow = (by_name(asked(graph, make(), parts, fan_outs, link)) for link in (FAST, SLOW))
    for name in set(fast) & set(slow):
        assert slow[name].epoch_s > fast[name].epoch_s, name


def test_fewer_bits_pay_on_a_slow_link_and_exact_ones_are_marked(graph: Graph) -> None:
    parts = partition(graph, 4, "hash")
    found = by_name(asked(graph, models(graph.num_features, graph.num_classes)["gcn"](), parts, link=SLOW))
    assert found["halo, 4 bits"].epoch_s < found["halo, 8 bits"].epoch_s < found["halo"].epoch_s
    assert found["halo"].is_exact
    assert not found["halo, 4 bits"].is_exact
    assert not found["halo, stale"].is_exact
    exact = [each for each in found.values() if each.strategy == "pipeline" and each.is_exact]
    assert exact
    assert all(each.options["chunks"] == 4 // each.options["stages"] for each in exact)


def test_what_an_exchange_takes_is_hidden_by_nothing(graph: Graph) -> None:
    """On a link without limits what is left of an exchange is processors' time, of exact and of stale rows alike."""
    of = models(graph.num_features, graph.num_classes)["gcn"]
    question = asked(graph, of(), partition(graph, 4, "hash"), link=Link(1e15, 0.0))
    dear = replace(question.machine, message_s=2e-3 + question.machine.message_s)
    found, slower = by_name(question), by_name(replace(question, machine=dear))
    # of a rank, 2 ms for each of three peers, both ways of one layer between: 12 ms; gradients go by other ways
    assert slower["halo"].epoch_s - found["halo"].epoch_s == pytest.approx(0.012, rel=1e-6)
    assert slower["halo, stale"].epoch_s - found["halo, stale"].epoch_s == pytest.approx(0.012, rel=1e-6)
    crowded = by_name(replace(question, crowding=2.0))
    assert crowded["halo"].epoch_s == pytest.approx(2 * found["halo"].epoch_s, rel=1e-6)


def test_stale_rows_hide_behind_all_computing(graph: Graph) -> None:
    of = models(graph.num_features, graph.num_classes)["gcn"]
    parts = partition(graph, 4, "hash")
    for link in (FAST, Link(1e7, 1e-4), SLOW):
        found = by_name(asked(graph, of(), parts, link=link))
        assert found["halo, stale"].epoch_s <= found["halo"].epoch_s * 1.001


def test_smaller_pieces_read_more_rows_and_never_more_than_there_are(graph: Graph) -> None:
    cut = asked(graph, models(24, 5)["gcn"](), partition(graph, 4, "hash")).sight.cut
    read = [cut.replicas_of(pieces) for pieces in (2, 4, 8, 16, 64, 500)]
    assert read == sorted(read)
    assert read[1] == cut.replicas
    assert read[-1] <= graph.num_edges / graph.num_nodes  # a row for every edge
    for pieces in (8, 16):  # a graph by chance, cut by chance
        found = asked(graph, models(24, 5)["gcn"](), partition(graph, pieces, "hash")).sight.cut.replicas
        assert cut.replicas_of(pieces) == pytest.approx(found, rel=0.35), pieces


def test_loading_waits_for_its_turn_where_threads_share_cores(graph: Graph) -> None:
    question = asked(graph, models(24, 5)["gcn"](), partition(graph, 2, "hash"), [5, 5])
    alone = replace(question, crowding=0.5)
    for name, given in by_name(question).items():
        if name in (other := by_name(alone)):
            assert given.epoch_s > other[name].epoch_s, name


def test_computing_again_takes_longer_and_less_memory(graph: Graph) -> None:
    found = by_name(
        asked(graph, models(graph.num_features, graph.num_classes)["sage"](), partition(graph, 2, "hash"))
    )
    plain, again = found["halo"], found["halo, layers computed again"]
    assert again.epoch_s > plain.epoch_s
    assert again.memory.training <= plain.memory.training  # of two layers it spares nothing (test_memory)


def test_more_ranks_need_less_memory_each(graph: Graph) -> None:
    make = models(graph.num_features, graph.num_classes)["gcn"]
    two, eight = (by_name(asked(graph, make(), partition(graph, ranks, "hash")))["halo"] for ranks in (2, 8))
    assert eight.memory.training < two.memory.training


def test_deep_models_have_stages_and_shallow_ones_no_more_than_layers(graph: Graph) -> None:
    parts = partition(graph, 4, "hash")
    of = models(graph.num_features, graph.num_classes)
    deep = {
        each.options["stages"]
        for each in predictions(asked(graph, of["gcnii"](), parts))
        if each.strategy == "pipeline"
    }
    shallow = {
        each.options["stages"]
        for each in predictions(asked(graph, of["gcn"](), parts))
        if each.strategy == "pipeline"
    }
    assert deep == {2, 4}
    assert shallow == {2}


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gcnii"])
def test_bytes_of_stages_are_exact_and_of_ways_within_a_tenth(graph: Graph, kind: str) -> None:
    """One way: every row crosses. Several: parts for them are cut later, rows between them are foreseen from the parts."""
    pytest.importorskip("pymetis")
    parts = partition(graph, 4, "metis")
    make = models(graph.num_features, graph.num_classes)[kind]
    ways = [each for each in by_name(asked(graph, make(), parts)).values() if each.strategy == "pipeline"]
    assert len(ways) >= 3
    for given in ways:
        counted = run_in_threads(4, sent, graph, parts, make, given, {"layer_costs": "counted"})
        found = [cost.only("hidden", "gradients") for cost in counted]
        most = max(cost.total_bytes for cost in found)
        is_hybrid = "ways" in given.name
        assert given.sent_bytes == pytest.approx(most, rel=0.1 if is_hybrid else 1e-3), given.name
        # The loss and two more numbers are summed with the weights: some tens of bytes to each of three peers.
        gradients = {cost.bytes.get("gradients", 0) for cost in found}
        assert any(given.sent.get("gradients", 0) == pytest.approx(each, abs=200) for each in gradients), (
            given.name
        )


@pytest.mark.parametrize("num_groups", [2, 4])
def test_parts_that_are_joined_read_what_parts_made_for_that_number_do(graph: Graph, num_groups: int) -> None:
    pytest.importorskip("pymetis")
    of = models(graph.num_features, graph.num_classes)["gcn"]
    cut = asked(graph, of(), partition(graph, 8, "metis")).sight.cut
    made = asked(graph, of(), partition(graph, num_groups, "metis")).sight.cut
    assert cut.replicas_of(num_groups) == pytest.approx(made.replicas, rel=0.15)
    assert cut.replicas_of(1) == 0
    assert cut.replicas_of(num_groups) <= num_groups - 1


def test_batch_norm_is_for_halo_alone(graph: Graph) -> None:
    normed = GCN(graph.num_features, 16, 3, out_channels=graph.num_classes, norm="batch")
    assert {each.strategy for each in predictions(asked(graph, normed, partition(graph, 2, "hash")))} <= {
        "halo",
        "serverless",
    }


@pytest.mark.parametrize("fan_outs", [None, [4, 4]])
def test_sparse_inputs(graph: Graph, fan_outs: list[int] | None) -> None:
    given = sparse(graph)
    question = asked(
        given, GCN(50, 8, 2, out_channels=given.num_classes), partition(given, 2, "hash"), fan_outs
    )
    assert question.training.inputs.row_length == 4.0
    found = list(predictions(question))
    assert all(each.epoch_s > 0 for each in found)
    assert "pushpull" not in {each.strategy for each in found}, "columns of sparse rows are not cut"


@pytest.mark.parametrize("fan_outs", [None, [5, 5]])
def test_one_process(graph: Graph, fan_outs: list[int] | None) -> None:
    whole = Partition(torch.zeros(graph.num_nodes, dtype=torch.int32), 1)
    (only,) = predictions(
        asked(graph, models(graph.num_features, graph.num_classes)["gcn"](), whole, fan_outs)
    )
    assert only.strategy == "single"
    assert only.sent_bytes == 0


def test_features_are_not_looked_at(graph: Graph) -> None:
    class Unread:
        num_rows, num_features = graph.num_nodes, graph.num_features

        def gather(self, ids: torch.Tensor) -> torch.Tensor:
            raise AssertionError("features were read")

        def all(self) -> torch.Tensor:
            raise AssertionError("features were read")

    training = Training(
        GCN(24, 8, 2, out_channels=graph.num_classes), inputs_of(graph), graph.num_nodes, graph.num_edges, 100
    )
    for given in (training, replace(training, num_neighbors=[3, 3])):
        assert look_at(replace(graph, x=Unread()), partition(graph, 2, "hash"), given).cut.num_parts == 2


def test_rows_between_parts_are_those_that_one_reads_of_the_other(graph: Graph) -> None:
    graph = one_way(graph)
    parts = partition(graph, 3, "block")
    model = GAT(24, 8, 2, out_channels=graph.num_classes, norm="batch")  # no sums, and every row is read
    sight = asked(graph, model, parts).sight
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degree)
    src, owner = graph.indices.long(), parts.owner.long()
    for sender in range(3):
        for reader in range(3):
            is_theirs = (owner[src] == sender) & (owner[dst] == reader)
            count = torch.unique(src[is_theirs]).numel() if sender != reader else 0
            assert sight.cut.halo[sender, reader] == count, (sender, reader)
            assert all(layer.rows[sender, reader] == count for layer in sight.layers), (sender, reader)
    assert sight.cut.halo[0, 2] > 0
    assert sight.cut.halo[2, 0] == 0, "edges go one way"
