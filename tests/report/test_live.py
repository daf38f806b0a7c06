"""A page that is open while a run trains: it waits for the run, then its curve grows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyhop.report.serve import Server

pytest.importorskip("plotly")

POINTS = "(document.getElementById('curve-loss')?.data?.[0]?.x.length ?? 0)"


def test_the_curve_grows_while_a_run_trains(
    open_tab: Callable[..., Any], until: Callable[..., None], tiny_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    server = Server([run])
    server.start()
    train = [
        sys.executable,
        "-m",
        "polyhop",
        "train",
        "tiny",
        "--data-dir",
        str(tiny_dir),
        "--epochs",
        "100000",
    ]
    try:
        tab = open_tab(server.address, forgiven="ERR_CONNECTION_REFUSED")
        assert "Waiting for a run" in tab.inner_text("body")
        training = subprocess.Popen(
            [*train, "--hidden", "16", "--run-dir", str(run), "--progress", "none"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            until(tab, "document.documentElement.dataset.ready === 'yes'", 60.0)
            assert tab.inner_text(".badge") == "running"
            tab.locator("#curve-loss").scroll_into_view_if_needed()
            until(tab, f"{POINTS} > 1", 60.0)
            before = tab.evaluate(POINTS)
            until(tab, f"{POINTS} > {before}", 90.0)
            until(tab, "Number(document.getElementById('timeline-canvas').dataset.stop) > 0")
        finally:
            training.send_signal(signal.SIGTERM)
            training.wait(60)
    finally:
        server.close()
    until(tab, "document.getElementById('live').textContent.includes('the server has ended')")
