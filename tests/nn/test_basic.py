"""GCN, GraphSAGE, GAT and GIN against PyG's models of the same arguments."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.kernels import Key
from polyhop.nn import GAT, GCN, GIN, GraphSAGE

MODELS = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GAT": GAT, "GIN": GIN}

OPTIONS = [
    {},
    {"num_layers": 1},
    {"out_channels": None},
    {"act": "elu", "act_kwargs": {"alpha": 0.7}},
    {"act": None},
    {"act": "PReLU"},
    {"act": torch.tanh},
    {"norm": "batch_norm"},
    {"norm": "BatchNorm", "act_first": True},
    {"norm": "layer", "norm_kwargs": {"mode": "node"}},
    {"norm": nn.LayerNorm(8)},
    {"act_first": True},
    {"jk": "last"},
    {"jk": "cat", "norm": "batch"},
    {"jk": "max", "out_channels": None},
    {"jk": "lstm", "num_layers": 2},
]


@pytest.mark.parametrize(
    "options",
    OPTIONS,
    ids=lambda o: ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in o.items()) or "default",
)
@pytest.mark.parametrize("name", MODELS)
def test_equals_pyg(name, options, loops, same_as_pyg) -> None:
    given = {"in_channels": 7, "hidden_channels": 8, "num_layers": 3, "out_channels": 4, **options}
    if name == "GAT":
        given["heads"] = 2
    ours, theirs = MODELS[name](**given), getattr(pyg, name)(**given)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, loops.edge_index), lambda x: theirs(x, loops.edge_index), [loops.x]
    )


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_equals_pyg_with_dropout_and_running_statistics(name, loops, same_as_pyg) -> None:
    given = {
        "in_channels": 7,
        "hidden_channels": 8,
        "num_layers": 3,
        "out_channels": 4,
        "dropout": 0.5,
        "norm": "batch",
    }
    ours, theirs = MODELS[name](**given).eval(), getattr(pyg, name)(**given).eval()
    same_as_pyg(
        ours, theirs, lambda x: ours(x, loops.edge_index), lambda x: theirs(x, loops.edge_index), [loops.x]
    )


def test_edge_weights_equal_pyg(loops, same_as_pyg) -> None:
    ours, theirs = GCN(7, 8, 2, 4, improved=True), pyg.GCN(7, 8, 2, 4, improved=True)
    same_as_pyg(
        ours,
        theirs,
        lambda x: ours(x, loops.edge_index, loops.weight),
        lambda x: theirs(x, loops.edge_index, loops.weight),
        [loops.x],
    )


def test_arguments_reach_the_convolutions(loops, same_as_pyg) -> None:
    given = {"num_layers": 2, "out_channels": 4, "aggr": "max", "project": True}
    ours, theirs = GraphSAGE(7, 8, **given), pyg.GraphSAGE(7, 8, **given)
    same_as_pyg(
        ours, theirs, lambda x: ours(x, loops.edge_index), lambda x: theirs(x, loops.edge_index), [loops.x]
    )


def test_pyg_training_step_is_ours(loops) -> None:
    """Ten Adam steps from the same weights end at the same weights."""
    ours, theirs = GCN(7, 8, 2, 4).double(), pyg.GCN(7, 8, 2, 4).double()
    theirs.load_state_dict(ours.state_dict())
    y = torch.arange(loops.num_nodes) % 4
    for model in (ours, theirs):
        optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(10):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(loops.x, loops.edge_index), y).backward()
            optimiser.step()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"jk": "cat"}], ids=str)
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_writing_over_the_convolutions_result_changes_no_number(name, options, p, loops) -> None:
    results = []
    for may_overwrite in (True, False):
        torch.manual_seed(0)
        model = MODELS[name](7, 8, num_layers=3, out_channels=4, dropout=p, **options).double()
        for conv in model.convs:
            conv.gives_own = conv.gives_own and may_overwrite
        out = model(loops.x, loops.edge_index, key=Key(1))
        out.square().sum().backward()
        results.append([out.detach(), *(w.grad for w in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_reset_draws_every_parameter_anew() -> None:
    model = GraphSAGE(7, 8, 3, 4, jk="lstm", norm="batch")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.reset_parameters()
    assert not any(bool((parameter == 7.0).all()) for parameter in model.parameters())
    assert "num_layers=3" in repr(model)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GCN(7, 8, 0), ConfigError, "num_layers=0"),
        (lambda: GCN(7, 8, 2, dropout=1.5), ConfigError, "dropout=1.5"),
        (lambda: GCN(7, 8, 2, jk="sum"), ConfigError, "unknown jk 'sum'"),
        (lambda: GCN(7, 8, 2, act="rleu"), ConfigError, "Did you mean"),
        (lambda: GCN(7, 8, 2, norm="layer_norm"), UnsupportedError, "mode"),
        (lambda: GCN(7, 8, 2, norm="graph_norm"), UnsupportedError, "mixes all rows"),
        (lambda: GCN(7, 8, 2, norm="bacth"), ConfigError, "unknown norm"),
        (lambda: GAT(7, 8, 2, heads=3), ConfigError, "heads=3"),
        (lambda: GAT(7, 8, 2, v2=True), UnsupportedError, "v2=True"),
        (lambda: GCN(7, 8, 2, edge_dim=3), UnsupportedError, "edge_dim=3"),
    ],
)
def test_refused(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()
