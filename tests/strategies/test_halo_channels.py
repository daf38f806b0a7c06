"""Approximate halos: runs repeat to the bit, counters equal the account, and each way keeps the promise of its file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import CheckpointError, ConfigError, InputError
from polyhop.exchange import bucket_sizes
from polyhop.graph import Graph, Sizes
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.strategies import Team, halo, place
from polyhop.strategies.halo_cost import account, crossed, crossings
from polyhop.strategies.halo_plan import BUCKET_BYTES
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]
SEEDING = threading.Lock()


def model_of(graph: Graph, dropout: float = 0.3, layers: int = 3, kind: str = "sage") -> torch.nn.Module:
    made: dict[str, Callable[..., torch.nn.Module]] = {"sage": nn.GraphSAGE, "gcn": nn.GCN}
    with SEEDING:
        torch.manual_seed(7)
        return made[kind](graph.num_features, 16, layers, out_channels=graph.num_classes, dropout=dropout)


def trainer(**options: Any) -> Trainer:
    given: dict[str, Any] = {"max_epochs": 25, "eval_every": 100, "lr": 0.01, "bits_period": 8}
    return Trainer("halo", **{**given, "device": "cpu", "progress": "none", "seed": 3, **options})


def fit(
    line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any]
) -> tuple[list[float], list[Tensor]]:
    model = model_of(graph)
    result = trainer(**options).fit(
        model, share(graph, Partition(owner, line.num_ranks), line.rank), line=line
    )
    return [record["loss"] for record in result.history], list(model.state_dict().values())


WAYS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "2 bits": {"bits": 2},
    "1 bit": {"bits": 1},
    "16 bits": {"bits": 16},
    "adaptive": {"bits": "adaptive", "bits_group": 4},
    "random": {"bits": "random"},
    "stale": {"halo": "stale"},
    "stale, smoothed, 4 bits": {"halo": "stale", "halo_smoothing": 0.5, "bits": 4},
    "stale, adaptive": {"halo": "stale", "bits": "adaptive", "bits_group": 4},
    "sampled": {"halo": "sampled", "halo_share": 0.3},
    "sampled, 8 bits": {"halo": "sampled", "halo_share": 0.5, "bits": 8},
    "skipping, 8 bits": {"halo": "skipping", "halo_drift": 0.2, "halo_age": 4, "bits": 8},
    "skipping": {"halo": "skipping", "halo_drift": 0.2, "halo_age": 4},
}


LATER = ("8 bits", "1 bit", "16 bits", "stale", "sampled", "skipping, 8 bits")  # others have more in them


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way in LATER else ()) for way in WAYS]
)
def test_runs_repeat_and_learn_over_threads_and_gloo(make_graph: MakeGraph, ranks: Run, way: str) -> None:
    graph = make_graph()
    owner = partition(graph, 3, "hash").owner
    one = run_in_threads(3, fit, graph, owner, WAYS[way])
    other = ranks(3, fit, graph, owner, WAYS[way])
    for losses, weights in (*one[1:], *other):
        assert losses == (one[0][0] if losses else [])
        assert all(torch.equal(a, b) for a, b in zip(weights, one[0][1], strict=True))
    assert other[0][0] == one[0][0]
    assert one[0][0][-1] < 0.75 * one[0][0][0]


def stopped_and_continued(
    line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any], run_dir: str, stop_at: int
) -> list[Tensor]:
    """Weights of a run that was stopped after a step and continued by a new one."""
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    first = trainer(**options, run_dir=run_dir, max_epochs=stop_at)
    first.fit(model_of(graph), held, line=line)
    model = model_of(graph)
    trainer(**options, run_dir=run_dir, resume="auto").fit(model, held, line=line)
    return list(model.state_dict().values())


@pytest.mark.parametrize(
    ("way", "stop_at"),
    [
        # Where widths are chosen, every moment around the choice (each eighth epoch); elsewhere any will do.
        pytest.param(way, at, marks=() if "adaptive" in way or at == 15 else pytest.mark.slow)
        for way in ("adaptive", "stale", "stale, adaptive", "skipping", "random", "2 bits")
        for at in (5, 8, 15, 16)
    ],
)
def test_a_continued_run_has_the_same_bits(
    make_graph: MakeGraph, tmp_path: Path, way: str, stop_at: int
) -> None:
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    options = {"eval_every": 1, **WAYS[way]}  # the weights are the best ones, and both must judge them alike
    whole = run_in_threads(2, fit, graph, owner, options)[0][1]
    found = run_in_threads(2, stopped_and_continued, graph, owner, options, str(tmp_path / "run"), stop_at)
    for weights in found:
        assert all(torch.equal(a, b) for a, b in zip(weights, whole, strict=True))


def test_another_number_of_ranks_cannot_continue_what_ranks_keep(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    graph = make_graph()
    options = {"halo": "stale", "run_dir": str(tmp_path / "run"), "max_epochs": 3}
    run_in_threads(2, fit, graph, partition(graph, 2, "hash").owner, options)
    more = options | {"resume": "auto", "max_epochs": 5}
    with pytest.raises(CheckpointError, match="saved by 2 ranks"):
        run_in_threads(3, fit, graph, partition(graph, 3, "hash").owner, more)


@dataclass
class Counted:
    counted: Cost
    accounted: Cost
    columns: list[int]
    hidden: list[int]


def count_steps(
    line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any], steps: int
) -> Counted:
    """What the last of some steps sent, and what was said it would."""
    step, model = built(line, graph, owner, options)
    for epoch in range(steps - 1):
        step.gradients(0, Key(3, epoch))
    channels = step._channels.channels
    step._channels.begin_step(Key(3, steps - 1))  # widths change here
    messages = crossed(channels)
    line.barrier()
    before = line.traffic.now()
    step.gradients(0, Key(3, steps - 1))
    sent = line.traffic.now() - before
    sizes = bucket_sizes(list(model.parameters()), BUCKET_BYTES)
    expected = account(messages, sizes, 4, line.num_ranks, line.rank)
    step.close()
    sizes_of = Sizes.of_many(graph.num_nodes)
    columns = [seen.columns for seen in crossings(model, graph.num_features, sizes_of)]
    return Counted(sent, expected, columns, [c.num_columns or 0 for c in channels])


def built(
    line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any], **model: Any
) -> tuple[Any, Any]:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    made = model_of(graph, **model)
    made.train()
    chosen = trainer(**options)
    config = halo.Config(**{f.name: getattr(chosen, f.name) for f in fields(halo.Config)})
    team = Team(line)
    whole = halo.hold(held, place("cpu", "32-true"), team, config)
    assert held.split is not None
    step = halo.build(
        made, held, config, train_ids=held.split.train, whole=whole, loss=cross_entropy_sum, team=team
    )
    return step, made


@pytest.mark.parametrize("way", ["exact", "8 bits", "1 bit", "16 bits", "adaptive", "stale", "random"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_counters_equal_the_account(make_graph: MakeGraph, way: str, num_ranks: int) -> None:
    graph = make_graph()
    owner = partition(graph, num_ranks, "hash").owner
    options = {"bits_period": 4, **WAYS.get(way, {})}
    for found in run_in_threads(num_ranks, count_steps, graph, owner, options, 6):
        for kind in ("hidden", "gradients"):
            assert found.counted.bytes[kind] == found.accounted.bytes[kind], kind
            assert found.counted.messages[kind] == found.accounted.messages[kind], kind
        assert found.columns[0] == 0
        assert found.columns[1:] == found.hidden
        assert found.hidden == [16, graph.num_classes]  # the last layer narrows, so mapped rows cross


def frozen_gradients(
    line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any], steps: int
) -> list[list[Tensor]]:
    """Gradients of steps with the same weights."""
    step, model = built(line, graph, owner, options, dropout=0.0)
    found = []
    for epoch in range(steps):
        model.zero_grad()
        step.gradients(0, Key(3, epoch))
        found.append([p.grad.clone() for p in model.parameters()])
    step.close()
    return found


def test_a_stale_halo_is_exact_when_nothing_changes(make_graph: MakeGraph) -> None:
    graph = make_graph()
    owner = partition(graph, 3, "hash").owner
    exact = run_in_threads(3, frozen_gradients, graph, owner, {}, 1)[0][0]
    for way in ({"halo": "stale"}, {"halo": "skipping", "halo_drift": 0.1, "halo_age": 100}):
        stale = run_in_threads(3, frozen_gradients, graph, owner, way, 7)[0]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(stale[6], exact, strict=True)), way
        if way["halo"] == "stale":
            assert not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(stale[0], exact, strict=True))


def test_a_sampled_halo_is_right_on_average(make_graph: MakeGraph) -> None:
    """The mean of what arrives, over many draws, is what would have arrived whole."""
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    exact = run_in_threads(2, first_sums, graph, owner, {"halo_sums": False}, 1)[0]
    drawn = run_in_threads(2, first_sums, graph, owner, {"halo": "sampled", "halo_share": 0.3}, 400)[0]
    spread = drawn.std(0) / 400**0.5
    z = (drawn.mean(0) - exact[0]).abs() / spread.clamp(min=1e-6)
    assert float(z.max()) < 5.5
    assert float((drawn[0] - exact[0]).abs().max()) > 0.01


def first_sums(line: Collective, graph: Graph, owner: Tensor, options: dict[str, Any], steps: int) -> Tensor:
    """[steps, H, F]: rows that arrive through the first channel, of own rows that are their users' ids."""
    step, _ = built(line, graph, owner, options)
    channel, found = step._channels.channels[0], []
    rows = torch.linspace(-1, 1, channel.lists.num_own)[:, None].repeat(1, 3)
    for epoch in range(steps):
        step._channels.begin_step(Key(3, epoch))
        found.append(channel.leave(rows, 0)[2]())
    step.close()
    return torch.stack(found)


