"""Pre-sampled partitions on fresh mini-batches: few edges between owners, even work, few rows; and what redundancy they end.

The figures are those that GSplit's idea must reach on graphs of known structure: DC-SBM graphs of 64 blocks, and R-MAT.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyhop.datasets.synth import generate
from polyhop.errors import ConfigError, PartitionError
from polyhop.graph import Graph, Split
from polyhop.kernels.synth import Communities, permutation, synth_edges
from polyhop.partition import Partition, partition, quality
from polyhop.sample import NeighbourSampler
from polyhop.sample.presample import Trial, presample
from polyhop.sample.splitting import SplitQuality, judge, presampled, redundancy
from polyhop.strategies.split_cost import asked

PARTS = 4
FAN_OUTS = [10, 10, 10]


def _blocks(
    num_nodes: int, *, fields: int = 64, in_field: float = 0.0, train: str = "anywhere", seed: int = 1
) -> Graph:
    """64 blocks of skewed degrees, 13 edges a node, 15 % of pairs outside their block. ``y`` says the field.

    64 / fields blocks make a field, inside which ``in_field`` of all pairs fall beside those inside a block. A tenth of the
    nodes train; or those of the ``first`` field; or of 8 blocks ("apart").
    """
    start = tuple(c * num_nodes // fields for c in range(fields + 1))
    recipe = Communities(
        seed, num_nodes, start, (64 // fields,) * fields, in_group=0.85, in_class=in_field, power=3,
        class_floor=1 / 30, group_floor=1 / 30,
    )  # fmt: skip
    node_of = permutation(seed + 1, num_nodes)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=num_nodes * 13 // 2)
    y = torch.empty(num_nodes, dtype=torch.int64)
    y[node_of.long()] = torch.repeat_interleave(torch.arange(fields), torch.tensor(start).diff())
    order = permutation(seed + 4, num_nodes).long()
    order = order[y[order] < {"anywhere": fields, "first": 1, "apart": 8}[train]]
    ids = order[: num_nodes // 10]
    return Graph(indptr, indices, y=y, split=Split.of(num_nodes, ids), num_classes=fields, name="blocks")


def _rmat(levels: int) -> Graph:
    graph = generate(f"rmat:?scale={levels}&edge_factor=12&a=0.57&b=0.19&c=0.19")
    return replace(
        graph,
        split=Split.of(graph.num_nodes, permutation(5, graph.num_nodes)[: graph.num_nodes // 10].long()),
    )


def _by_hand(trial: Trial, made: Partition, num_batches: int) -> tuple[float, float, list[float]]:
    """(cut, mean balance of a mini-batch, rows a layer), edge by edge; rows by the accounts of strategy split."""
    sampler = NeighbourSampler(trial.graph, trial.num_neighbors, seed=trial.key_seed, method=trial.sampler)
    far = total = 0
    balance, rows = 0.0, [0.0] * len(trial.num_neighbors)
    for i in range(num_batches):
        epoch, step = divmod(i, len(trial))
        batch = sampler.sample(trial.seeds(epoch)[step], epoch, step)
        load = [0] * made.num_parts
        for block in batch.blocks:
            owner = made.owner[block.src_ids].tolist()
            for v in range(block.num_dst):
                for u in block.indices[block.indptr[v] : block.indptr[v + 1]].tolist():
                    load[owner[v]] += 1
                    far += owner[u] != owner[v]
        total += sum(load)
        balance += max(load) / (sum(load) / len(load))
        for message in asked(batch, made.new_ids, made.bounds):
            rows[message.layer] += message.rows.numel()
    return far / total, balance / num_batches, [each / num_batches for each in rows]


def test_quality_is_that_of_the_mini_batches(make_graph) -> None:
    graph = make_graph(150)
    trial, made = Trial(graph, [4, 3], 16, seed=2, site=1), partition(graph, 3, "fennel")
    num_batches = len(trial) + 1
    found = judge(trial, made, num_batches)
    cut, balance, rows = _by_hand(trial, made, num_batches)
    assert found.cut == pytest.approx(cut)
    assert found.batch_balance == pytest.approx(balance)
    assert list(found.rows) == pytest.approx(rows)
    counts = presample(trial, num_batches=num_batches)
    load = torch.zeros(3, dtype=torch.int64).index_add_(0, made.owner.long(), counts.dst)
    inputs = torch.zeros(3, dtype=torch.int64).index_add_(0, made.owner.long(), counts.inputs)
    assert found.load_balance == pytest.approx(3 * int(load.max()) / int(load.sum()))
    assert found.input_balance == pytest.approx(3 * int(inputs.max()) / int(inputs.sum()))
    lot = judge(trial, partition(graph, 3, "hash", seed=trial.key_seed), num_batches)
    assert (found.chance_cut, found.chance_rows) == (lot.cut, lot.rows)
    assert lot.row_share == 1.0


def test_a_pure_function_of_its_arguments(make_graph) -> None:
    graph = make_graph(150)
    first, again, other = (presampled(graph, 3, [4, 3], 16, method="fennel", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.partition.owner, again.partition.owner)
    assert first.quality == again.quality
    assert first.quality != other.quality
    assert (first.partition.method, first.partition.seed, first.partition.num_parts) == ("fennel", 0, 3)


def test_it_is_judged_by_batches_that_it_has_not_seen(make_graph) -> None:
    graph = make_graph(150)
    made = presampled(graph, 3, [4, 3], 16, method="fennel", num_batches=2, judged=2)
    seen = judge(Trial(graph, [4, 3], 16, site=0), made.partition, 2)
    fresh = judge(Trial(graph, [4, 3], 16, site=1), made.partition, 2)
    assert made.quality == fresh != seen


@pytest.mark.parametrize("method", ["metis", "fennel"])
@pytest.mark.parametrize("num_nodes", [12_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_cut_of_a_community_graph(method: str, num_nodes: int) -> None:
    """At random 1 - 1/P of the edges cross; a partition finds the blocks, and rows follow."""
    if method == "metis":
        pytest.importorskip("pymetis")
    graph = _blocks(num_nodes)
    found = presampled(graph, PARTS, FAN_OUTS, num_nodes // 60, method=method).quality
    assert found.chance_cut == pytest.approx(1 - 1 / PARTS, abs=0.01)
    assert found.cut <= 0.16
    assert found.row_share <= 0.30
    assert found.batch_balance <= 1.25


@pytest.mark.parametrize("method", ["metis", "fennel"])
@pytest.mark.parametrize("num_nodes", [12_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_a_train_set_in_one_corner(method: str, num_nodes: int) -> None:
    """As papers: training nodes lie in 8 of 64 blocks that belong together. Even parts leave most work to one of them."""
    if method == "metis":
        pytest.importorskip("pymetis")
    graph = _blocks(num_nodes, fields=8, in_field=0.08, train="first")
    size = num_nodes // 60
    trial, fresh = Trial(graph, FAN_OUTS, size), Trial(graph, FAN_OUTS, size, site=1)
    even = judge(fresh, partition(replace(graph, split=None), PARTS, method), 6)
    assert even.batch_balance >= 2.0
    made = presampled(graph, PARTS, FAN_OUTS, size, method=method)
    assert made.quality.batch_balance <= 1.25
    assert made.quality.load_balance <= 1.1
    without = judge(fresh, partition(graph, PARTS, method, node_weight=presample(trial).load), 6)
    assert without.batch_balance <= 1.25
    assert made.quality.cut <= without.cut
    assert (
        made.quality.input_balance < without.input_balance
    )  # edges that may be drawn keep rows together, too


def test_blocks_that_train_are_spread() -> None:
    """Blocks without fields: owners by whole blocks in order are even in nodes, and as uneven as can be in work."""
    pytest.importorskip("pymetis")
    graph = _blocks(12_000, train="apart")
    assert graph.y is not None
    planted = Partition((graph.y * PARTS // 64).int(), PARTS)
    assert quality(graph, planted).node_balance < 1.01
    assert judge(Trial(graph, FAN_OUTS, 200, site=1), planted).batch_balance >= 2.0
    assert presampled(graph, PARTS, FAN_OUTS, 200, method="metis").quality.batch_balance <= 1.25


@pytest.mark.parametrize("num_nodes", [12_000, pytest.param(60_000, marks=pytest.mark.slow)])
def test_held_out_batches_cost_what_seen_ones_cost(num_nodes: int) -> None:
    """The probabilistic claim: after a few epochs the cut of fresh mini-batches is that of those it was fitted to."""
    pytest.importorskip("pymetis")
    graph, size = _blocks(num_nodes), num_nodes // 60
    seen, fresh = (Trial(graph, FAN_OUTS, size, site=site) for site in (0, 1))
    gap = {}
    for num_batches in (1, 4 * len(seen)):
        made = presampled(
            graph, PARTS, FAN_OUTS, size, num_batches=num_batches, method="metis", keep_unsampled=False
        )
        gap[num_batches] = judge(fresh, made.partition, 12).cut / judge(seen, made.partition, num_batches).cut
    few, many = gap.values()
    assert few > 1.05  # one mini-batch is fitted too well
    assert many < 1.05


@pytest.mark.parametrize("levels", [13, pytest.param(17, marks=pytest.mark.slow)])
def test_redundancy_of_data_parallelism(levels: int) -> None:
    """Ranks that sample their own seeds load and compute the same nodes: the more, the more ranks and layers there are."""
    graph = _rmat(levels)
    size = 1024 >> (17 - levels)
    by_ranks = [redundancy(Trial(graph, [15, 15, 15], size), ranks, 4) for ranks in (1, 2, 4, 8)]
    assert (by_ranks[0].rows, by_ranks[0].edges) == (1.0, 1.0)
    by_layers = [redundancy(Trial(graph, [15] * layers, size), 4, 4) for layers in (1, 2, 3)]
    for found in (by_ranks, by_layers):
        assert [one.rows for one in found] == sorted({one.rows for one in found})
        assert [one.edges for one in found] == sorted({one.edges for one in found})
    if levels == 17:
        assert 2.6 <= by_ranks[2].rows <= 3.1
        assert 1.7 <= by_ranks[2].edges <= 2.0


def test_report_marks_what_is_not_usual() -> None:
    usual = SplitQuality(6, 0.12, 1.02, 1.05, 1.1, (900.0, 80.0), 0.75, (3000.0, 500.0), 0)
    rows = dict(usual.table())
    assert "12.0 % of sampled edges join two owners (by lot: 75.0 %" in rows["fresh cut"]
    assert (
        "900, 80 sent to other ranks a mini-batch, input layer first: 28 % of those by lot"
        in rows["fresh rows"]
    )
    assert "HIGH" not in str(rows)
    bad = dict(replace(usual, cut=0.74, batch_balance=2.5, num_idle=1).table())
    assert "no better than chance" in bad["fresh cut"]
    assert "2.50 HIGH within a mini-batch" in bad["fresh load"]
    assert "1 rank has NOTHING to do" in bad["fresh load"]


def test_refused(make_graph) -> None:
    graph = make_graph(60)
    with pytest.raises(ConfigError, match=r"cut by metis or fennel: .*'hash'"):
        presampled(graph, 2, [2], method="hash")
    with pytest.raises(ConfigError, match="num_parts"):
        presampled(graph, 0, [2], method="fennel")
    with pytest.raises(PartitionError, match=r"of 5 nodes, the graph .* has 60"):
        judge(Trial(graph, [2]), Partition(torch.zeros(5, dtype=torch.int32), 2))
    with pytest.raises(ConfigError, match="0 fresh mini-batches"):
        judge(Trial(graph, [2]), partition(graph, 2, "block"), 0)
    with pytest.raises(ConfigError, match="0 ranks"):
        redundancy(Trial(graph, [2]), 0, 1)


def test_more_ranks_than_work(make_graph) -> None:
    graph = make_graph(60)
    made = presampled(graph, 80, [2], 4, method="fennel")
    assert made.quality.num_idle > 0
    assert quality(graph, made.partition).num_empty >= 20
