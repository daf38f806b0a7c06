"""BatchNorm over the rows of all ranks: every rank normalises by the mean and variance of the whole matrix.

Forward, one all-gather: each rank's (mean, M2, count), M2 being the sum of squared distances from the rank's own mean; all
merge them in rank order (Chan, Golub and LeVeque, 1979), so statistics have the same bits everywhere. Backward, one
all-reduce of the two sums that a row's gradient needs of all others. Both travel as float64, whatever the rows are: 16 bytes
per feature and peer are nothing beside the rows, and nothing is lost where ranks' means are large or far apart.

Rows are centred by their own rank's mean before anything else is computed from them, so large offsets cost no digits.

Legend: n rows of this rank, N of all, F features, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from polyhop.comm import Collective, Cost
from polyhop.comm.collective import is_summed_everywhere, slices
from polyhop.errors import InputError, UnsupportedError

__all__ = ["KeptStatistics", "account_statistics", "shared_statistics"]

_KIND = "statistics"
_VALUE_BYTES = 8  # float64


class KeptStatistics:
    """What layers found in the forward pass, for layers that are computed again in the backward one.

    Their modules get the same statistics without an exchange, and running statistics stay as they were.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._found: dict[int, list[_Statistics]] = {}
        self._unread: Iterator[_Statistics] | None = None  # of the layer that is computed again
        self._layer: int | None = None

    @contextmanager
    def first(self, layer: int) -> Iterator[None]:
        """Inside, a layer is computed for the first time in a step."""
        self._layer, self._found[layer] = layer, []
        try:
            yield
        finally:
            self._layer = None

    @contextmanager
    def again(self, layer: int) -> Iterator[None]:
        """Inside, it is computed again."""
        running = [(buffer, buffer.clone()) for module in self._modules for buffer in module.buffers()]
        self._unread = iter(self._found.get(layer, []))
        try:
            yield
        finally:
            self._unread = None
            with torch.no_grad():
                for buffer, before in running:
                    buffer.copy_(before)

    def of(self, find: Callable[[], _Statistics]) -> _Statistics:
        """The statistics of the module that runs next."""
        if self._unread is not None:
            return next(self._unread)
        found = find()
        if self._layer is not None:
            self._found[self._layer].append(found)
        return found


@contextmanager
def shared_statistics(
    model: nn.Module, line: Collective, kept: KeptStatistics | None = None
) -> Iterator[None]:
    """Inside, every torch BatchNorm of the model that is in training mode takes its statistics over all ranks' rows.

    Running statistics become what torch would make of the whole matrix, the same on all ranks. Gradients of weight and bias
    stay sums over this rank's rows, to be summed with all other gradients. A rank may have no rows. In evaluation mode, and
    on one rank, modules do what they always do. All ranks enter alike and run the same modules in the same order; the
    backward pass exchanges too, so the line must be free of other work until it is over. A forward pass that is computed
    again in the backward one belongs inside as well, and needs ``kept``.

    Each module gets a ``forward`` of its own as an attribute, which is deleted on leaving, also after an error. So modules,
    parameters, hooks and state-dict keys stay as they are, however deep in a model; replacing modules (as torch's
    SyncBatchNorm asks) would change its printed form and its fingerprint, and a hook cannot replace what forward does.
    """
    if line.num_ranks == 1:
        yield
        return
    found = _replacements(model, line, kept)
    before = [(module, vars(module).get("forward")) for module, _ in found]
    try:
        for module, forward in found:
            vars(module)["forward"] = forward
        yield
    finally:
        for module, kept in before:
            if kept is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = kept


def account_statistics(
    widths: Sequence[int], num_ranks: int, rank: int, *, has_input_grad: bool = True
) -> Cost:
    """What ``rank`` sends for one forward and backward pass of BatchNorms of these widths (features), to the byte.

    Without ``has_input_grad`` forward alone, as where the input of a BatchNorm needs no gradient.
    """
    if num_ranks == 1 or not widths:
        return Cost()
    gathered = [(2 * width + 1) * _VALUE_BYTES for width in widths for _ in range(num_ranks - 1)]
    found = Cost({_KIND: sum(gathered)}, {_KIND: len(gathered)}, len(widths))
    return sum((_account_sum(2 * width, num_ranks, rank) for width in widths if has_input_grad), found)


