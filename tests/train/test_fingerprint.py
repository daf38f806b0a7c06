"""A checkpoint is recognised by what decides its meaning, and a difference is told by name."""

from __future__ import annotations

from polyhop.nn import GCN
from polyhop.train.fingerprint import differences, fingerprint_model


def test_a_model_is_told_by_shapes_and_options() -> None:
    one = fingerprint_model(GCN(8, 4, num_layers=2, out_channels=3))
    assert fingerprint_model(GCN(8, 4, num_layers=2, out_channels=3)) == one
    assert differences(one, fingerprint_model(GCN(8, 4, num_layers=2, out_channels=3, dropout=0.5)))
    lines = differences(one, fingerprint_model(GCN(8, 5, num_layers=2, out_channels=3)))
    assert any(
        "shapes.convs.0.bias: the checkpoint has ['float32', 4], this run ['float32', 5]" in line
        for line in lines
    )


def test_differences_are_told_by_path() -> None:
    saved, now = {"config": {"lr": 0.1, "seed": 0}}, {"config": {"lr": 0.2, "seed": 0, "clip": 1.0}}
    assert differences(saved, now) == [
        "config.clip: the checkpoint has None, this run 1.0",
        "config.lr: the checkpoint has 0.1, this run 0.2",
    ]
