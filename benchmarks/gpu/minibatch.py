"""A mini-batch epoch on the device: polyhop is charged for everything, PyG for its copies, forward, backward and update.

PyG's samplers are not on that machine: it gets mini-batches that were drawn before, the same layers, in pinned memory. A
side that fails is told, and the others go on.
"""

from __future__ import annotations

import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from benchmarks.gpu.graphs import graph_of
from benchmarks.gpu.seen import Seen
from benchmarks.graphs import describe
from benchmarks.harness import Figure
from polyhop.graph import Block, DenseFeatures, Graph, Split
from polyhop.nn import GraphSAGE
from polyhop.sample import MiniBatch, NeighborLoader
from polyhop.trainer import Trainer

__all__ = ["run"]

T = TypeVar("T")

FAN_OUTS, HIDDEN, FEATURES, BATCH = [15, 10, 5], 256, 100, 1024
TRAINED = 0.08  # of the nodes: as many as ogbn-products trains on
PREPARED = 16  # mini-batches of PyG's side, over and over
LR = 0.003
CACHE: dict[str, int | None] = {
    "device": None,
    "host": 1,
}  # bytes of input rows on the device; None: as it is unasked
MOST_S = 70.0  # from the first line on: epochs end in time, rather than be as many as wanted
EPOCHS = 4  # timed, and one more for the profiler


