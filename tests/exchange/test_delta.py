"""Rows as what they have moved: both ends hold the same bits, errors do not add up, frozen rows arrive after a few steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhop import nn
from polyhop.comm import Collective, Cost, run_in_threads
from polyhop.errors import ConfigError, InputError, PeerError
from polyhop.exchange import bucket_sizes
from polyhop.exchange.crossing import Crossing, Lists, Spans
from polyhop.exchange.delta import DeltaMessages
from polyhop.exchange.quantised import QuantisedMessages
from polyhop.exchange.stale import StaleCrossing
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, partition, share
from polyhop.strategies import Team, halo, place
from polyhop.strategies.halo_cost import account, crossed
from polyhop.strategies.halo_plan import BUCKET_BYTES
from polyhop.train.loss import cross_entropy_sum
from polyhop.trainer import Trainer

MakeGraph = Callable[..., Graph]
Run = Callable[..., list[Any]]
NUM_RANKS, ROWS, COLUMNS = 3, 6, 21


def reads(reader: int, owner: int) -> Tensor:
    """Rows of ``owner`` that ``reader`` reads: all pairs but one (1 reads nothing of 2), of different lengths."""
    if reader == owner or (reader, owner) == (1, 2):
        return torch.empty(0, dtype=torch.int64)
    return torch.arange(reader + owner, ROWS)


def messages_of(rank: int, width: int | None = None) -> QuantisedMessages:
    """Differences, or rows in so many bits."""
    lists = Lists(
        ROWS, [reads(q, rank) for q in range(NUM_RANKS)], [reads(rank, q).numel() for q in range(NUM_RANKS)]
    )
    ids = ROWS * rank + torch.arange(ROWS), halo_ids(rank)
    spans = Spans(layer=4)
    return DeltaMessages(lists, ids, spans) if width is None else QuantisedMessages(lists, width, ids, spans)


def halo_ids(rank: int) -> Tensor:
    return torch.cat([ROWS * q + reads(rank, q) for q in range(NUM_RANKS)])


def values(epoch: int, moves: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """[all rows, columns] of an epoch: each moves on from the last by about ``moves`` of its size; the last row jumps."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(NUM_RANKS * ROWS, COLUMNS, generator=draw)
    away = torch.randn(NUM_RANKS * ROWS, COLUMNS, generator=draw)
    rows = rows + moves * epoch * away
    if moves:
        rows[-1] = 3 * torch.randn(COLUMNS, generator=torch.Generator().manual_seed(epoch))
    return (rows * torch.logspace(-3, 3, len(rows))[:, None]).to(dtype)


