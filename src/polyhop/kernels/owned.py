"""Whether memory that a backward pass reads is read for the last time, so that it may take the result.

Of a gradient: whether it is held by nobody else. torch does not say, but counts references: of the Python object, of the
tensor, of its storage. Which counts an unshared gradient has depends on the versions of both and on the way into the
backward pass, so it is measured once, on that way. Of what a function made and kept for itself: whether there is no second
pass.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Owned", "is_last_pass"]

Counts = tuple[int, int, int]


class Owned:
    """Asked by one autograd function: ``apply`` runs it on a tensor, and its backward pass calls the object once."""

    def __init__(self, apply: Callable[[Tensor], Tensor]) -> None:
        self._apply = apply
        self._alone: dict[
            str, Counts
        ] = {}  # by kind of device, whose backward passes run in threads of their own
        self._seen: list[Counts] | None = None  # while measuring
        self._measured: set[str] = set()

    def measure(self, device: torch.device | str = "cpu") -> None:
        """Once, before the first question: how an unshared gradient looks. Never owned if a held one looks the same."""
        where = torch.device(device)
        if where.type in self._measured:
            return
        self._measured.add(where.type)
        # In a thread of its own: grad mode, hooks on saved tensors and the like are the calling thread's.
        thread = threading.Thread(target=self._measure, args=(where,))
        thread.start()
        thread.join()

    def _measure(self, where: torch.device) -> None:
        if not hasattr(torch.Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
            return
        seen = self._seen = []
        if where.type == "cuda":  # a new thread's is the first one
            torch.cuda.set_device(where)
        try:
            for is_held in (False, True):
                leaf = torch.ones(2, 2, dtype=torch.float32, device=where, requires_grad=True)
                held: list[Tensor] = []
                out = self._apply(leaf * 1)
                if is_held:
                    out.register_hook(held.append)
                (out @ torch.ones_like(leaf)).sum().backward()
        finally:
            self._seen = None
        if len(seen) == 2 and seen[0] != seen[1]:
            self._alone[where.type] = seen[0]

    def __call__(self, grad: Tensor) -> bool:
        if grad.device.type not in self._alone and self._seen is None:
            return False
        storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
        counts = (sys.getrefcount(grad), grad._use_count(), storage)  # type: ignore[attr-defined]
        if self._seen is not None:
            self._seen.append(counts)
            return False
        return counts == self._alone[grad.device.type] and grad.is_contiguous() and grad._base is None


def is_last_pass() -> bool:
    """Whether the backward pass that runs keeps nothing for another one; False where torch cannot say."""
    is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return is_kept is not None and not is_kept()