def _account_sum(size: int, num_ranks: int, rank: int) -> Cost:
    """Of an all-reduce: slices to their summers and the own sum to all, or all at once."""
    if is_summed_everywhere(size * _VALUE_BYTES, num_ranks):
        return Cost({_KIND: size * _VALUE_BYTES * (num_ranks - 1)}, {_KIND: num_ranks - 1}, 1)
    sizes = [stop - start for start, stop in pairwise(slices(size, num_ranks))]
    sent = [values for q in range(num_ranks) if q != rank for values in (sizes[q], sizes[rank]) if values]
    return Cost({_KIND: sum(sent) * _VALUE_BYTES}, {_KIND: len(sent)}, 2)


def _replacements(
    model: nn.Module, line: Collective, kept: KeptStatistics | None
) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Modules and the forward each is to have."""
    named = list(model.named_modules())
    wrappers = [module for _, module in named if _allows_single(module)]
    lenient = {id(module.module) for module in wrappers}
    found: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
    for name, module in named:
        if isinstance(module, _BatchNorm):
            if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
                raise UnsupportedError(
                    f"{name or 'the model'} ({type(module).__name__}) is a BatchNorm with a forward of its own, so its "
                    "statistics cannot be shared between ranks: use torch.nn.BatchNorm1d, norm='layer' or strategy 'single'"
                )
            found.append((module, _shared(module, line, kept, allows_single=id(module) in lenient)))
    # The wrapped module decides, for it alone learns how many rows there are in all.
    return found + [(module, _passed_on(module)) for module in wrappers]


def _allows_single(module: nn.Module) -> bool:
    """Is it polyhop's or PyG's BatchNorm, asked to normalise a single row by running statistics?"""
    is_asked = getattr(module, "allow_single_element", False) is True
    return is_asked and isinstance(getattr(module, "module", None), _BatchNorm)


def _passed_on(wrapper: Any) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = wrapper.module(x)
        return out

    return forward


def _shared(
    module: _BatchNorm, line: Collective, kept: KeptStatistics | None, *, allows_single: bool
) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        return _normalised(module, x, line, kept, allows_single) if module.training else plain(x)

    return forward


def _normalised(
    module: _BatchNorm, x: Tensor, line: Collective, kept: KeptStatistics | None, allows_single: bool
) -> Tensor:
    """x [n, F] or [n, F, ...], as torch's BatchNorm in training would give it with the rows of all ranks in one matrix."""
    module._check_input_dim(x)  # type: ignore[no-untyped-call]
    if x.shape[1] != module.num_features:
        raise InputError(f"BatchNorm of {module.num_features} features was given rows {list(x.shape)}")
    last = x.movedim(1, -1)
    rows = last.flatten(0, -2)
    if rows.dtype in (torch.bfloat16, torch.float16):
        rows = rows.float()
    centre, centred, own = _summary(rows.detach())

    def find() -> _Statistics:
        sent = own.to(line.device)
        return _merged(line.all_gather(sent, kind=_KIND, counts=[1] * line.num_ranks), x.device)

    total = find() if kept is None else kept.of(find)
    if allows_single and total.count <= 1:
        given = (module.running_mean, module.running_var, module.weight, module.bias)
        return functional.batch_norm(x, *given, False, 0.0, module.eps)
    _track(module, total)
    if total.count == 1:
        raise InputError(
            "Expected more than 1 value per channel when training, got 1 row over all ranks: BatchNorm has no variance to "
            "normalise by"
        )
    scale = torch.rsqrt(total.m2 / max(total.count, 1) + module.eps)
    facts = (centred, total.mean - centre.double(), scale, total.count, line)
    out: Tensor = _Normalise.apply(rows, module.weight, module.bias, *facts)  # type: ignore[no-untyped-call]
    return out.to(x.dtype).view(last.shape).movedim(-1, 1)