def step(channel: Crossing, epoch: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(halo, what came back of gradients that are the halo's exact rows)."""
    rank = channel.line.rank
    own = rows[ROWS * rank : ROWS * (rank + 1)].clone().requires_grad_()
    channel.begin_step(Key(3, epoch))
    whole, _, arrive = channel.leave(own * 1, 0)
    found = arrive()
    (0 * whole.sum() + (found * rows[halo_ids(rank)]).sum()).backward()  # type: ignore[no-untyped-call]
    channel.end_step()
    assert own.grad is not None
    return found.detach(), own.grad


def trained(
    line: Collective, width: int | None, moves: float, steps: int, dtype: torch.dtype, is_stale: bool = False
) -> dict[str, Any]:
    """Of each step: largest error of the halo's rows over their span, and of the gradients; what both ends hold."""
    messages = messages_of(line.rank, width)
    channel = (StaleCrossing if is_stale else Crossing)(messages, line)
    errors, sums = [], exact_sums()
    before = line.traffic.now()
    for epoch in range(steps):
        rows = values(epoch, moves, dtype)
        found, grad = step(channel, epoch, rows)
        right = rows[halo_ids(line.rank)].double()
        spans = right.amax(1) - right.amin(1)
        errors.append(((found.double() - right).norm(dim=1) / spans).tolist())
    sent = line.traffic.now() - before
    own = slice(ROWS * line.rank, ROWS * (line.rank + 1))
    away = (grad.double() - sums(rows.double())[own]).abs().amax(1)
    state = channel.state() if is_stale else {}
    kept = messages.state() if isinstance(messages, DeltaMessages) else {}
    return {"errors": torch.tensor(errors), "away": away, "sent": sent, "kept": kept, "state": state}


def exact_sums() -> Callable[[Tensor], Tensor]:
    """Of the gradients that come back to every row."""

    def sums(rows: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for rank in range(NUM_RANKS):
            total.index_add_(0, halo_ids(rank), rows[halo_ids(rank)])
        return total

    return sums


def same_ends(found: list[dict[str, Any]]) -> int:
    """How many matrices both ends hold; they must be the same bits."""
    count = 0
    for rank, one in enumerate(found):
        for name, rows in one["kept"].items():
            which, way, other = name.split(".")
            if which == "sent" and rows.numel():
                assert torch.equal(rows, found[int(other)]["kept"][f"held.{way}.{rank}"])
                count += 1
    return count


@pytest.mark.parametrize("is_stale", [False, True], ids=["exact", "stale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_both_ends_hold_the_same_bits_after_50_steps(dtype: torch.dtype, is_stale: bool) -> None:
    found = run_in_threads(NUM_RANKS, trained, None, 0.01, 50, dtype, is_stale)
    assert same_ends(found) == 2 * 5  # of 6 pairs one reads nothing, two ways


def test_over_gloo(ranks: Run) -> None:
    one = run_in_threads(NUM_RANKS, trained, None, 0.01, 5, torch.float32)
    for a, b in zip(ranks(NUM_RANKS, trained, None, 0.01, 5, torch.float32), one, strict=True):
        assert a["kept"].keys() == b["kept"].keys()
        assert all(torch.equal(a["kept"][name], b["kept"][name]) for name in b["kept"])


def test_frozen_rows_and_gradients_arrive_after_a_few_steps() -> None:
    """The error is at most 2/3 of the last one, and no less than float32 and a row's size allow."""
    found = run_in_threads(NUM_RANKS, trained, None, 0.0, 30, torch.float32)
    direct = run_in_threads(NUM_RANKS, trained, 2, 0.0, 30, torch.float32)
    rows = values(0, 0.0).double()
    for rank, (ours, other) in enumerate(zip(found, direct, strict=True)):
        errors = ours["errors"].amax(1)
        assert float(other["errors"].amax(1)[-1]) > 0.1
        assert float(errors[9]) < 0.1 * float(errors[0])
        assert float(errors[-1]) < 1e-4
        own = rows[ROWS * rank : ROWS * (rank + 1)].abs().amax(1)
        assert bool((ours["away"] <= 1e-3 * own + 1e-9).all())


def test_errors_do_not_add_up_and_a_row_that_jumps_is_sent_as_it_is() -> None:
    """Rows that move by 1 % a step: 50 steps later the error is still that of one difference."""
    for ours, other in zip(
        run_in_threads(NUM_RANKS, trained, None, 0.01, 50, torch.float32),
        run_in_threads(NUM_RANKS, trained, 2, 0.01, 50, torch.float32),
        strict=True,
    ):
        late, direct = ours["errors"][20:], other["errors"][20:]
        assert float(late[:, :-1].mean()) < 0.1 * float(direct[:, :-1].mean())
        assert float(ours["errors"][-10:].mean()) < 2 * float(ours["errors"][20:30].mean())
        assert bool((late[:, -1] < 3 * COLUMNS**0.5 / 3).all())  # no more than a step a value


def test_differences_are_right_on_average() -> None:
    """Given what both ends hold, the mean of what arrives is the row: over 2,000 keys, largest z below 5.5."""
    sender, receiver = messages_of(0), messages_of(1)
    rows = values(0, 0.01)[:ROWS]
    first = sender.packed("forward", rows, reads(1, 0), 0, 1)
    receiver.opened("forward", first, 0, rows[:0])
    assert isinstance(sender, DeltaMessages)
    assert isinstance(receiver, DeltaMessages)
    before = sender.state(), receiver.state()
    new, draws = values(1, 0.01)[:ROWS], 2000
    total = torch.zeros(2, ROWS - 1, COLUMNS, dtype=torch.float64)
    for draw in range(draws):
        for messages, state in zip((sender, receiver), before, strict=True):
            messages.restore(state)
            messages.begin_step(Key(3, draw))
        piece = sender.packed("forward", new, reads(1, 0), 0, 1)
        got = receiver.opened("forward", piece, 0, rows[:0]).double()
        total += torch.stack([got, got**2])
    mean, square = total / draws
    spread = ((square - mean**2).clamp(min=0) / draws).sqrt()
    away = (mean - new[reads(1, 0)].double()).abs()
    slack = 1e-6 * new[reads(1, 0)].double().abs() + 1e-9
    assert float((away / (spread + slack)).max()) < 5.5


def test_bytes_are_those_of_two_bits() -> None:
    """The flag of a row needs no room."""
    args = (0.01, 3, torch.float32)
    for ours, direct in zip(
        run_in_threads(NUM_RANKS, trained, None, *args),
        run_in_threads(NUM_RANKS, trained, 2, *args),
        strict=True,
    ):
        assert ours["sent"] == direct["sent"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("epoch", [0, 1])
def test_rows_that_are_not_finite_are_named(bad: float, epoch: int) -> None:
    messages = messages_of(0)
    rows = values(0, 0.0)[:ROWS].clone()
    for _ in range(epoch):
        messages.packed("forward", rows, reads(1, 0), 0, 1)
    rows[3, 2] = bad
    with pytest.raises(
        InputError, match=r"layer 4 sends from rank 0 to rank 1 are not finite, first at node 3"
    ):
        messages.packed("forward", rows, reads(1, 0), 0, 1)


def test_damaged_messages_are_refused() -> None:
    rows = values(0, 0.0)[:ROWS]
    sender, fresh = messages_of(0), messages_of(1)
    sender.packed("forward", rows, reads(1, 0), 0, 1)
    difference = sender.packed("forward", rows, reads(1, 0), 0, 1)
    with pytest.raises(InputError, match="never came"):
        fresh.opened("forward", difference, 0, rows[:0])
    for piece in (difference[:-1], difference[:3], torch.cat([difference, difference[:1]])):
        with pytest.raises(InputError, match="cut or is another"):
            messages_of(1).opened("forward", piece, 0, rows[:0])


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 16, 33])
def test_every_kind_of_difference_is_told_apart(columns: int) -> None:
    """Rows that move, that do not, constant ones, such whose difference is constant, hardly anything, or too much."""
    lists = Lists(8, [torch.empty(0, dtype=torch.int64), torch.arange(8)], [0, 0])
    back = Lists(8, [torch.empty(0, dtype=torch.int64)] * 2, [8, 0])
    none = torch.empty(0, dtype=torch.int64)
    sender, receiver = (
        DeltaMessages(lists, (torch.arange(8), none)),
        DeltaMessages(back, (none, torch.arange(8))),
    )
    rows = torch.randn(8, columns, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    rows[1], rows[2] = 0.7, 0.0
    away = torch.zeros(6, 8, columns)
    away[1:] = 1e-3 * torch.randn(5, 8, columns, generator=torch.Generator().manual_seed(3))
    away[3:, 3], away[4:, 4], away[:, 5, -1], away[2:, 6] = 0.25, 0.0, 1e-34, 100.0
    away[:, 5, :-1] = 0.0
    for epoch, each in enumerate(away):
        for messages in (sender, receiver):
            messages.begin_step(Key(3, epoch))
        arrives = receiver.opened(
            "forward", sender.packed("forward", rows + each, lists.lent[1], 0, 1), 0, rows[:0]
        )
        assert torch.equal(arrives, sender.state()["sent.forward.1"])
        new = rows + each
        most = (
            (new.amax(1) - new.amin(1) + 2.0**-7 * new.abs().amax(1)) / 3 * 1.02
        )  # a step of the row itself
        assert bool(((arrives - new).abs() <= most[:, None]).all())


def test_a_message_that_is_opened_again_gives_the_same_rows() -> None:
    """As when a forward pass is computed twice."""
    sender, receiver = messages_of(0), messages_of(1)
    rows = values(0, 0.0)[:ROWS]
    nothing = torch.empty(0, dtype=torch.uint8)
    for _ in range(3):
        piece = sender.packed("forward", rows, reads(1, 0), 0, 1)
        opened = receiver.opener("forward", rows[:0])
        one, again = opened([piece, nothing, nothing]), opened([piece, nothing, nothing])
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


# In training


def model_of(graph: Graph) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.GraphSAGE(graph.num_features, 16, 3, out_channels=graph.num_classes)


def trainer(**options: Any) -> Trainer:
    given: dict[str, Any] = {"max_epochs": 20, "eval_every": 1, "lr": 0.01, "bits": "delta"}
    return Trainer("halo", **{**given, "device": "cpu", "progress": "none", "seed": 3, **options})


def fit(
    line: Collective, graph: Graph, owner: Tensor, weights: dict[str, Tensor], options: dict[str, Any]
) -> tuple[list[float], list[Tensor], list[str]]:
    model = model_of(graph)
    model.load_state_dict(weights)
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    if (stop_at := options.get("stop_at")) is not None:
        options = {name: value for name, value in options.items() if name != "stop_at"}
        trainer(**{**options, "max_epochs": stop_at}).fit(model, held, line=line)
        model.load_state_dict(weights)
        options = {**options, "resume": "auto"}
    result = trainer(**options).fit(model, held, line=line)
    return [record["loss"] for record in result.history], list(model.state_dict().values()), []


def fitted(graph: Graph, **options: Any) -> list[tuple[list[float], list[Tensor], list[str]]]:
    owner = partition(graph, 2, "hash").owner
    found: list[Any] = run_in_threads(2, fit, graph, owner, model_of(graph).state_dict(), options)
    return found


@pytest.mark.parametrize("more", [{}, {"halo": "stale"}, {"recompute": True}], ids=str)
def test_a_continued_run_has_the_same_bits(
    make_graph: MakeGraph, tmp_path: Path, more: dict[str, Any]
) -> None:
    graph = make_graph()
    whole = fitted(graph, **more)
    parts = fitted(graph, **more, run_dir=str(tmp_path / "run"), stop_at=9)
    assert whole[0][0][-1] < 0.75 * whole[0][0][0]
    for one in (*whole[1:], *parts):
        assert all(torch.equal(a, b) for a, b in zip(one[1], whole[0][1], strict=True))


def test_computing_layers_again_changes_nothing(make_graph: MakeGraph) -> None:
    graph = make_graph()
    plain, again = fitted(graph), fitted(graph, recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0][1], again[0][1], strict=True))


def built(line: Collective, graph: Graph, owner: Tensor, dropout: float, options: dict[str, Any]) -> Any:
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    model = nn.GraphSAGE(graph.num_features, 16, 3, out_channels=graph.num_classes, dropout=dropout).train()
    chosen = trainer(**options)
    config = halo.Config(**{f.name: getattr(chosen, f.name) for f in fields(halo.Config)})
    whole = halo.hold(held, place("cpu", "32-true"), Team(line), config)
    assert held.split is not None
    return model, halo.build(
        model, held, config, train_ids=held.split.train, whole=whole, loss=cross_entropy_sum, team=Team(line)
    )


def stepped(line: Collective, graph: Graph, owner: Tensor, dropout: float) -> dict[str, Any]:
    """A model that stands still: what the last step sent, what was said of it, notes, what is held of others' rows."""
    torch.manual_seed(1)
    model, step = built(line, graph, owner, dropout, {})
    for epoch in range(11):
        before = line.traffic.now()
        step.gradients(0, Key(3, epoch))
        sent = line.traffic.now() - before
    sizes = bucket_sizes(list(model.parameters()), BUCKET_BYTES)
    accounted = account(crossed(step._channels.channels), sizes, 4, line.num_ranks, line.rank)
    held = sum(rows.nbytes for name, rows in step._channels.state().items() if name.startswith("held"))
    _, plain = built(line, graph, owner, dropout, {"bits": 2})
    found = {"sent": sent, "accounted": accounted, "notes": step.notes, "held": held}
    found["counted"] = step.memory.halo - plain.memory.halo
    for each in (step, plain):
        each.close()
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_counters_equal_the_account_and_memory_counts_what_is_held(
    make_graph: MakeGraph, num_ranks: int
) -> None:
    graph = make_graph()
    owner = partition(graph, num_ranks, "hash").owner
    for found in run_in_threads(num_ranks, stepped, graph, owner, 0.0):
        sent: Cost = found["sent"]
        assert (sent.bytes, sent.messages) == (found["accounted"].bytes, found["accounted"].messages)
        assert found["held"] == found["counted"] > 0


@pytest.mark.parametrize(("dropout", "is_advised"), [(0.0, False), (0.5, True)])
def test_people_hear_when_rows_move_too_much(make_graph: MakeGraph, dropout: float, is_advised: bool) -> None:
    graph = make_graph()
    for found in run_in_threads(2, stepped, graph, partition(graph, 2, "hash").owner, dropout):
        (note,) = [note for note in found["notes"] if "bits='delta'" in note]
        assert ("bits='adaptive' suits such a model better" in note) == is_advised


@pytest.mark.parametrize("way", ["sampled", "skipping", "sequential"])
def test_halos_that_do_not_bring_all_rows_are_refused(make_graph: MakeGraph, way: str) -> None:
    with pytest.raises((ConfigError, PeerError), match="bits='delta' sends what rows have moved"):
        fitted(make_graph(), halo=way)
