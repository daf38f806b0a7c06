"""A strategy that is given is foreseen with exactly its options, or not at all: every option is known or refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from polyhop.datasets.synth import generate
from polyhop.errors import ConfigError
from polyhop.forecast import Question, check_foreseen, look_at, of_given, predictions
from polyhop.forecast.given import FORESEEN
from polyhop.nn import GCNII, GraphSAGE
from polyhop.partition import partition
from polyhop.plan import Law, Link, load_machine
from polyhop.planner import inputs_of, training_of
from polyhop.strategies import STRATEGIES
from polyhop.trainer import Trainer

LAW = Law(2e-11, 5e-10, 1.5e-11, 5e-10, 1e-4, 16e6)


def asked(fan_outs: list[int] | None = None, bytes_per_s: float = 1e8, **more: Any) -> Question:
    graph = generate("sbm:?nodes=600&classes=5&p_in=0.03&p_out=0.002&features=12&seed=3")
    batch = 128 if fan_outs else None
    model = GraphSAGE(12, 16, 2, out_channels=5) if fan_outs else GCNII(12, 16, 4, out_channels=5)
    trainer = Trainer("auto", num_neighbors=fan_outs, batch_size=batch, **more)
    training = training_of(model, graph, trainer, inputs_of(graph), 300)
    machine = load_machine()
    assert machine is not None
    sight = look_at(graph, partition(graph, 4, "hash"), training)
    return Question(training, sight, 4, machine, Link(bytes_per_s, 1e-4), LAW, 1.0)


@pytest.mark.parametrize(
    ("strategy", "given", "name"),
    [
        ("halo", {}, "halo"),
        ("halo", {"bits": 8}, "halo, 8 bits"),
        ("halo", {"bits": 2, "recompute": True}, "halo, 2 bits, layers computed again"),
        ("halo", {"overlap": False}, "halo, nothing hidden"),
        ("halo", {"naive_halo": True}, "halo, sends everything"),
        ("halo", {"halo_sums": False}, "halo, no sums"),
        ("pipeline", {}, "pipeline, 4 stages, 16 chunks"),
        ("pipeline", {"stages": 2, "chunks": 12}, "pipeline, 2 stages of 2 ways, 12 chunks"),
        ("pipeline", {"stages": 2, "chunks": 2}, "pipeline, 2 stages of 2 ways, one chunk a way"),
        ("pipeline", {"stages": 4, "chunks": 8, "layer_costs": "measured"}, "pipeline, 4 stages, 8 chunks"),
    ],
)
def test_the_full_graph(strategy: str, given: dict[str, Any], name: str) -> None:
    question = asked()
    found = of_given(question, strategy, given)
    assert found.name == name
    among = {each.name: each for each in predictions(question)}
    assert found == among.get(name, found)  # what is among those to choose from is foreseen alike


@pytest.mark.parametrize(
    ("strategy", "given", "options"),
    [
        ("data", {}, {}),
        ("macro", {"macro": 2}, {"macro": 2}),
        ("split", {}, {"split_depth": 2}),
        ("split", {"split_depth": 1}, {"split_depth": 1}),
        ("pushpull", {}, {}),
    ],
)
def test_mini_batches(strategy: str, given: dict[str, Any], options: dict[str, Any]) -> None:
    found = of_given(asked([5, 5]), strategy, given)
    assert (found.strategy, found.options) == (strategy, options)
    assert found.epoch_s > 0


def test_a_cache_that_is_given_is_used() -> None:
    found = of_given(asked([5, 5], cache=20_000), "data", {"cache": 20_000})
    assert found.options == {"cache": 20_000}
    plain = of_given(asked([5, 5]), "data", {})
    assert found.sent["features"] < plain.sent["features"]


def test_what_takes_longer_is_foreseen_to() -> None:
    question = asked(bytes_per_s=1e6)
    assert of_given(question, "halo", {"overlap": False}).epoch_s > of_given(question, "halo", {}).epoch_s
    naive, plain = of_given(question, "halo", {"naive_halo": True}), of_given(question, "halo", {})
    assert naive.epoch_s > plain.epoch_s
    assert naive.sent_bytes > of_given(question, "halo", {"halo_sums": False}).sent_bytes > plain.sent_bytes
    exact = of_given(question, "pipeline", {"chunks": 1})
    assert exact.is_exact
    assert (
        exact.epoch_s > of_given(question, "pipeline", {"chunks": 16}).epoch_s / 1.5
    )  # a sweep is all it saves


@pytest.mark.parametrize(
    ("strategy", "given"),
    [("halo", {"halo_share": 0.2}), ("pipeline", {"bits": 8}), ("data", {"per_minibatch_rpc": True})],
)
def test_what_no_forecast_knows_is_refused(strategy: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{strategy}.*is not foreseen with {next(iter(given))}"):
        check_foreseen(strategy, given)


@pytest.mark.parametrize(
    ("strategy", "given"),
    [
        ("halo", {"halo": "skipping"}),
        ("pipeline", {"stages": 3}),
        ("pipeline", {"stages": 1, "chunks": 3}),
        ("data", {}),
    ],
)
def test_a_way_that_cannot_be(strategy: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not foreseen for this model on 4 ranks"):
        of_given(asked(), strategy, given)


def test_every_strategy_is_known_and_every_option_is_one_of_its_own() -> None:
    assert set(FORESEEN) == set(STRATEGIES)
    for name, module in STRATEGIES.items():
        known = {each.name for each in fields(module.Config)} | {"cache"}
        assert FORESEEN[name] <= known, name
