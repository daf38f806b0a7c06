"""A stream of the device beside the one that trains: what is made there is handed over without anybody waiting for it.

The thread that trains may be many steps ahead of the device. So that memory does not follow, the threads that work ahead
wait until the device has begun with what was handed over a few steps before.

On the CPU there are no streams, and a lane does nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lane"]


class Lane:
    """Where threads that work ahead of training launch their kernels and copies."""

    def __init__(self, device: torch.device, ahead: int = 8) -> None:
        """``ahead``: results handed over that the device has not come to, at most, once ``keep_step`` was called."""
        self._ahead = ahead
        self._handed: deque[torch.cuda.Event] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.device = (
            device if self._stream is None else self._stream.device
        )  # which one, where cuda alone was said

    def follow(self) -> None:
        """What is launched here from now on comes after all that the caller's stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def reads(self, tensor: Tensor) -> None:
        """What is launched here reads the caller's tensor: its memory is not reused before that has been done."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)

    def work(self) -> AbstractContextManager[Any]:
        """Launch inside this."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """All that was launched here so far, for ``hand_over``."""
        return None if self._stream is None else self._stream.record_event()

    def keep_step(self) -> None:
        """Wait, on a thread that works ahead, until the device has come to what was handed over ``ahead`` results before."""
        while len(self._handed) > self._ahead:
            try:
                self._handed.popleft().synchronize()
            except IndexError:  # another thread was faster
                return

    def hand_over(self, mark: torch.cuda.Event | None, made: Iterable[Tensor]) -> None:
        """Let the caller's stream read what was made before the mark; its memory is reused once that has been read."""
        if mark is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(mark)
        self._handed.append(stream.record_event())
        for tensor in made:
            if tensor.is_cuda:
                tensor.record_stream(stream)
