"""Options are refused before anything starts, each with what to do instead."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from polyhop.errors import ConfigError
from polyhop.train.config import Config, parse_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adm"}, "unknown optimizer 'adm'. Did you mean 'adam'"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"precision": "bf16"}, "Did you mean 'bf16-mixed'"),
        ({"precision": 32}, "unknown precision '32'"),
        ({"sampler": "labour"}, "Did you mean 'labor'"),
        (
            {"sampler": "labor", "labor_dependence": 65},
            "labor_dependence=65: expected a whole number in 1 .. 64",
        ),
        ({"labor_dependence": 4}, "sampler='labor', this is 'uniform'"),
        ({"metric": "f1"}, "unknown metric 'f1'"),
        ({"progress": "tqdm"}, "unknown progress"),
        ({"max_epochs": -1}, "max_epochs=-1: expected a whole number of at least 0"),
        ({"max_epochs": 1.5}, "max_epochs=1.5"),
        ({"max_epochs": True}, "max_epochs=True"),
        ({"lr": 0.0}, "lr=0.0: expected a positive number"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"decay": 2.0}, "decay=2.0"),
        ({"patience": 0}, "patience=0"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"seed": -1}, "seed=-1"),
        ({"num_neighbors": []}, "one fan-out of at least 1"),
        ({"num_neighbors": [10, 0]}, r"num_neighbors=\[10, 0\]"),
        ({"num_neighbors": [10, -2]}, "or -1 for all"),
        ({"num_neighbors": [2.5]}, "num_neighbors"),
        ({"num_neighbors": [5], "batch_size": 0}, "batch_size=0"),
        ({"memory": "lots"}, "memory='lots'"),
        ({"memory": 0}, "memory=0"),
        ({"schedule": "step"}, "needs decay_every"),
        ({"resume": "auto"}, "needs run_dir"),
        ({"resume": "auto", "run_dir": "auto"}, "own folder"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**options)


def test_batch_size_without_fan_outs_warns() -> None:
    with pytest.warns(UserWarning, match="batch_size is ignored"):
        Config(batch_size=64)


def test_a_cache_on_the_full_graph_warns() -> None:
    with pytest.warns(UserWarning, match="cache=1MB is ignored: on the full graph"):
        Config(cache="1MB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config(cache="1MB", num_neighbors=[3])
        Config(cache=0)


def test_momentum_without_sgd_warns() -> None:
    with pytest.warns(UserWarning, match="momentum is for"):
        Config(momentum=0.9)


def test_defaults_are_quiet_and_resolved_is_json() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Config(num_neighbors=[15, 10], run_dir=Path("runs/a"))
    back = json.loads(json.dumps(config.resolved()))
    assert (back["num_neighbors"], back["batch_size"], back["run_dir"]) == ([15, 10], 1024, "runs/a")
    assert "callbacks" not in back


def test_fingerprint_holds_what_decides_the_weights() -> None:
    plain = Config().fingerprint()
    assert (
        Config(device="cpu", progress="none", checkpoint_every=5, num_workers=2, max_epochs=7).fingerprint()
        == plain
    )
    for other in (
        {"lr": 0.5},
        {"seed": 1},
        {"clip": 1.0},
        {"num_neighbors": [5]},
        {"precision": "64-true"},
        {"patience": 3},
    ):
        assert Config(**other).fingerprint() != plain
    assert Config(schedule="cosine", max_epochs=7).fingerprint() != Config(schedule="cosine").fingerprint()


def test_a_function_as_optimiser_is_named() -> None:
    assert (
        Config(optimizer=test_defaults_are_quiet_and_resolved_is_json)
        .resolved()["optimizer"]
        .endswith("_is_json")
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [(5, 5), ("5", 5), ("1kB", 1000), ("1KiB", 1024), ("1.5G", 1_500_000_000), ("2 GiB", 2 << 30)],
)
def test_bytes(given: int | str, expected: int) -> None:
    assert parse_bytes(given) == expected
