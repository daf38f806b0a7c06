"""Bytes of tensors that are alive while something runs, and the most that were at once. Ground of this folder.

Every operation of torch that runs inside is seen, forward and backward, with the storages of what it gives; a storage counts
from then until nothing holds it any more, autograd included. What is allocated and freed inside one operation is not seen,
nor are tensors that were there before, unless an operation gives them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Live"]


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``now`` and ``most``: bytes; storages of ``known`` tensors, and those of a parameter's size, are left out."""

    def __init__(self, known: Iterable[Tensor] = (), sizes: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = list(known)  # so that no address comes twice
        self._is_known = {each.untyped_storage()._cdata for each in self._known}
        self._sizes, self._alive = frozenset(sizes), dict[int, int]()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._note(each)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._is_known or key in self._alive or size in self._sizes or not size:
            return
        self._alive[key] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._alive.pop(key, 0)
