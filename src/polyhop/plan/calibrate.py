"""Measuring a host: short, repeated, the best of a few; while it is measured the other cores do the like.

Two halves, since messages need ranks: ``measure_cores`` in one process, ``measure_messages`` on ranks, together.
Figures are of the processor's time, not of the clock, wherever one thread does it alone, so that what else runs on the host
matters little.

Legend: n rows, F columns.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.comm.probe import measure_link
from polyhop.graph import Graph
from polyhop.kernels import dequantise_rows, gather_rows, quantise_rows, spmm
from polyhop.plan.law import Law
from polyhop.plan.machine import Link, Machine, host_name
from polyhop.plan.probe import measure_law
from polyhop.sample import NeighbourSampler

__all__ = [
    "cache_bytes",
    "measure_cores",
    "measure_messages",
    "measured_law",
    "num_cores",
    "others_busy",
    "process_bytes",
]

_ROWS, _COLUMNS = 1 << 17, 128
_REPEATS = 5
_MESSAGES, _LARGE_BYTES = 40, 1 << 23
_DISK_BYTES = 1 << 26
# Over ranks a node costs many times what drawing for it does: ids are sorted, encoded, looked up and renumbered. Fitted to
# 49 runs of 7 ways on 4 ranks (strategies/split_auto): 0.18 us a node where drawing took 9 ns.
_HANDLED = 20.0
_BARE = """
import torch
import polyhop.trainer
from polyhop.kernels import spmm
weight = torch.ones(8, 8, requires_grad=True)
optimizer = torch.optim.Adam([weight])
spmm(torch.arange(9), torch.arange(8).int(), weight @ weight, num_src=8).sum().backward()
optimizer.step()
print(open("/proc/self/statm").read().split()[1])
"""
_BARE_S, _ASSUMED_BYTES = 120.0, 3.4e8


def measure_cores(name: str | None = None) -> Machine:
    """All that one process can measure; messages are as between threads until ``measure_messages``."""
    with _one_thread(), others_busy():
        stored = torch.full((_ROWS, _COLUMNS), 0.5)
        rows = torch.randint(_ROWS, (_ROWS // 2,), generator=torch.Generator().manual_seed(0))
        gathered = 4 * rows.numel() * _COLUMNS / _best_s(lambda: gather_rows(stored, rows))
        streamed = 4 * stored.numel() / _best_s(lambda: stored.clone())
        node_s, edge_s = _sampling()
        quantise_s = _quantising(stored[: 1 << 15])
    return Machine(
        name=name or platform.node(),
        cores=num_cores(),
        memory_bytes=_memory(),
        cache_bytes=cache_bytes(),
        gather_bytes_per_s=gathered,
        stream_bytes_per_s=streamed,
        node_s=_HANDLED * node_s,
        edge_s=edge_s,
        message_s=0.0,
        byte_s=0.0,
        quantise_s=quantise_s,
        process_bytes=process_bytes(),
        disk_bytes_per_s=_disk(),
        thread_gain=_thread_gain(),
        link=Link(10e9, 0.0),
        gpus=torch.cuda.device_count(),
        gpu_memory_bytes=float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0.0,
        source=f"measured {datetime.now(UTC):%Y-%m-%d} on {name or platform.node()}",
    )  # fmt: skip


def measured_law(
    model: nn.Module,
    num_features: int,
    *,
    input_values: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    is_fresh: bool = False,
) -> Law:
    """Of a rank: one thread, while other ranks keep the other cores busy and share the cache."""
    share = cache_bytes() / num_cores()
    if device != "cpu":
        found = measure_law(
            model, num_features, input_values=input_values, dtype=dtype, device=device, is_fresh=is_fresh
        )
        return replace(found, host=host_name())
    with _one_thread(), others_busy():
        found = measure_law(
            model,
            num_features,
            input_values=input_values,
            dtype=dtype,
            cache_bytes=share,
            is_fresh=is_fresh,
        )
    return replace(found, host=host_name())


def measure_messages(line: Collective) -> tuple[Link, float, float]:
    """(the link, processor time of a message, of a byte): the same on all ranks, which call it together."""
    link = measure_link(line)
    peers = line.num_ranks - 1
    if peers == 0:
        return Link(link.bytes_per_s, link.latency_s), 0.0, 0.0
    small = min(_sent_cpu(line, 1, _MESSAGES) for _ in range(_REPEATS))
    large = min(_sent_cpu(line, _LARGE_BYTES, 2) for _ in range(2))
    own = torch.tensor([small / peers, (large - small) / (peers * _LARGE_BYTES)], dtype=torch.float64)
    everyone = line.all_gather(own.to(line.device), kind="sizes", counts=[2] * line.num_ranks)
    message_s, byte_s = torch.stack(everyone).median(0).values.tolist()
    return Link(link.bytes_per_s, link.latency_s), max(message_s, 1e-7), max(byte_s, 1e-12)


def _sent_cpu(line: Collective, num_bytes: int, times: int) -> float:
    """Processor time of a round in which a rank sends so many bytes to each peer and receives as many."""
    payload = torch.zeros(num_bytes, dtype=torch.uint8, device=line.device)
    line.barrier()
    start = time.process_time()
    for _ in range(times):
        line.all_gather(payload, kind="sizes", counts=[num_bytes] * line.num_ranks)
    return (time.process_time() - start) / times


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_bytes() -> float:
    """Of the last level that a core has; 32 MB where the system does not say."""
    found = 0.0
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            text = (index / "size").read_text().strip()
        except OSError:
            continue
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        found = max(found, float(text.rstrip("KMG")) * unit)
    return found or 2.0**25


def _memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def process_bytes() -> float:
    """Resident in a process that trains, before it holds anything: measured in one of its own, after a first step."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _BARE],
            capture_output=True,
            text=True,
            check=True,
            timeout=_BARE_S,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return float(done.stdout.split()[-1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return _ASSUMED_BYTES


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def others_busy() -> Iterator[None]:
    """All cores but one read memory as aggregation does, in threads that hold no lock while they do."""
    is_over = threading.Event()
    made = torch.Generator().manual_seed(1)
    table = torch.full((1 << 15, 128), 0.5)
    indptr, indices = (
        torch.arange(0, (1 << 16) + 1, 8),
        torch.randint(1 << 15, (1 << 16,), generator=made).int(),
    )

    def read() -> None:
        while not is_over.is_set():
            spmm(indptr, indices, table, num_src=1 << 15)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(num_cores() - 1)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()


def _best_s(call: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Processor time of this thread."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return max(min(taken), 1e-9)


def _sampling() -> tuple[float, float]:
    """(of a node, of an edge), from few and many edges drawn of as many nodes."""
    made = torch.Generator().manual_seed(2)
    num_nodes, degree = 1 << 16, 24
    indptr = torch.arange(0, num_nodes * degree + 1, degree)
    indices = torch.randint(num_nodes, (num_nodes * degree,), generator=made)
    dst = torch.repeat_interleave(torch.arange(num_nodes), indptr.diff())
    graph = Graph.from_edges(torch.stack([indices, dst]), num_nodes=num_nodes, duplicates="keep")
    seeds = torch.randperm(num_nodes, generator=made)[:4096]
    times, sizes = [], []
    for fan_outs in ([2, 2], [20, 2], [4, 10]):
        sampler = NeighbourSampler(graph, fan_outs)
        batch = sampler.sample(seeds, 0, 0)
        sizes.append(
            [sum(block.num_src for block in batch.blocks), sum(block.num_edges for block in batch.blocks)]
        )
        times.append(_best_s(lambda sampler=sampler: sampler.sample(seeds, 0, 1)))  # type: ignore[misc]
    table = torch.tensor(sizes, dtype=torch.float64)
    found = torch.linalg.lstsq(table, torch.tensor(times, dtype=torch.float64)[:, None]).solution[:, 0]
    node_s, edge_s = (max(float(each), 1e-10) for each in found)
    return node_s, edge_s


def _quantising(rows: Tensor) -> float:
    bits = torch.full((rows.shape[0],), 8, dtype=torch.uint8)
    message = quantise_rows(rows, bits, 1)
    there = _best_s(lambda: quantise_rows(rows, bits, 1))
    back = _best_s(lambda: dequantise_rows(message, bits, rows.shape[1]))
    return (there + back) / 2 / rows.numel()


def _thread_gain() -> float:
    """How many times as fast all cores of one process aggregate and multiply as one does."""
    made = torch.Generator().manual_seed(3)
    table = torch.full((1 << 16, 128), 0.5)
    indptr, indices = (
        torch.arange(0, (1 << 18) + 1, 8),
        torch.randint(1 << 16, (1 << 18,), generator=made).int(),
    )
    weight = table[:128].clone()

    def step() -> None:
        spmm(indptr, indices, table, num_src=1 << 16) @ weight

    before, taken = torch.get_num_threads(), []
    for threads in (1, num_cores()):
        torch.set_num_threads(threads)
        step()
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        taken.append(min(times))
    torch.set_num_threads(before)
    return max(1.0, taken[0] / taken[1])


def _disk() -> float:
    """Bytes a second that are written and synced to the folder of temporary files."""
    block = bytes(1 << 20)
    try:
        with tempfile.TemporaryFile() as file:
            start = time.perf_counter()
            for _ in range(_DISK_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return _DISK_BYTES / max(time.perf_counter() - start, 1e-9)
    except OSError:
        return 1e8
