"""The small modules against PyG's and torch's."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.nn import MLP, BatchNorm, JumpingKnowledge, LayerNorm
from polyhop.nn.modules import activation, normalisation


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_equals_pyg(plain, same_as_pyg, affine) -> None:
    ours, theirs = LayerNorm(7, affine=affine, mode="node"), pyg.LayerNorm(7, affine=affine, mode="node")
    same_as_pyg(ours, theirs, ours, theirs, [plain.x])
    ours.reset_parameters()
    assert not affine or bool((ours.weight == 1).all() and (ours.bias == 0).all())


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]
)
def test_batch_norm_equals_pyg(plain, same_as_pyg, options) -> None:
    ours, theirs = BatchNorm(7, **options), pyg.BatchNorm(7, **options)
    same_as_pyg(ours, theirs, ours, theirs, [plain.x])
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name])
    same_as_pyg(ours.eval(), theirs.eval(), ours, theirs, [plain.x])


def test_batch_norm_of_one_row() -> None:
    x = torch.randn(1, 7)
    with pytest.raises(ValueError, match="more than 1 value"):
        BatchNorm(7)(x)
    torch.testing.assert_close(
        BatchNorm(7, allow_single_element=True)(x), pyg.BatchNorm(7, allow_single_element=True)(x)
    )
    with pytest.raises(ConfigError, match="track_running_stats"):
        BatchNorm(7, allow_single_element=True, track_running_stats=False)


@pytest.mark.parametrize("mode", ["cat", "max", "lstm"])
def test_jumping_knowledge_equals_pyg(plain, same_as_pyg, mode) -> None:
    ours, theirs = JumpingKnowledge(mode, 7, 3), pyg.JumpingKnowledge(mode, 7, 3)
    same_as_pyg(
        ours,
        theirs,
        lambda *xs: ours(xs),
        lambda *xs: theirs(list(xs)),
        [plain.x, plain.x.sin(), plain.x.cos()],
    )


def test_jumping_knowledge_refused() -> None:
    with pytest.raises(ConfigError, match="unknown jk"):
        JumpingKnowledge("mean")
    with pytest.raises(ConfigError, match="channels"):
        JumpingKnowledge("lstm")


@pytest.mark.parametrize("widths", [[7, 4], [7, 5, 4], [7, 5, 6, 4]])
def test_mlp_equals_pyg(plain, same_as_pyg, widths) -> None:
    ours, theirs = (
        MLP(widths, act="elu", act_kwargs={"alpha": 0.5}),
        pyg.MLP(widths, act="elu", act_kwargs={"alpha": 0.5}),
    )
    same_as_pyg(ours, theirs, ours, theirs, [plain.x])
    assert (ours.in_channels, ours.out_channels) == (7, 4)


def test_activations_by_name() -> None:
    x = torch.randn(5)
    assert isinstance(activation("ReLU"), nn.ReLU)
    assert isinstance(activation("leaky-relu", negative_slope=0.3), nn.LeakyReLU)
    torch.testing.assert_close(activation("swish")(x), x * x.sigmoid())
    assert activation(None) is None
    assert activation(torch.tanh) is torch.tanh
    with pytest.raises(ConfigError, match="Did you mean 'relu'"):
        activation("rellu")


def test_norms_by_name() -> None:
    for name in ("batch", "batch_norm", "BatchNorm"):
        assert isinstance(normalisation(name, 4), BatchNorm)
    given = nn.LayerNorm(4)
    assert normalisation(given, 4) is given
    assert normalisation(None, 4) is None
    for name in ("PairNorm", "instance_norm", "graph"):
        with pytest.raises(UnsupportedError, match="mixes all rows"):
            normalisation(name, 4)
    with pytest.raises(UnsupportedError, match="mode"):
        normalisation("layer", 4)
    with pytest.raises(ConfigError, match="unknown norm"):
        normalisation("group", 4)
