from __future__ import annotations

from itertools import product

from polyhop.kernels.keys import Key, Purpose, fold


def test_fold_is_fixed() -> None:
    """Part of the run format: a changed value would change every resumed run."""
    assert fold() == 0
    assert fold(0) == 0xE220A8397B1DCDAF  # splitmix64's first output from seed 0
    assert fold(1, 2, 3) == fold(1, 2, 3)
    assert fold(-1) == fold((1 << 64) - 1)


def test_order_and_every_part_count() -> None:
    keys = {
        Key(s, e, t).at(p, site)
        for s, e, t, p, site in product(range(4), range(4), range(4), Purpose, range(4))
    }
    assert len(keys) == 4**4 * len(Purpose)
    assert fold(1, 2) != fold(2, 1)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_purposes_have_their_own_numbers() -> None:
    assert len({int(p) for p in Purpose}) == len(Purpose)