def _summary(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [n, F] -> nearly their mean [F]; rows less that; float64 [1, 2F + 1]: exact mean, M2, count."""
    count = max(rows.shape[0], 1)
    centre = rows.sum(0) / count
    centred = rows - centre
    rest = centred.sum(0).double()  # what rounding left of the mean
    m2 = ((centred * centred).sum(0).double() - rest * rest / count).clamp_(min=0)
    size = torch.full((1,), float(rows.shape[0]), dtype=torch.float64, device=rows.device)
    return centre, centred, torch.cat([centre.double() + rest / count, m2, size]).view(1, -1)


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Of all rows."""

    mean: Tensor  # float64 [F]
    m2: Tensor  # float64 [F]: sum of squared distances from the mean
    count: int


def _merged(pieces: Sequence[Tensor], device: torch.device) -> _Statistics:
    """One of ``_summary``'s from each rank, put together in rank order."""
    every = torch.cat(list(pieces)).to(device)
    width = (every.shape[1] - 1) // 2
    means, m2s = every[:, :width], every[:, width:-1]
    mean, m2, count = torch.zeros_like(means[0]), torch.zeros_like(m2s[0]), 0
    for rank, size in enumerate(int(value) for value in every[:, -1].tolist()):
        if size == 0:
            continue
        apart = means[rank] - mean
        mean = mean + apart * (size / (count + size))
        m2 = m2 + m2s[rank] + apart * apart * (count * size / (count + size))
        count += size
    return _Statistics(mean, m2, count)


@torch.no_grad()
def _track(module: _BatchNorm, total: _Statistics) -> None:
    """Running statistics move as torch moves them; like there, a step is counted even if it has too few rows."""
    if not module.track_running_stats:
        return
    factor = module.momentum or 0.0
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        factor = 1.0 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    if total.count < 2:
        return
    for running, value in (
        (module.running_mean, total.mean),
        (module.running_var, total.m2 / (total.count - 1)),
    ):
        if running is not None:
            running.copy_(running.double() * (1 - factor) + value * factor)


class _Normalise(torch.autograd.Function):
    """(rows - mean) * scale * weight + bias, where mean and scale depend on the rows of all ranks.

    ``centred`` [n, F]: the rows less a centre of this rank's; ``offset`` float64 [F]: the mean less that centre; ``scale``
    float64 [F]: 1 / standard deviation. With h = (rows - mean) * scale and g the output's gradient, the rows' is
    weight * scale * (g - sum(g) / N - h * sum(g * h) / N), sums over the rows of all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        centred: Tensor,
        offset: Tensor,
        scale: Tensor,
        count: int,
        line: Collective,
    ) -> Tensor:
        slope = scale if weight is None else scale * weight.double()
        start = -offset * slope if bias is None else bias.double() - offset * slope
        ctx.save_for_backward(centred, offset, scale, slope)
        ctx.given = (
            count,
            line,
            None if weight is None else weight.dtype,
            None if bias is None else bias.dtype,
        )
        return torch.addcmul(start.to(rows.dtype), centred, slope.to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        centred, offset, scale, slope = ctx.saved_tensors
        count, line, weight_dtype, bias_dtype = ctx.given
        sum_g = grad.sum(0).double()
        sum_gh = ((grad * centred).sum(0).double() - offset * sum_g) * scale
        of_weight = None if weight_dtype is None else sum_gh.to(weight_dtype)
        of_bias = None if bias_dtype is None else sum_g.to(bias_dtype)
        of_rows = None
        if ctx.needs_input_grad[0]:  # the same on every rank: it follows from the model
            own = torch.stack([sum_g, sum_gh]).to(line.device)
            all_g, all_gh = line.all_reduce(own, kind=_KIND).to(grad.device) / max(count, 1)
            bend = -slope * scale * all_gh
            start = -slope * all_g - offset * bend
            of_rows = torch.addcmul(start.to(grad.dtype), centred, bend.to(grad.dtype))
            of_rows.addcmul_(grad, slope.to(grad.dtype))
        return of_rows, of_weight, of_bias, None, None, None, None, None
