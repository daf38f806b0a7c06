"""A run of ten hours, a million records: read in seconds and little memory; its page opens in 3 s and has under 10 MB."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("plotly")

RANKS, EPOCHS, STEPS = 4, 2500, 32

READ = """
import json, resource, sys, time
from pathlib import Path
from polyhop.report import Explainer, page
began = time.perf_counter()
text = page(Explainer([Path(sys.argv[1])]).document())
took = time.perf_counter() - began
Path(sys.argv[2]).write_text(text, encoding="utf-8")
peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({"seconds": took, "peak": peak * 1024}))
"""


def long_lines(rank: int, made: SimpleNamespace) -> Iterator[dict[str, Any]]:
    rng, at = random.Random(rank), 10.0
    yield made.start(rank)
    yield from made.marks(0, at, 0.0, 0.0, 1e9)
    for epoch in range(1, EPOCHS + 1):
        for step in range(STEPS):
            long = 0.4 * (0.5 + rng.random())
            yield made.span("wait", at + 0.25 * long, 0.2 * long * rng.random(), layer=1, direction="forward")
            yield made.span(
                "communicate", at, 0.5 * long, layer=1, direction="forward", bytes=rng.randrange(9999)
            )
            yield made.span("compute", at, long, step=(epoch - 1) * STEPS + step)
            at += long
        yield made.span("evaluate", at, 1.0, step=epoch * STEPS)
        at += 1.2
        yield from made.marks(epoch, at, 1e6 * epoch, 1e5 * epoch, 1e9)


@pytest.mark.slow
def test_a_million_records(
    make_run: Any,
    made: SimpleNamespace,
    open_tab: Callable[..., Any],
    until: Callable[..., None],
    tmp_path: Path,
) -> None:
    run, out = make_run("long", num_ranks=RANKS, epochs=EPOCHS), tmp_path / "page.html"
    for rank in range(RANKS):
        made.write(run / f"trace-rank{rank}.jsonl", long_lines(rank, made))
    told = subprocess.run(
        [sys.executable, "-c", READ, str(run), str(out)], capture_output=True, text=True, check=True
    )
    found = json.loads(told.stdout)
    size = out.stat().st_size
    opened = min(_opened(open_tab, until, out) for _ in range(3))
    print(
        f"read in {found['seconds']:.1f} s, {found['peak'] / 1e6:.0f} MB; page {size / 1e6:.1f} MB, opens in {opened:.2f} s"
    )
    assert found["seconds"] < 30
    assert found["peak"] < 400e6
    assert size < 10e6
    assert opened < 3


def _opened(open_tab: Callable[..., Any], until: Callable[..., None], path: Path) -> float:
    """Seconds until the first chart and the timeline are drawn."""
    began = time.perf_counter()
    tab = open_tab(path.as_uri())
    until(tab, "document.documentElement.dataset.ready === 'yes'")
    until(tab, "document.querySelector('#curve-loss .main-svg') !== null")
    until(tab, "document.getElementById('timeline-canvas').dataset.stop !== undefined")
    took = time.perf_counter() - began
    assert "1,010,020 records" in tab.inner_text("#timeline")
    tab.close()
    return took