def test_skipping_skips(make_graph: MakeGraph) -> None:
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    found = run_in_threads(2, skips, graph, owner)
    for skipped, offered in found:
        assert offered == 2 * 9
        assert skipped == 2 * 6  # sent at the steps 0, 4 and 8


def skips(line: Collective, graph: Graph, owner: Tensor) -> tuple[int, int]:
    way = {"halo": "skipping", "halo_drift": 1e9, "halo_age": 4}
    step, _ = built(line, graph, owner, way, dropout=0.0)
    for epoch in range(9):
        step.gradients(0, Key(3, epoch))
    step.close()
    channels = step._channels.channels
    return sum(c.skipped for c in channels), sum(c.offered for c in channels)


def test_rows_that_are_not_finite_are_named(make_graph: MakeGraph) -> None:
    graph = make_graph()
    owner = partition(graph, 2, "hash").owner
    for message in run_in_threads(2, broken, graph, owner):
        assert "layer 1" in message
        assert "from rank" in message
        assert "node" in message


def broken(line: Collective, graph: Graph, owner: Tensor) -> str:
    step, model = built(line, graph, owner, {"bits": 4})
    with torch.no_grad():
        next(iter(model.parameters())).fill_(float("nan"))
    try:
        step.gradients(0, Key(3))
    except InputError as error:
        return str(error)
    return ""


