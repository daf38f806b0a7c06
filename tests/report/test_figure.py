"""Pictures: a file that is a picture, and a clear error where matplotlib is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polyhop.errors import UnsupportedError
from polyhop.report import save_figure

PANELS = {
    "loss": {"train": [(0.0, 2.0), (1.0, 1.0)]},
    "accuracy": {"val": [(0.0, 0.1), (1.0, 0.6)], "test": [(1.0, 0.5)]},
}


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_file_is_a_picture(tmp_path: Path, ending: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = save_figure(tmp_path / f"curve.{ending}", PANELS, title="a run")
    assert path.read_bytes().startswith(magic)


def test_does_not_touch_pyplot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    loaded = "matplotlib.pyplot" in sys.modules
    save_figure(tmp_path / "curve.png", PANELS)
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_missing_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"polyhop\[report\]"):
        save_figure(tmp_path / "curve.png", PANELS)
