"""What one server can do, measured here: leases and bytes a second of its post, sums and products of a core.

Everything is encrypted. Leases are counted against many functions that compute nothing (``clients``), bytes against
as many real functions as there are other cores, products as functions compute them: a dense piece of a model, forward and
backward, in tiles, one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from benchmarks.serverless.transport import offer, opened, rate, until
from polyhop.kernels import spmm
from polyhop.serverless.ledger import Terms
from polyhop.serverless.mail import Done
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.tasks import run_task

__all__ = ["Leases", "bytes_per_s", "flops", "gathered", "latency_s", "leases"]

MB_4 = (4096, 256)  # rows and columns of a task, float32


@dataclass(frozen=True)
class Leases:
    """Of one post with so many connections."""

    connections: int
    per_s: float
    per_cpu_s: float  # of the server's process: what a core would do if nothing else were on it
    wishes: int


def leases(connections: int, tasks: int, processes: int = 2) -> Leases:
    """Tasks without content, as many as the connections take."""
    post, launcher = opened(Terms())
    order = json.dumps(launcher._order.to_json()).encode()
    command = [sys.executable, "-m", "benchmarks.serverless.clients", str(connections // processes)]
    started = []
    try:
        for number in range(processes):
            one = subprocess.Popen(command, stdin=subprocess.PIPE)
            assert one.stdin is not None
            with one.stdin as pipe:
                pipe.write(order.replace(b'"function": "f"', f'"function": "f{number}"'.encode()))
            started.append(one)
        total = processes * (connections // processes)
        until(lambda: post.messages["Pull"] >= 2 * total, 120.0)
        wishes = post.messages["Pull"]
        cpu, start = time.process_time(), time.perf_counter()
        for number in range(tasks):
            offer(post, number, 1, 1)
        for _ in range(tasks):
            assert isinstance(post.inbox.get(timeout=120), Done)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        return Leases(total, tasks / wall, tasks / cpu, wishes)
    finally:
        post.close()
        launcher.close()
        for one in started:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def bytes_per_s(tasks: int) -> float:
    """Both ways together, of tasks of 4 MB each way."""
    rows, columns = MB_4
    return rate(max(len(os.sched_getaffinity(0)), 2), rows, columns, tasks) * 2 * 4 * rows * columns


def latency_s(tasks: int) -> float:
    """Of a task without content, one function."""
    return 1 / rate(1, 1, 1, tasks)


def flops(rows: int, columns: int, hidden: int, repeats: int = 3) -> float:
    """flop/s of a dense piece as functions compute it, forward and then backward."""
    program = Program(
        {"z": Row((columns,))}, {"w": (hidden, columns), "b": (hidden,)},
        (Call("linear", ("z", "w", "b"), ("a",)), Call("relu", ("a",), ("h",))), ("h",),
    )  # fmt: skip
    draw = np.random.default_rng(1)
    z, w = (draw.standard_normal(shape, np.float32) for shape in ((rows, columns), (hidden, columns)))
    weights, grad = (
        {"w": w, "b": np.zeros(hidden, np.float32)},
        draw.standard_normal((rows, hidden), np.float32),
    )

    def once() -> None:
        run_task(program, False, {"z": z}, weights)
        run_task(program, True, {"z": z, "g:h": grad}, weights, ("z",))

    return 2 * 4 * rows * columns * hidden / _seconds(once, repeats)  # forward, again, both gradients


def gathered(num_nodes: int, degree: int, columns: int, repeats: int = 3) -> float:
    """Edge-columns a second of one thread: rows drawn at random, summed."""
    indptr = torch.arange(0, num_nodes * degree + 1, degree)
    draw = torch.Generator().manual_seed(1)
    indices = torch.randint(0, num_nodes, (num_nodes * degree,), generator=draw).int()
    rows = torch.randn(num_nodes, columns, generator=draw)
    return (
        num_nodes
        * degree
        * columns
        / _seconds(lambda: spmm(indptr, indices, rows, num_src=num_nodes), repeats)
    )


def _seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    took = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return median(took)