def run(*, is_quick: bool) -> Iterator[Figure]:
    """``minibatch_vs_pyg``, features on the device and on the host; ``minibatch_idle``: share of time without a kernel."""
    clock = _Clock()
    graph = _graph("products?scale=0.1" if is_quick else "products")
    print("  " + describe(graph), flush=True)
    clock.told("graph and features")
    peer = _Peer(graph, _prepared(graph, 4 if is_quick else PREPARED))
    clock.told("mini-batches of PyG's side")
    _tried("the same loss", lambda: _check_equal(graph, peer.prepared[0]))
    num_steps = -(-graph.split.train.numel() // BATCH) if graph.split is not None else 0
    ratios, idles = [], []
    for where, share in (("device", 0.55), ("host", 1.0)):
        theirs: dict[str, list[float]] = {"edges": [], "csr": []}
        ours = _Ours()
        peer.add(theirs, num_steps, is_on_device=where == "device")
        _tried(f"features on the {where}", lambda ours=ours, where=where, share=share: ours.run(
            graph, CACHE[where], 1 if is_quick else EPOCHS, clock, share * MOST_S
        ))  # fmt: skip
        clock.told(f"epochs with features on the {where}")
        peer.add(theirs, num_steps, is_on_device=where == "device")
        clock.told("PyG's")
        told = f"features on the {where}, {num_steps} steps: polyhop {_told(ours.seconds)}, "
        told += ", ".join(f"PyG {path} {_told(seconds)}" for path, seconds in theirs.items())
        known = [statistics.median(seconds) for seconds in theirs.values() if seconds]
        if ours.seconds and known:
            ratios.append(min(known) / statistics.median(ours.seconds))
            yield Figure(f"minibatch_vs_pyg_{where}", ratios[-1], "x", told)
        else:
            print("  " + told, flush=True)
        if ours.seen is not None:
            for line in ours.seen.lines(num_steps):
                print(f"  {where}: {line}", flush=True)
            told = f"{ours.seen.busy_ms:.0f} of {ours.seen.window_ms:.0f} ms busy, "
            told += f"{ours.seen.num_kernels / max(num_steps, 1):.0f} kernels and "
            told += f"{sum(ours.seen.waits.values()) / max(num_steps, 1):.1f} waits a step"
            idles.append(Figure(f"minibatch_idle_{where}", ours.seen.idle, "share", told, at_most=0.1))
    if len(ratios) == 2:
        yield Figure("minibatch_vs_pyg", min(ratios), "x", "the smaller of both", at_least=1.3)
    yield from idles


class _Clock:
    """Seconds since the bench began, and what they went to."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def told(self, what: str) -> None:
        now = time.perf_counter()
        print(f"  {now - self.began:5.1f} s  {what}: {now - self.last:.1f} s", flush=True)
        self.last = now


def _tried(what: str, work: Callable[[], T]) -> T | None:
    """What work gives; None, and why, where it fails."""
    try:
        return work()
    except Exception:
        print(f"  {what} FAILED\n{traceback.format_exc()}", flush=True)
        return None


def _told(seconds: list[float]) -> str:
    if not seconds:
        return "failed"
    return f"{statistics.median(seconds):.3f} s [{min(seconds):.3f} .. {max(seconds):.3f}]"


def _graph(name: str) -> Graph:
    graph = graph_of(name)
    generator = torch.Generator().manual_seed(3)
    train = torch.randperm(graph.num_nodes, generator=generator)[: int(TRAINED * graph.num_nodes)]
    on_device = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(graph.num_nodes, FEATURES, generator=on_device, device="cuda").cpu()
    none = torch.zeros(0, dtype=torch.int64)
    return replace(graph, x=DenseFeatures(x), split=Split(train.sort().values, none, none))


def _model(graph: Graph) -> GraphSAGE:
    torch.manual_seed(1)
    return GraphSAGE(FEATURES, HIDDEN, num_layers=len(FAN_OUTS), out_channels=graph.num_classes)


@dataclass
class _Ours:
    """Epochs of the trainer as users have it: the first warms up, the last is the profiler's."""

    seconds: list[float] = field(default_factory=list)  # of the others
    seen: Seen | None = None

    def run(self, graph: Graph, cache: int | None, epochs: int, clock: _Clock, until_s: float) -> None:
        """``until_s``: of the clock, after which no more than the profiler's epoch begins."""
        profiler: Any = None

        def after(record: dict[str, Any]) -> bool:
            nonlocal profiler
            if profiler is not None:
                torch.cuda.synchronize()
                profiler.stop()
                return True
            if record["epoch"] == 1:
                print(
                    f"  epoch 1: {float(record['train_seconds']):.3f} s, loss {float(record['loss']):.4f}",
                    flush=True,
                )
                return False
            self.seconds.append(float(record["train_seconds"]))
            if len(self.seconds) >= epochs or clock.seconds > until_s:
                torch.cuda.synchronize()
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profiler.start()
            return False

        Trainer(
            "single", num_neighbors=FAN_OUTS, batch_size=BATCH, max_epochs=epochs + 2, lr=LR, seed=3, device="cuda",
            device_cache=cache, progress="plain", eval_every=1000, callbacks=(after,),
        ).fit(_model(graph), graph)  # fmt: skip
        if profiler is not None:
            self.seen = _tried("the profiler's trace", lambda: Seen.of_profile(profiler))


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


def _peer_model(graph: Graph, path: str) -> nn.Module:
    model = _Sage(graph.num_classes)
    model.load_state_dict(_model(graph).state_dict())
    if path == "csr":
        for conv in model.convs:
            conv.aggr_module.aggr = "sum"  # type: ignore[union-attr]
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


class _Peer:
    """PyG's side; what its steps copy is made once for each path."""

    def __init__(self, graph: Graph, prepared: list[tuple[MiniBatch, Tensor, Tensor]]) -> None:
        assert graph.x is not None
        self.graph, self.prepared, self.x = graph, prepared, graph.x.all()
        self.ids = [batch.input_ids.pin_memory() for batch, _, _ in prepared]
        self.layers = {
            path: [[_on_host(block, path) for block in batch.blocks] for batch, _, _ in prepared]
            for path in ("edges", "csr")
        }

    def add(self, theirs: dict[str, list[float]], num_steps: int, *, is_on_device: bool) -> None:
        """Seconds of an epoch by each path, where it does not fail."""
        for path, seconds in theirs.items():
            step_s = _tried(f"PyG {path}", lambda path=path: self.step_s(path, is_on_device=is_on_device))
            seconds += [] if step_s is None else [num_steps * step_s]

    def step_s(self, path: str, *, is_on_device: bool) -> float:
        """Seconds of a step: copies, forward, backward, update."""
        model = _peer_model(self.graph, path)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
        rows = self.x.cuda() if is_on_device else None

        def step(at: int) -> None:
            batch, x, y = self.prepared[at]
            moved = (
                x.to("cuda", non_blocking=True)
                if rows is None
                else rows[self.ids[at].cuda(non_blocking=True)]
            )
            given = zip(self.layers[path][at], batch.blocks, strict=True)
            edges = [_layer(layer, block) for layer, block in given]
            loss = functional.cross_entropy(model(moved, edges), y.cuda(non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for at in range(min(4, len(self.prepared))):
            step(at)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            for at in range(len(self.prepared)):
                step(at)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / (3 * len(self.prepared))


def _check_equal(graph: Graph, given: tuple[MiniBatch, Tensor, Tensor]) -> None:
    """Same work: the same loss, from the same weights."""
    batch, x, y = given
    blocks = [block.to("cuda") for block in batch.blocks]
    losses = {"polyhop": functional.cross_entropy(_model(graph).cuda().eval()(x.cuda(), blocks), y.cuda())}
    for path in ("edges", "csr"):
        model = _peer_model(graph, path)
        layers = [_layer(_on_host(block, path), block) for block in batch.blocks]
        losses[path] = functional.cross_entropy(model(x.cuda(), layers), y.cuda())
    num_edges = sum(block.num_edges for block in batch.blocks)
    for name, loss in losses.items():
        print(f"  {name}: loss {float(loss):.5f} of {num_edges:,} edges", flush=True)
        assert abs(float(loss) - float(losses["polyhop"])) < 1e-4, f"{name} computes another loss"
