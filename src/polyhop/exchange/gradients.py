"""The sum of all ranks' gradients, in rank order, in buckets that leave while the backward pass is still running.

A bucket is posted as soon as its last gradient is there; posting waits for nobody, so nothing blocks inside autograd.
Buckets leave in one fixed order on every rank, whatever order gradients come in. The last one also carries the loss, one
mark per parameter (does any rank have a gradient for it?) and one for "I was asked to stop".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from polyhop.comm import Collective, Pending

__all__ = ["BUCKET_BYTES", "GradientSum", "bucket_sizes"]

BUCKET_BYTES = 1 << 22


def bucket_sizes(parameters: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> list[int]:
    """Elements of each message: parameters from the last to the first, cut where a bucket is full; the tail in the last."""
    sizes = [sum(parameters[at].numel() for at in bucket) for bucket in _buckets(parameters, bucket_bytes)]
    sizes[-1] += 2 + len(parameters)
    return sizes


def _buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    filled = 0
    for at in reversed(range(len(parameters))):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(at)
        filled += parameters[at].numel() * parameters[at].element_size()
    return buckets


class GradientSum:
    """Sums what ``backward`` leaves in ``.grad``. Between ``begin`` and ``end`` there is one backward pass, or none."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        line: Collective,
        *,
        asks_to_stop: Callable[[], bool] = lambda: False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters, self.line, self._asks_to_stop = list(parameters), line, asks_to_stop
        self._buckets = _buckets(self.parameters, bucket_bytes)
        self._bucket_of = {at: number for number, bucket in enumerate(self._buckets) for at in bucket}
        self._sizes = bucket_sizes(self.parameters, bucket_bytes)
        self._dtype = reduce(torch.promote_types, (parameter.dtype for parameter in self.parameters))
        self._tails: dict[
            tuple[bool, ...], Tensor
        ] = {}  # marks and the wish to stop, as they were sent before
        self._missing: list[int] = []
        self._give_last: Callable[[Tensor], Pending[Tensor]]
        self._sent: list[Pending[Tensor]] = []
        self._is_open = False
        self.is_stop_agreed = False  # some rank was asked to stop; all know it after the same step
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook(at))  # type: ignore[no-untyped-call]
            for at, parameter in enumerate(self.parameters)
            if parameter.requires_grad and self._bucket_of[at] < len(self._buckets) - 1
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """A backward pass is about to run."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent = []
        self._is_open = True
        self._give_last = self.line.expect_sum(self._sizes[-1], self._dtype, kind="gradients")

    def _hook(self, at: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if self._is_open:
                self._missing[self._bucket_of[at]] -= 1
                self._post_ready()

        return ready

    def _post_ready(self) -> None:
        """Post buckets in order, as far as they are complete; the last one waits for its tail."""
        while len(self._sent) < len(self._buckets) - 1 and self._missing[len(self._sent)] <= 0:
            self._post(len(self._sent))

    def _post(self, number: int) -> None:
        flat = _flatten([_grad(self.parameters[at]) for at in self._buckets[number]])
        self._sent.append(self.line.start_all_reduce(flat.to(self.line.device), kind="gradients"))

    def _post_last(self, loss: Tensor) -> None:
        pieces = [_grad(self.parameters[at]) for at in self._buckets[-1]]
        told = (*(parameter.grad is not None for parameter in self.parameters), self._asks_to_stop())
        if told not in self._tails:
            like = self.parameters[0]
            self._tails[told] = torch.tensor(told, dtype=self._dtype, device=like.device)
        flat = _flatten([*pieces, self._tails[told], loss.to(self._dtype)])
        self._sent.append(self._give_last(flat.to(self.line.device)))

    def end(self, loss: Tensor) -> Tensor:
        """Every ``.grad`` becomes the sum over ranks (None where no rank has one); returns the sum of the losses."""
        self._is_open = False
        for number in range(len(self._sent), len(self._buckets) - 1):
            self._post(number)
        self._post_last(loss)
        device = self.parameters[0].device
        sums = [pending.wait().to(device) for pending in self._sent]
        has_any = sums[-1][-2 - len(self.parameters) :].tolist()
        self.is_stop_agreed = self.is_stop_agreed or has_any[-2] > 0
        for bucket, flat in zip(self._buckets, sums, strict=True):
            parameters = [self.parameters[at] for at in bucket]
            for at, parameter, grad in zip(bucket, parameters, _unflatten(flat, parameters), strict=True):
                parameter.grad = grad if has_any[at] > 0 else None
        return sums[-1][-1].clone()


def _grad(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _flatten(pieces: list[Tensor]) -> Tensor:
    """One after the other, a new vector."""
    flat: Tensor = _flatten_dense_tensors(pieces)  # type: ignore[no-untyped-call]
    return flat


def _unflatten(flat: Tensor, like: list[nn.Parameter]) -> tuple[Tensor, ...]:
    """Views of the vector's beginning, in the shapes of ``like``."""
    views: tuple[Tensor, ...] = _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return views
