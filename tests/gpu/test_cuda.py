"""The CUDA path: reference kernels equal their CPU values and gradients, and whole runs train there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyhop
from polyhop import kernels
from polyhop.comm import Collective, run_in_threads
from polyhop.comm.torch_line import join
from polyhop.errors import InputError
from polyhop.graph import Graph, PooledRows
from polyhop.nn import GAT, GCN, GCNII, GIN, DeepGCN, GraphSAGE
from polyhop.partition import partition, share
from polyhop.sample import NeighbourSampler, full_block
from polyhop.strategies import place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return polyhop.load("synth:arxiv?scale=0.02&seed=3")


def both(make):
    """The value and the gradient of ``make(device)`` on the CPU and on CUDA, moved back."""
    return [[t.detach().cpu() for t in make(torch.device(d))] for d in ("cpu", "cuda")]


@pytest.mark.parametrize("weighted", [False, True])
def test_aggregate(graph: Graph, weighted: bool) -> None:
    block = full_block(graph)
    h = torch.randn(graph.num_nodes, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.rand(graph.num_edges, dtype=torch.float64) if weighted else None

    def run(device: torch.device) -> tuple[torch.Tensor, ...]:
        x = h.to(device).requires_grad_()
        w = None if weight is None else weight.to(device)
        out = kernels.aggregate(block.to(device), x, edge_weight=w)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return out, grad

    for a, b in zip(*both(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cut", [0, 100, 300])
def test_rows_in_two_places(graph: Graph, cut: int) -> None:
    """On the device they are brought together; from the host, ``Placement.pooled`` brings those that a block reads."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 37, dtype=torch.float64, generator=generator)
    rows = torch.randint(300, (graph.num_nodes,), generator=generator)
    block = replace(full_block(graph), rows=rows)

    def run(device: torch.device) -> tuple[torch.Tensor, ...]:
        pooled = PooledRows(x[:cut].to(device), x[cut:].to(device))
        return kernels.aggregate(block.to(device), pooled), pooled.gather(rows.to(device))

    for a, b in zip(*both(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with pytest.raises(InputError, match=r"ids\[1\] = 300, outside the 300 stored rows"):
        PooledRows(x[:cut].cuda(), x[cut:].cuda()).gather(torch.tensor([0, 300], device="cuda"))
    given, plain = place("cuda", "32-true").pooled(PooledRows(x[:cut], x[cut:]), block)
    assert plain.rows is None
    assert torch.equal(given.cpu(), x[rows].float())


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention(graph: Graph, p: float) -> None:
    block = full_block(graph)
    generator = torch.Generator().manual_seed(2)
    n = graph.num_nodes
    inputs = [torch.randn(n, *s, dtype=torch.float64, generator=generator) for s in ((3, 5), (3,), (3,))]

    def run(device: torch.device) -> tuple[torch.Tensor, ...]:
        x, a, b = (t.to(device).requires_grad_() for t in inputs)
        out = kernels.attention(block.to(device), x, a, b, self_loop=True, dropout_p=p, dropout_key=7)
        return (out, *torch.autograd.grad(out.square().sum(), (x, a, b)))

    for a, b in zip(*both(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_dropout_drops_the_same_units_on_every_device() -> None:
    h = torch.randn(1000, 130)
    ids = torch.arange(1000) * 7_919_000_000
    a, b = (kernels.dropout(h.to(d), ids.to(d), 0.3, 99).cpu() for d in ("cpu", "cuda"))
    assert torch.equal(a, b)


@pytest.mark.parametrize("model", [GCN, GraphSAGE, GAT, GIN, GCNII, DeepGCN])
def test_models_give_the_cpu_values(graph: Graph, model) -> None:
    torch.manual_seed(0)
    net = model(graph.num_features, 16, num_layers=3, out_channels=graph.num_classes, dropout=0.5).double()
    batch = NeighbourSampler(graph, [5, 5, 5], seed=1).sample(
        torch.arange(0, graph.num_nodes, 9), epoch=0, step=0
    )
    x = graph.x.gather(batch.input_ids).double()

    def run(device: torch.device) -> tuple[torch.Tensor, ...]:
        net.to(device).zero_grad()
        blocks = [block.to(device) for block in batch.blocks]
        out = net(x.to(device), blocks, key=kernels.Key(5, 1, 2))
        out.square().sum().backward()
        return (out, *(p.grad for p in net.parameters() if p.grad is not None))

    for a, b in zip(*both(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("num_neighbors", [None, [10, 5]])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_whole_run_trains(graph: Graph, num_neighbors, precision: str, tmp_path) -> None:
    torch.manual_seed(0)
    net = GraphSAGE(graph.num_features, 32, num_layers=2, out_channels=graph.num_classes, dropout=0.3)
    trainer = polyhop.Trainer(
        max_epochs=15, num_neighbors=num_neighbors, batch_size=256 if num_neighbors else None,
        precision=precision, device="cuda", run_dir=tmp_path / "run", progress="none",
    )  # fmt: skip
    result = trainer.fit(net, graph)
    chance = 1.0 / graph.num_classes
    assert result.test > 4 * chance
    assert trainer.predict(net, graph).shape == (graph.num_nodes, graph.num_classes)


def test_ranks_on_one_gpu_give_the_weights_of_one_process(graph: Graph) -> None:
    """Two virtual ranks (threads) compute on the GPU and exchange through host memory."""

    def options(strategy: str) -> polyhop.Trainer:
        return polyhop.Trainer(
            strategy, max_epochs=2, num_neighbors=[5, 4], batch_size=200, precision="64-true", device="cuda",
            eval_every=100, progress="none",
        )  # fmt: skip

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return GraphSAGE(graph.num_features, 16, num_layers=2, out_channels=graph.num_classes, dropout=0.3)

    alone = model()
    options("single").fit(alone, graph)
    parts = partition(graph, 2, "hash")
    models = [model(), model()]

    def rank(line: Collective) -> torch.Tensor:
        held = share(graph, parts, line.rank)
        options("data").fit(models[line.rank], held, line=line)
        return options("data").predict(models[line.rank], held, line=line)

    predicted = run_in_threads(2, rank)[0]
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value, rtol=0, atol=1e-8)
    assert predicted.shape == (graph.num_nodes, graph.num_classes)


def test_nccl_with_one_rank() -> None:
    line = join(torch.distributed.HashStore(), 0, 1, backend="nccl")
    given = torch.arange(5.0, device="cuda")
    assert torch.equal(line.all_reduce(given, kind="gradients"), given)
    assert line.all_gather(given, kind="hidden")[0].device.type == "cuda"
    assert line.fork().broadcast(given, kind="weights") is given
    line.barrier()
    line.close()
