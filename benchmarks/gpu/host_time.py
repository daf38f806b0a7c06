"""What a mini-batch step on a device asks of the host, counted without a device: ``python -m benchmarks.gpu.host_time``.

Tensors lie in memory and are tiny, so that what torch computes takes no time beside what it takes to ask for it. Kernels run
in Triton's interpreter while the clock stands still; what their launches take is measured apart, on Triton's own way to a
launch, up to where its launcher in C would begin. What a CUDA device adds to an operation (some 3 us) is not in it.
"""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "POLYHOP_KERNELS": "triton"}

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter, jit

from polyhop.graph import DenseFeatures, Graph
from polyhop.kernels import checks, native
from polyhop.kernels.triton import segments
from polyhop.nn import GraphSAGE
from polyhop.sample import NeighborLoader
from polyhop.strategies import WholeGraph, place
from polyhop.strategies.placed import place_graph
from polyhop.strategies.single import _MiniBatch
from polyhop.trace import NO_TRACE
from polyhop.train import loop, loss, optim
from polyhop.train.state import Session

__all__ = ["Counts", "counted"]

FAN_OUTS, BATCH, STEPS = [3, 2, 2], 2, 20
CPU = torch.device("cpu")
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "bincount")
_NO_WORK = (
    "view",
    "slice",
    "select",
    "t",
    "as_strided",
    "alias",
    "detach",
    "transpose",
    "unsqueeze",
    "expand",
)
_FREE = (
    *_NO_WORK,
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "squeeze",
    "narrow",
    "split",
)


class Counts(TorchDispatchMode):
    """Of what runs inside: ``work`` (operations that launch something), ``views``, ``waits``, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()
        self.views: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if (
            name.startswith(_WAITS)
            or (name == "index" and any(_is_mask(each) for each in args[1]))
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        ):
            self.waits[name] += 1
        (self.views if name in _FREE else self.work)[name] += 1
        return func(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class _Launches:
    """Every launch of a kernel: counted, and its own time left out."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.kept: dict[str, tuple[Any, Any, Any, Any]] = {}
        self.seconds = 0.0
        self.counts: Counts | None = None
        self.is_empty = False  # launches do nothing

    def patch(self) -> None:
        plain = interpreter.InterpretedFunction.run
        launches = self

        def run(self: Any, *args: Any, grid: Any, warmup: Any, **given: Any) -> Any:
            begin = time.thread_time()
            if launches.counts is not None:
                launches.counts.is_paused = True
            name = self.fn.__name__
            launches.names[name] += 1
            launches.kept.setdefault(name, (self, grid, args, dict(given)))
            try:
                if launches.is_empty:
                    return None
                return plain(self, *args, grid=grid, warmup=warmup, **given)
            finally:
                if launches.counts is not None:
                    launches.counts.is_paused = False
                launches.seconds += time.thread_time() - begin

        interpreter.InterpretedFunction.run = run


def _teach_interpreter() -> None:
    """Loop bounds are arrays of one element there, which numpy turns into an index no more from 2.4 on."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _graph(num_nodes: int = 400, features: int = 100) -> Graph:
    rng = np.random.default_rng(1)
    dst = np.sort(rng.integers(0, num_nodes, num_nodes * 20))
    indptr = np.zeros(num_nodes + 1, np.int64)
    indptr[1:] = np.bincount(dst, minlength=num_nodes).cumsum()
    indices = torch.from_numpy(rng.integers(0, num_nodes, len(dst)).astype(np.int32))
    y = torch.from_numpy(rng.integers(0, 7, num_nodes))
    x = DenseFeatures(torch.randn(num_nodes, features))
    return Graph(torch.from_numpy(indptr), indices, x, y, num_classes=7, name="tiny")


class _Parts:
    """The real loop over real steps, its two threads' work one after the other in this one."""

    def __init__(self, cache: int | None) -> None:
        graph = _graph()
        train_ids = torch.arange(STEPS * BATCH)
        found = place_graph(
            graph, CPU, 1 << 30, cache=cache, train_ids=train_ids, batch_size=BATCH, num_neighbors=FAN_OUTS
        )
        assert found is not None
        self.loader = NeighborLoader(
            found.graph, FAN_OUTS, train_ids, BATCH, num_workers=0, in_place=cache is None, device=CPU, transposes=True
        )  # fmt: skip
        torch.manual_seed(1)
        model = GraphSAGE(100, 16, num_layers=3, out_channels=7)
        whole = WholeGraph(graph, place("cpu", "32-true"))
        self.step = _MiniBatch(model, self.loader, whole, loss.cross_entropy_sum, 1, None, [])
        self.session = Session(model, optim.build_optimizer("adam", model, lr=0.003), self.step)
        self.tools = loop.Tools(
            set_lr=lambda step: 0.003,
            evaluate=dict,
            save=lambda: None,
            on_step=lambda *_: None,
            on_epoch=lambda _: False,
            stop=lambda: None,
            trace=NO_TRACE,
        )

    def batches(self) -> list[Any]:
        return list(self.loader.batches(0))

    def train(self, made: list[Any]) -> None:
        self.step.batches = lambda epoch, start=0: iter(made)  # type: ignore[method-assign]
        self.session.state.epoch, self.session.state.step = 0, 0
        loop.train(self.session, loop.Options(1, 3), self.tools)


