"""A stream of the device beside the one that trains: what is made there is handed over without anybody waiting for it.

On the CPU there are no streams, and a lane does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lane"]


class Lane:
    """Where threads that work ahead of training launch their kernels and copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """What is launched here from now on comes after all that the caller's stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def work(self) -> AbstractContextManager[Any]:
        """Launch inside this."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """All that was launched here so far, for ``hand_over``."""
        return None if self._stream is None else self._stream.record_event()

    def hand_over(self, mark: torch.cuda.Event | None, made: Iterable[Tensor]) -> None:
        """Let the caller's stream read what was made before the mark; its memory is reused once that has been read."""
        if mark is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(mark)
        for tensor in made:
            if tensor.is_cuda:
                tensor.record_stream(stream)
