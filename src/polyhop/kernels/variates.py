"""Numbers of LABOR's sources that turn slowly from mini-batch to mini-batch, so that these draw much the same neighbours.

Every kappa steps a source has a new number; between, at step i, it is on the way from one to the next:

    u = Phi(cos(pi c / 2) n(z1) + sin(pi c / 2) n(z2))        c = (i mod kappa) / kappa

with z1 and z2 uniform under the keys of this window of kappa steps and of the next, n the normal quantile and Phi the normal
distribution. Each u is uniform, so one mini-batch is drawn as without; those that follow each other reach the same nodes
more often. A pure function of (seed, epoch, step, hop, source), as all draws are. Arithmetic is written out here and in
``csrc/variates.h``, operation by operation: the same bits on every machine, and on any device.

Legend: n sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhop.errors import ConfigError
from polyhop.kernels.keys import Key, Purpose

__all__ = [
    "MOST_DEPENDENT",
    "Variates",
    "check_dependence",
    "normal_quantile",
    "normal_share",
    "packed_keys",
    "sample_key",
    "turned",
]

MOST_DEPENDENT = 64
"""Steps of a window, at most: beyond, an epoch sees too few different neighbourhoods."""


class Variates(int):
    """The key of a hop between two others: as a number the first of them, which is all that uniform draws look at."""

    second: int
    cos: float
    sin: float

    def __new__(cls, first: int, second: int, cos: float, sin: float) -> Variates:
        made = super().__new__(cls, first)
        made.second, made.cos, made.sin = second, cos, sin
        return made


def check_dependence(dependence: int, method: str) -> int:
    """The number of steps; ConfigError where mini-batches cannot depend on each other so."""
    if type(dependence) is not int or not 1 <= dependence <= MOST_DEPENDENT:
        raise ConfigError(
            f"labor_dependence={dependence!r}: expected a whole number in 1 .. {MOST_DEPENDENT}: steps over which draws "
            "turn from one to the next (1: each step draws anew)"
        )
    if dependence > 1 and method != "labor":
        raise ConfigError(
            f"labor_dependence={dependence}: only sampler='labor' has a number for each node that can turn from step to "
            f"step, and this is sampler={method!r}"
        )
    return dependence


def sample_key(key: Key, hop: int, dependence: int = 1) -> int:
    """The key under which a hop of a step is drawn; ``Variates`` where it is between two."""
    if dependence == 1:
        return key.at(Purpose.SAMPLE, hop)
    window, turn = divmod(key.step, dependence)
    first, second = (Key(key.seed, key.epoch, each).at(Purpose.SAMPLE, hop) for each in (window, window + 1))
    return first if turn == 0 else Variates(first, second, *_cos_sin(turn / dependence))


def _cos_sin(share: float) -> tuple[float, float]:
    """Of share * pi / 2, 0 <= share <= 1, by their series: libraries differ in the last bit."""
    angle = share * 1.5707963267948966
    sums, term = [0.0, 0.0], 1.0
    for power in range(1, 26):
        sums[(power - 1) % 2] += term if (power - 1) % 4 < 2 else -term
        term = term * angle / power
    return sums[0], sums[1]


def packed_keys(keys: Sequence[int]) -> Tensor:
    """int64 [n, 4]: each key as the native library has it: two words of 64 bits and two doubles."""
    weights = [(key.cos, key.sin) if isinstance(key, Variates) else (1.0, 0.0) for key in keys]
    both = [(int(key), key.second if isinstance(key, Variates) else 0) for key in keys]
    signed = [[word - (word >> 63 << 64) for word in words] for words in both]
    real = torch.tensor(weights, dtype=torch.float64).view(-1, 2).view(torch.int64)
    return torch.cat([torch.tensor(signed, dtype=torch.int64).view(-1, 2), real], dim=1)


def turned(key: Variates, first: Tensor, second: Tensor) -> Tensor:
    """int64 [n]: numbers below 2^32 of sources whose words (int64 [n], below 2^32) under the two keys are these."""
    one, two = (normal_quantile((words.double() + 0.5) * 2.0**-32) for words in (first, second))
    return (normal_share(key.cos * one + key.sin * two) * 4294967295.0).round().long()


def _polynomial(x: Tensor, *factors: float) -> Tensor:
    """Horner's scheme, highest power first."""
    y = x * factors[0] + factors[1]
    for factor in factors[2:]:
        y = y * x + factor
    return y


def _log(x: Tensor) -> Tensor:
    """Natural logarithm, 0 < x < 1: 2 artanh((m - 1) / (m + 1)) of the mantissa, which is brought to 0.7 .. 1.4."""
    bits = x.contiguous().view(torch.int64)
    power = (bits >> 52) - 1023
    m = (bits & 0x000FFFFFFFFFFFFF | 0x3FF0000000000000).view(torch.float64)
    is_large = m > 1.4142135623730951
    m, power = torch.where(is_large, m * 0.5, m), torch.where(is_large, power + 1, power)
    s = (m - 1.0) / (m + 1.0)
    y = _polynomial(s * s, *(1.0 / odd for odd in range(21, 0, -2)))
    return power.double() * 0.6931471805599453 + (s + s) * y


_FACTORIALS = (6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1)


def _exp_of_minus(x: Tensor) -> Tensor:
    """exp(-x), 0 <= x <= 700."""
    n = (x * 1.4426950408889634).round()
    r = (n * 0.693147180369123816490 - x) + n * 1.90821492927058770002e-10
    y = _polynomial(r, *(1.0 / factorial for factorial in _FACTORIALS))
    return y * (1023 - n.long() << 52).view(torch.float64)


_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_SHARE = (
    (3.52624965998911e-02, 0.700383064443688, 6.37396220353165, 33.912866078383, 112.079291497871, 221.213596169931,
     220.206867912376),
    (8.83883476483184e-02, 1.75566716318264, 16.064177579207, 86.7807322029461, 296.564248779674, 637.333633378831,
     793.826512519948, 440.413735824752),
)  # fmt: skip


def normal_quantile(p: Tensor) -> Tensor:
    """float64 [n]: where shares p (float64, 1e-11 < p < 1 - 1e-11) of a normal distribution end: Wichura's AS 241."""
    q = p - 0.5
    a = 0.180625 - q * q
    centre = q * _polynomial(a, *_CENTRE[0]) / _polynomial(a, *_CENTRE[1])
    b = (-_log(torch.where(q < 0, p, 1.0 - p))).sqrt() - 1.6
    tail = _polynomial(b, *_TAIL[0]) / _polynomial(b, *_TAIL[1])
    return torch.where(q.abs() <= 0.425, centre, torch.where(q < 0, -tail, tail))


def normal_share(x: Tensor) -> Tensor:
    """float64 [n]: of a normal distribution below x, |x| being 7 at most: Hart's 5666."""
    t = x.abs().clamp(max=7.0)
    beyond = _exp_of_minus(t * t * 0.5) * _polynomial(t, *_SHARE[0]) / _polynomial(t, *_SHARE[1])
    return torch.where(x > 0, 1.0 - beyond, beyond)