@contextmanager
def counted(launches: _Launches) -> Iterator[Counts]:
    launches.names.clear()
    plain = torch.Tensor.tolist
    with Counts() as counts:
        launches.counts = counts

        def tolist(tensor: torch.Tensor) -> Any:
            counts.waits["tolist"] += 1
            return plain(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        try:
            yield counts
        finally:
            launches.counts, torch.Tensor.tolist = None, plain  # type: ignore[method-assign]


@contextmanager
def _again(launches: _Launches, work: Callable[[], Any]) -> Iterator[None]:
    """Sizes of a turn that was computed, kept for turns whose kernels do nothing: the interpreter leaves caches cold."""
    empty, plain = torch.empty, torch.Tensor.tolist
    kept: list[Any] = []

    def keep(tensor: torch.Tensor) -> Any:
        kept.append(plain(tensor))
        return kept[-1]

    torch.Tensor.tolist = keep  # type: ignore[method-assign]
    work()
    sizes = itertools.cycle(kept)
    torch.Tensor.tolist = lambda tensor: next(sizes)  # type: ignore[method-assign]
    torch.empty, launches.is_empty = torch.zeros, True  # ids of nodes that there are
    try:
        yield
    finally:
        torch.empty, torch.Tensor.tolist, launches.is_empty = empty, plain, False  # type: ignore[method-assign]


def _host_ms(launches: _Launches, work: Callable[[], Any]) -> float:
    """Milliseconds of a step, kernels apart: the median of several turns."""
    turns = []
    for _ in range(5):
        launches.seconds, begin = 0.0, time.thread_time()
        work()
        turns.append((time.thread_time() - begin - launches.seconds) / STEPS * 1e3)
    return statistics.median(turns)


class _Driver:
    """As much of Triton's driver as its way to a launch asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class _Any:
    """What is read of a list's end in memory, which nobody reads on a device."""

    def __eq__(self, other: object) -> bool:
        return True


class _Kernel:
    """A compiled kernel whose launcher does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        return None


def _launch_us(launches: _Launches) -> dict[str, float]:
    """Microseconds of each kernel's launch, Triton's launcher in C apart."""
    triton.runtime.driver.set_active(_Driver())
    found = {}
    for name, (fn, grid, args, given) in launches.kept.items():
        made = jit.JITFunction(fn.fn, do_not_specialize=fn.kwargs.get("do_not_specialize"))
        made._do_compile = lambda key, *rest, made=made, **more: made.device_caches[0][0].setdefault(
            key, _Kernel()
        )
        turns = []
        for _ in range(2000):
            begin = time.thread_time()
            made[grid](*args, **given)
            turns.append(time.thread_time() - begin)
        found[name] = statistics.median(turns) * 1e6
    return found


def _told(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {num / STEPS:g}" for name, num in counter.most_common())


def main() -> None:
    """Print the counts and the milliseconds of a step, of the loading and of the training thread."""
    torch.set_num_threads(1)
    _teach_interpreter()
    native.serves = lambda *tensors, **given: False  # as for tensors on a device
    checks._ends = lambda values: (0, _Any())
    loop.math = SimpleNamespace(isfinite=lambda value: True)  # what is not computed may be anything
    segments._SHORTEST = segments._LONGEST = (
        4  # as few edges as the lists of these mini-batches have, or fewer
    )
    launches = _Launches()
    launches.patch()
    for where, cache in (("device", None), ("host", 0)):
        launches.is_empty = False
        parts = _Parts(cache)
        made = parts.batches()
        for name, work in (("load", parts.batches), ("train", partial(parts.train, made))):
            launches.is_empty = name == "train"
            with counted(launches) as counts:
                work()
            kernels, num = Counter(launches.names), sum(launches.names.values()) / STEPS
            with _again(launches, work) if name == "load" else nullcontext():
                ms = _host_ms(launches, work)
            print(f"features on the {where}, {name}: {num:g} launches of kernels, "
                  f"{sum(counts.work.values()) / STEPS:g} operations, {sum(counts.views.values()) / STEPS:g} views, "
                  f"{sum(counts.waits.values()) / STEPS:g} waits; {ms:.3f} ms beside the launches")  # fmt: skip
            print(
                f"    kernels: {_told(kernels)}\n    operations: {_told(counts.work)}\n    waits: {_told(counts.waits)}"
            )
            if "--profile" in sys.argv:
                profile = cProfile.Profile()
                profile.runcall(work)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    for name, took in _launch_us(launches).items():
        print(f"    launching {name}: {took:.1f} us")


if __name__ == "__main__":
    main()
