"""What a full-graph epoch on a device holds at most, and what it moves, counted without one.

``python -m benchmarks.gpu.held [gcn|sage|gat ...]``. The code of the device runs on tensors in host memory; its kernels are
named but not run, for what they compute decides no size. Bytes are linear in nodes and edges, so that three small graphs
give those of any graph.

Left out: what torch's allocator and cuBLAS take for themselves.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.environ |= {"TRITON_INTERPRET": "1", "POLYHOP_KERNELS": "triton"}  # read when kernels are defined

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyhop.graph import Block
from polyhop.nn import GAT, GCN, GraphSAGE

__all__ = ["Epoch", "Held", "held_at_most", "make_epoch", "per_node_and_edge"]

HIDDEN, LAYERS = 256, 3
GRAPHS = {  # name: nodes, directed edges, input columns, classes
    "products": (2_449_029, 123_718_280, 100, 47),
    "reddit": (232_965, 114_615_892, 602, 41),
}
SIZES = (4096, 204_800), (6144, 204_800), (4096, 409_600)  # nodes, edges
_SECOND = 4.2e12  # bytes that one H200 copies


@dataclass(frozen=True)
class Held:
    """Bytes alive at most, and the names of what was alive then: the operation and those it was called by."""

    num_bytes: int
    names: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Epoch:
    """Forward, backward and update on a graph, and all that is there before."""

    run: Callable[[], object]
    given: list[Tensor]

    @property
    def given_bytes(self) -> int:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self.given}
        return sum(storages.values())


def held_at_most(work: Callable[[], object]) -> Held:
    """What the work allocates, by torch's own record of every allocation and release in host memory."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    assert record.profiler is not None
    assert record.profiler.kineto_results is not None
    events = list(_all(record.profiler.kineto_results.experimental_event_tree()))
    changes = sorted((e for e in events if e.tag == _EventType.Allocation), key=lambda e: e.start_time_ns)
    alive: dict[int, tuple[int, str]] = {}
    now, most, then = 0, 0, dict(alive)
    for event in changes:
        at, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size < 0 and at not in alive:
            continue  # made before
        now += size
        if size < 0:
            del alive[at]
        else:
            alive[at] = (size, _name(event))
        if now > most:
            most, then = now, dict(alive)
    return Held(most, tuple(sorted(then.values(), reverse=True)))


