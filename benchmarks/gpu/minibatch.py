"""A mini-batch epoch on the device: polyhop is charged for everything, PyG for its copies, forward, backward and update.

PyG's samplers are not on that machine: it gets mini-batches that were drawn before, the same layers, in pinned memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from benchmarks.gpu.graphs import graph_of
from benchmarks.graphs import describe
from benchmarks.harness import Figure
from polyhop.graph import Block, DenseFeatures, Graph, Split
from polyhop.nn import GraphSAGE
from polyhop.sample import MiniBatch, NeighborLoader
from polyhop.trainer import Trainer

__all__ = ["run"]

FAN_OUTS, HIDDEN, FEATURES, BATCH = [15, 10, 5], 256, 100, 1024
TRAINED = 0.08  # of the nodes: as many as ogbn-products trains on
PREPARED = 24  # mini-batches of PyG's side, over and over
LR = 0.003
CACHE = {"device": "10GB", "host": "0"}  # of input rows on the device


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``minibatch_vs_pyg``, features on the device and on the host; ``minibatch_idle``: share of time without a kernel."""
    graph = _graph("products?scale=0.1" if is_quick else "products")
    print("  " + describe(graph), flush=True)
    prepared = _prepared(graph, 4 if is_quick else PREPARED)
    _check_equal(graph, prepared[0])
    num_steps = -(-graph.split.train.numel() // BATCH) if graph.split is not None else 0
    ratios = []
    for where in ("device", "host"):
        ours: list[float] = []
        theirs: dict[str, list[float]] = {"edges": [], "csr": []}
        for _ in range(1 if is_quick else 3):
            ours += _ours(graph, CACHE[where])
            for path, seconds in theirs.items():
                seconds.append(num_steps * _pyg(graph, prepared, path, is_on_device=where == "device"))
        peer = min(theirs, key=lambda path: statistics.median(theirs[path]))
        ratios.append(statistics.median(theirs[peer]) / statistics.median(ours))
        told = f"features on the {where}, {num_steps} steps: polyhop {_told(ours)}, "
        told += ", ".join(f"PyG {path} {_told(seconds)}" for path, seconds in theirs.items())
        yield Figure(f"minibatch_vs_pyg_{where}", ratios[-1], "x", told)
    yield Figure("minibatch_vs_pyg", min(ratios), "x", "the smaller of both", at_least=1.3)
    for where in ("device", "host"):
        idle, told = _idle(graph, CACHE[where])
        yield Figure(f"minibatch_idle_{where}", idle, "share", told, at_most=0.1)


def _told(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s [{min(seconds):.3f} .. {max(seconds):.3f}]"


def _graph(name: str) -> Graph:
    graph = graph_of(name)
    generator = torch.Generator().manual_seed(3)
    train = torch.randperm(graph.num_nodes, generator=generator)[: int(TRAINED * graph.num_nodes)]
    x = torch.randn(graph.num_nodes, FEATURES, generator=generator)
    none = torch.zeros(0, dtype=torch.int64)
    return replace(graph, x=DenseFeatures(x), split=Split(train.sort().values, none, none))


def _model(graph: Graph) -> GraphSAGE:
    torch.manual_seed(1)
    return GraphSAGE(FEATURES, HIDDEN, num_layers=len(FAN_OUTS), out_channels=graph.num_classes)


def _trainer(cache: str, epochs: int, seen: Callable[[dict[str, object]], None]) -> Trainer:
    return Trainer(
        "single", num_neighbors=FAN_OUTS, batch_size=BATCH, max_epochs=epochs, lr=LR, seed=3, device="cuda",
        device_cache=cache, progress="none", eval_every=1000, callbacks=(seen,),
    )  # fmt: skip


def _ours(graph: Graph, cache: str) -> list[float]:
    """Seconds of epochs of the trainer as users have it, the first left out."""
    seconds: list[float] = []
    _trainer(cache, 3, lambda record: seconds.append(float(str(record["train_seconds"])))).fit(
        _model(graph), graph
    )
    return seconds[1:]


def _prepared(graph: Graph, num: int) -> list[tuple[MiniBatch, Tensor, Tensor]]:
    """(mini-batch, input rows, labels) in pinned memory."""
    loader = NeighborLoader(graph, FAN_OUTS, batch_size=BATCH, seed=3, num_workers=8, prefetch=8)
    found = []
    for loaded in itertools.islice(loader.batches(0), num):
        assert isinstance(loaded.x, Tensor)
        assert loaded.y is not None
        found.append((loaded.batch, loaded.x.pin_memory(), loaded.y.pin_memory()))
    return found


class _Sage(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        widths = [FEATURES, *[HIDDEN] * (len(FAN_OUTS) - 1), num_classes]
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, h: Tensor, layers: list[tuple[Tensor, int]]) -> Tensor:
        for i, (edges, num_dst) in enumerate(layers):
            h = self.convs[i]((h, h[:num_dst]), edges)
            h = h.relu() if i + 1 < len(layers) else h
        return h


def _peer_model(graph: Graph) -> nn.Module:
    model = _Sage(graph.num_classes)
    model.load_state_dict(_model(graph).state_dict())
    return model.cuda()


def _on_host(block: Block, path: str) -> tuple[Tensor, ...]:
    """What PyG copies of a layer: a list of edges, or a matrix of means."""
    if path == "edges":
        dst = torch.repeat_interleave(torch.arange(block.num_dst), block.drawn)
        return (torch.stack([block.indices.long(), dst]).pin_memory(),)
    mean = (1 / block.drawn.clamp(min=1).float()).repeat_interleave(block.drawn)
    return tuple(t.pin_memory() for t in (block.indptr, block.indices.long(), mean))


def _layer(given: tuple[Tensor, ...], block: Block) -> tuple[Tensor, int]:
    moved = [t.to("cuda", non_blocking=True) for t in given]
    if len(moved) == 1:
        return moved[0], block.num_dst
    return torch.sparse_csr_tensor(*moved, (block.num_dst, block.num_src)), block.num_dst


def _pyg(
    graph: Graph, prepared: list[tuple[MiniBatch, Tensor, Tensor]], path: str, *, is_on_device: bool
) -> float:
    """Seconds of a step: copies, forward, backward, update."""
    assert graph.x is not None
    model = _peer_model(graph)
    if path == "csr":
        for conv in model.convs:  # type: ignore[union-attr]
            conv.aggr_module.aggr = "sum"  # type: ignore[union-attr]
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    rows = graph.x.all().cuda() if is_on_device else None  # type: ignore[union-attr]
    layers = [[_on_host(block, path) for block in batch.blocks] for batch, _, _ in prepared]
    ids = [batch.input_ids.pin_memory() for batch, _, _ in prepared]

    def step(at: int) -> None:
        batch, x, y = prepared[at]
        moved = x.to("cuda", non_blocking=True) if rows is None else rows[ids[at].cuda(non_blocking=True)]
        edges = [_layer(given, block) for given, block in zip(layers[at], batch.blocks, strict=True)]
        loss = functional.cross_entropy(model(moved, edges), y.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for at in range(min(4, len(prepared))):
        step(at)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        for at in range(len(prepared)):
            step(at)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / (3 * len(prepared))


def _check_equal(graph: Graph, given: tuple[MiniBatch, Tensor, Tensor]) -> None:
    """Same work: the same loss, from the same weights."""
    batch, x, y = given
    blocks = [block.to("cuda") for block in batch.blocks]
    losses = {"polyhop": functional.cross_entropy(_model(graph).cuda().eval()(x.cuda(), blocks), y.cuda())}
    for path in ("edges", "csr"):
        model = _peer_model(graph)
        if path == "csr":
            for conv in model.convs:  # type: ignore[union-attr]
                conv.aggr_module.aggr = "sum"  # type: ignore[union-attr]
        layers = [_layer(_on_host(block, path), block) for block in batch.blocks]
        losses[path] = functional.cross_entropy(model(x.cuda(), layers), y.cuda())
    num_edges = sum(block.num_edges for block in batch.blocks)
    for name, loss in losses.items():
        print(f"  {name}: loss {float(loss):.5f} of {num_edges:,} edges", flush=True)
        assert abs(float(loss) - float(losses["polyhop"])) < 1e-4, f"{name} computes another loss"


def _idle(graph: Graph, cache: str) -> tuple[float, str]:
    """Share of the last epochs' time in which no kernel and no copy ran, as torch's profiler saw it."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    bounds: list[float] = []

    def seen(record: dict[str, object]) -> None:
        torch.cuda.synchronize()
        if record["epoch"] == 1:
            profiler.start()
        bounds.append(time.perf_counter())
        if record["epoch"] == 2:
            profiler.stop()

    _trainer(cache, 2, seen).fit(_model(graph), graph)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    wall = (bounds[1] - bounds[0]) * 1e6
    return max(0.0, 1 - busy / wall), f"{busy / 1e3:.0f} of {wall / 1e3:.0f} ms busy, {len(spans):,} launches"