def links_used(line: Collective, graph: Graph, owner: Tensor, path: str) -> list[list[Tensor]]:
    """Forward widths of every channel after a choice."""
    options = {"bits": "adaptive", "bits_group": 2, "bits_period": 3, "link_costs": path}
    step, _ = built(line, graph, owner, options, dropout=0.0)
    for epoch in range(4):
        step.gradients(0, Key(3, epoch))
    step.close()
    return [channel.messages.widths["forward"].leaving for channel in step._channels.channels]


def test_a_slow_link_gets_fewer_bits(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, path = make_graph(), tmp_path / "links.json"
    owner = partition(graph, 3, "hash").owner
    run_in_threads(3, links_used, graph, owner, str(path))
    measured = json.loads(path.read_text())
    assert measured["ranks"] == 3
    costs = [[0.0 if i == j else 1e-9 for j in range(3)] for i in range(3)]
    even = {"ranks": 3, "per_byte": costs, "per_message": [[0.0] * 3] * 3}
    path.write_text(json.dumps(even))
    before = run_in_threads(3, links_used, graph, owner, str(path))
    costs[0] = [0.0, 1e-9, 3e-8]  # from rank 0 to rank 2 everything takes thirty times as long
    path.write_text(json.dumps(even))
    after = run_in_threads(3, links_used, graph, owner, str(path))
    assert float(after[0][0][2].float().mean()) < float(before[0][0][2].float().mean())
    assert float(after[1][0][2].float().mean()) >= float(before[1][0][2].float().mean())


NO_COSTS = '{"ranks": 2, "per_byte": [], "per_message": []}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "no file of link costs"),
        ("x", "no file of link costs"),
        (NO_COSTS, "expected 2 rows of 2 numbers"),
        (
            json.dumps({"ranks": 2, "per_byte": [[0, 1]] * 2, "per_message": [[0, 1]] * 2}),
            "measured with 2 ranks",
        ),
    ],
)
def test_a_wrong_file_of_link_costs_is_refused(
    make_graph: MakeGraph, tmp_path: Path, text: str, said: str
) -> None:
    graph, path = make_graph(), tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        run_in_threads(3, links_used, graph, partition(graph, 3, "hash").owner, str(path))