def _all(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


def _name(event: Any) -> str:
    names, above = [], event.parent
    while above is not None and len(names) < 4:
        names.append(above.name.removeprefix("aten::").removeprefix("autograd::engine::evaluate_function: "))
        above = above.parent
    return " < ".join(names) or "Python"


def make_epoch(model: nn.Module, block: Block, *, features: int, classes: int) -> Epoch:
    """An epoch that ran once before, so that what a graph keeps is there."""
    x, y = torch.randn(block.num_dst, features), torch.randint(classes, (block.num_dst,))

    def run() -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        functional.cross_entropy(model(x, block), y, ignore_index=-1).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    run()
    from polyhop.kernels.triton import segments

    turned = vars(block.transposed())
    kept = [value[1] for name, value in block._cache.items() if name != "t"]  # the block's scales
    parts = [x, y, block.indptr, block.indices, *turned.values(), *model.parameters(), *kept]
    for value in kept:
        parts += vars(value).values()
    parts += [segments.segments(each, block.num_edges).ends for each in (block.indptr, turned["indptr"])]
    return Epoch(run, [each for each in parts if isinstance(each, Tensor)])


def both_ways(num_nodes: int, num_edges: int) -> Block:
    """A graph without order whose edges all go both ways."""
    gen = torch.Generator().manual_seed(0)
    pairs = torch.randperm(num_nodes * (num_nodes - 1) // 2, generator=gen)[: num_edges // 2]
    high = ((1 + (1 + 8 * pairs.double()).sqrt()) / 2).long()
    low = pairs - high * (high - 1) // 2
    edges = torch.cat([high * num_nodes + low, low * num_nodes + high]).sort().values
    indptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(edges // num_nodes, minlength=num_nodes).cumsum(0)
    return Block(indptr, (edges % num_nodes).int(), num_nodes)


class _Moved(TorchDispatchMode):
    """Bytes that operations on rows read and write: each operand once, and so rows that edges read."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self._num_nodes = num_nodes
        self.bytes: Counter[str] = Counter()

    def note(self, name: str, operands: list[Any]) -> None:
        rows = [t for t in operands if isinstance(t, Tensor) and t.dim() and self._num_nodes in t.shape]
        self.bytes[name] += sum(t.numel() * t.element_size() for t in rows)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(("empty", "new_empty", "_unsafe"))):
            written = [] if func._schema.is_mutable else tree_leaves(result)
            again = [args[0]] if name == "addmm_" else []
            self.note(name, [*tree_leaves(args), *tree_leaves(kwargs or {}), *again, *written])
        return result


@contextmanager
def _named_kernels(moved: _Moved | None = None) -> Iterator[None]:
    """Kernels that note their operands and compute nothing."""
    from polyhop.kernels.triton import attention, dropout, segments, spmm

    class Idle:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return self._run

        def _run(self, *args: Any, **constants: Any) -> None:
            if moved is not None and self._name not in ("_long_lists", "_join", "_add"):  # a few rows
                again = [args[11]] if constants.get("ADDS") else []  # what sums are added to
                moved.note(
                    self._name,
                    [each for i, each in enumerate(args) if not (i == 5 and each is args[4])] + again,
                )

    kernels = [(module, name) for module in (attention, dropout, spmm) for name in vars(module)]
    kernels = [
        (m, n) for m, n in kernels if type(getattr(m, n)).__name__ in ("InterpretedFunction", "JITFunction")
    ]
    before = [getattr(module, name) for module, name in kernels]
    limit = segments._limit
    try:
        segments._limit = lambda num_edges: segments._LONGEST  # as on graphs of many edges
        for module, name in kernels:
            setattr(module, name, Idle(name))
        yield
    finally:
        segments._limit = limit
        for (module, name), kernel in zip(kernels, before, strict=True):
            setattr(module, name, kernel)


def _model(kind: str, features: int, classes: int) -> nn.Module:
    if kind == "gat":
        return GAT(features, 64, num_layers=LAYERS, out_channels=classes, heads=1)
    make = GCN if kind == "gcn" else GraphSAGE
    return make(features, HIDDEN, num_layers=LAYERS, out_channels=classes)


def per_node_and_edge(
    kind: str, features: int, classes: int, sizes: tuple[tuple[int, int], ...] = SIZES
) -> tuple[float, float, float, Held]:
    """Bytes a node, an edge and others that an epoch holds at most; and what the first of the sizes holds then."""
    totals, held = [], []
    for size in sizes:
        with _named_kernels():
            epoch = make_epoch(
                _model(kind, features, classes), both_ways(*size), features=features, classes=classes
            )
            held.append(held_at_most(epoch.run))
        totals.append(held[-1].num_bytes + epoch.given_bytes)
    (n, e), (n2, _), (_, e2) = sizes
    per_node, per_edge = (totals[1] - totals[0]) / (n2 - n), (totals[2] - totals[0]) / (e2 - e)
    return per_node, per_edge, totals[0] - per_node * n - per_edge * e, held[0]


def _report(kind: str, graph: str) -> None:
    nodes, edges, features, classes = GRAPHS[graph]
    per_node, per_edge, others, held = per_node_and_edge(kind, features, classes)
    whole = (per_node * nodes + per_edge * edges + others) / 2**30
    print(f"{kind} {graph}: {per_node:.0f} B a node, {per_edge:.2f} B an edge: {whole:.2f} GiB")
    for size, name in held.names:
        if size >= 16 * SIZES[0][0]:
            print(f"  {size / SIZES[0][0]:7.0f} B a node: {name}")
    _report_moved(kind, graph)


def _report_moved(kind: str, graph: str) -> None:
    nodes, _, features, classes = GRAPHS[graph]
    size = SIZES[0]
    moved = _Moved(size[0])
    with _named_kernels(moved):
        epoch = make_epoch(
            _model(kind, features, classes), both_ways(*size), features=features, classes=classes
        )
        moved.bytes.clear()
        with moved:
            epoch.run()
    total = sum(moved.bytes.values()) * nodes / size[0]
    print(
        f"  rows read and written, edges apart: {total / 1e9:.1f} GB, {total / _SECOND * 1e3:.1f} ms of copying"
    )
    for name, num in moved.bytes.most_common(12):
        if num:
            print(f"  {num / size[0]:7.0f} B a node: {name}")


if __name__ == "__main__":
    for graph in GRAPHS:
        for kind in sys.argv[1:] or ("gcn", "sage", "gat"):
            _report(kind, graph)
