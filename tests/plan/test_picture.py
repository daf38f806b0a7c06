"""A picture of curves is whole, or the old one stays."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from polyhop.errors import ConfigError
from polyhop.plan.curve import Curve, Point
from polyhop.plan.picture import draw_curves

CURVES = [
    Curve("halo", is_exact=True, is_chosen=True, points=(Point(1, "single", 2.0, 1.0, 1.0, 0.1, fits=True),))
]


def test_a_full_disk_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    file = tmp_path / "curve.svg"
    draw_curves(CURVES, "as foreseen", file)
    before = file.read_bytes()
    assert b"<svg" in before

    def half(self: Any, path: Path, **named: Any) -> None:
        path.write_bytes(before[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(figure.Figure, "savefig", half)
    with pytest.raises(ConfigError, match=r"curve\.svg: cannot be written: No space left on device"):
        draw_curves(CURVES, "as foreseen", file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file], "nothing half-written stays"