def test_a_file_of_link_costs_that_cannot_be_written_is_told(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, path = make_graph(), tmp_path / "nowhere" / "links.json"
    with pytest.raises(ConfigError, match="cannot be read or written"):
        run_in_threads(2, links_used, graph, partition(graph, 2, "hash").owner, str(path))


def returned(line: Collective, graph: Graph, owner: Tensor) -> list[tuple[float, int]]:
    """What gradients of 1 for all halo rows come to at the own rows, in several draws; how many rows others read."""
    step, _ = built(line, graph, owner, {"halo": "sampled", "halo_share": 0.4})
    channel, found = step._channels.channels[0], []
    lent = sum(ids.numel() for ids in channel.lists.lent)
    for epoch in range(3):
        rows = torch.ones(channel.lists.num_own, 2, requires_grad=True)
        step._channels.begin_step(Key(3, epoch))
        channel.leave(rows, 0)[2]().sum().backward()
        assert rows.grad is not None
        found.append((float(rows.grad[:, 0].sum()), lent))
    step.close()
    return found


def test_returned_gradients_of_a_sampled_halo_grow_as_the_rows_did(make_graph: MakeGraph) -> None:
    graph = make_graph()
    for draws in run_in_threads(2, returned, graph, partition(graph, 2, "hash").owner):
        for total, lent in draws:
            assert total == pytest.approx(lent, rel=1e-5)  # fewer rows, each so much heavier


def weights_back(line: Collective, graph: Graph, owner: Tensor) -> list[tuple[list[float], list[float]]]:
    """Of each channel: what errors in returned gradients weigh, and the edges that stand behind each."""
    step, _ = built(line, graph, owner, {"bits": "adaptive"})
    step.gradients(0, Key(3))
    found = []
    for channel, block in zip(step._channels.channels, step._blocks[1:], strict=True):
        sums = block.sums.indptr.diff().split(channel.lists.sums_by_rank)
        behind = [
            part for ids, each in zip(channel.lists.lent, sums, strict=True) for part in (ids * 0 + 1, each)
        ]
        found.append((channel.weights("backward").tolist(), torch.cat(behind).tolist()))
    step.close()
    return found


def test_an_error_in_the_gradient_of_a_sum_reaches_all_its_rows(make_graph: MakeGraph) -> None:
    """GraphSAGE's sums add rows as they are, so a gradient's error weighs as many times as rows were added."""
    graph = make_graph()
    found = [
        each
        for of in run_in_threads(2, weights_back, graph, partition(graph, 2, "hash").owner)
        for each in of
    ]
    assert max(max(edges) for _, edges in found) > 1
    for weights, edges in found:
        assert weights == pytest.approx(edges)
