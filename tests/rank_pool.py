"""Gloo ranks that live for a whole test run: starting processes for every distributed test would take minutes.

As a program (``python rank_pool.py RANK RANKS PORT``) it is one rank: it reads jobs from standard input (a function named by
module and name, arguments) and writes results to standard output. ``RankPool`` starts the ranks and hands them jobs. All of
it is this machine's own test code talking to itself, so it may pickle.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

NUM_RANKS = 4
_TIMEOUT_S = 120.0


class RankFailed(Exception):  # noqa: N818 (what a rank's traceback is raised as)
    """A job raised on a rank; the text is its traceback."""


class RankPool:
    """Starts its processes at the first job; a job that fails or hangs ends them, and the next job starts new ones."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._store: Any = None

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(collective, *args) on ranks 0 .. num_ranks - 1; a top-level function of a test file."""
        self._start()
        job = (num_ranks, function.__module__, function.__name__, pickle.dumps(args))
        for rank in self._ranks[:num_ranks]:
            assert rank.stdin is not None
            _write(rank.stdin, job)
        try:
            return self._collect(num_ranks)
        except BaseException:
            self.close()
            raise

    def _collect(self, num_ranks: int) -> list[Any]:
        results: dict[int, Any] = {}
        until = time.monotonic() + _TIMEOUT_S
        pipes = {rank.stdout.fileno(): at for at, rank in enumerate(self._ranks[:num_ranks]) if rank.stdout}
        while len(results) < num_ranks:
            waiting = [fd for fd, at in pipes.items() if at not in results]
            ready, _, _ = select.select(waiting, [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"ranks {sorted(pipes[fd] for fd in waiting)} gave no result in {_TIMEOUT_S} s"
                )
            for fd in ready:
                at = pipes[fd]
                stdout = self._ranks[at].stdout
                assert stdout is not None
                is_good, value = _read(stdout)
                if not is_good:
                    raise RankFailed(f"rank {at} of {num_ranks}:\n{value}")
                results[at] = value
        return [results[at] for at in range(num_ranks)]

    def _start(self) -> None:
        if self._ranks and all(rank.poll() is None for rank in self._ranks):
            return
        self.close()
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for rank in range(NUM_RANKS):
            command = [sys.executable, __file__, str(rank), str(NUM_RANKS), str(self._store.port)]
            self._ranks.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            )

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    pipe.close()
        self._ranks, self._store = [], None


def _write(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _read(pipe: BinaryIO) -> Any:
    head = _exactly(pipe, 8)
    return pickle.loads(_exactly(pipe, struct.unpack("<q", head)[0]))


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(pipe.fileno(), size - len(data))
        if not piece:
            raise EOFError("the other end is gone")
        data += piece
    return data


def _rank_main(rank: int, num_ranks: int, port: int) -> None:
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore

    from polyhop.comm.torch_line import join

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # test modules go by their path from there
    jobs, results = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a job prints goes to standard error
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
    lines: dict[int, Any] = {}
    while True:
        try:
            size, module, name, raw = _read(jobs)
        except EOFError:
            os._exit(0)
        try:
            if size not in lines:  # every group of the same size serves all jobs of that size
                lines[size] = join(store, rank, size, address="127.0.0.1", name=f"pool-{size}")
            function = getattr(importlib.import_module(module), name)
            # Kept until the next job: who is done at once must not leave before the others have connected.
            line = lines[size].fork()
            _write(results, (True, function(line, *pickle.loads(raw))))
        except BaseException:
            _write(results, (False, traceback.format_exc()))


if __name__ == "__main__":
    _rank_main(*(int(value) for value in sys.argv[1:]))
