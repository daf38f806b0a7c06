"""The function on AWS Lambda: ``polyhop.serverless.aws_entry.handler``.

The event is an order (``function.Order`` as JSON); what the function did is returned as JSON. It is gone when its order says
so, or a little before the platform would end it. Neither the event nor its keys are ever logged or told in an error.

Hosts of Lambda have different processors, on which OpenBLAS and numpy choose different kernels, and these round differently:
where weights must be the same bits in every run, give the function OPENBLAS_CORETYPE (such as Haswell) and
NPY_DISABLE_CPU_FEATURES in its environment, and the same to whatever it is compared with.

On Lambda numpy is imported with this module, so that it belongs to the start of a sandbox and is done once for all its
invocations; elsewhere importing this has no effect.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any, Protocol

__all__ = ["Context", "handler"]

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Context(Protocol):
    """What is used of Lambda's context."""

    def get_remaining_time_in_millis(self) -> int: ...


def handler(event: Any, context: Context) -> dict[str, Any]:
    """Serve tasks of the order's server; ConfigError for anything but an order."""
    _prepare()
    from polyhop.serverless.function import Order, work

    order = Order.from_json(event)
    end = time.monotonic() + order.limit_s

    def remaining_s() -> float:
        return min(context.get_remaining_time_in_millis() / 1000, end - time.monotonic())

    return work(order, remaining_s=remaining_s).to_json()


def _prepare() -> None:
    """One thread for numpy, which reads this when it is imported: a function has a core, or less."""
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")
    import_module("polyhop.serverless.function")


if "AWS_LAMBDA_RUNTIME_API" in os.environ:
    _prepare()
