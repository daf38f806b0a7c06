"""Launcher ``ray``: training with functions that are Ray tasks, one of which is killed; without Ray, the extra is named."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from remains import Remains  # type: ignore[import-not-found]

from polyhop.errors import UnsupportedError
from polyhop.serverless.ray_launcher import RayCluster

# Its own process: a cluster is started and shut down in it, and the test's is left alone.
PROGRAM = """
import json, os, signal, sys, threading, time
sys.path[:0] = {paths!r}
import torch
from conftest import planted_graph
from test_aws_training import trained

def pids():
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                words = open(f"/proc/{{name}}/cmdline").read()
                is_ours = {mark!r} in open(f"/proc/{{name}}/environ").read()
            except OSError:
                continue
            if words.startswith("ray::_work") and is_ours:
                found.append(int(name))
    return found

if __name__ == "__main__":
    graph, killed, seen = planted_graph(80), [], []

    def watch(step):
        def kill():
            while not killed:
                time.sleep(0.01)
                if step.post.ledger.counts["ok"] >= 5:
                    for pid in pids()[:1]:
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
        seen.append(type(step.launcher).__name__)
        threading.Thread(target=kill, daemon=True).start()

    expected = trained(graph, 6)
    found = trained(graph, 6, watch=watch, function_launcher="ray")
    counts = found[2].post.ledger.counts
    print("told", json.dumps({{
        "same": found[0] == expected[0] and all(torch.equal(found[1][n], v) for n, v in expected[1].items()),
        "once": counts["ok"] == counts["offered"] == expected[2].post.ledger.counts["ok"],
        "killed": len(killed), "launcher": seen, "alive": len(found[2].crew._launcher._running),
        "ended": [[each.exit_code, each.said[:60]] for each in found[2].crew.gone],
    }}), flush=True)
"""


@pytest.mark.slow
def test_killed_task_changes_nothing(tmp_path: Path, remains: Remains) -> None:
    pytest.importorskip("ray")
    tests = Path(__file__).parents[1]
    paths = [str(tests), *(str(tests / name) for name in ("serverless", "strategies", "launch"))]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(paths=paths, mark=remains.mark))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    told = json.loads(line[5:])
    assert told["same"]
    assert told["once"]
    assert (told["killed"], told["launcher"], told["alive"]) == (1, ["RayLauncher"], 0)
    assert {code for code, _ in told["ended"]} == {0, 1}  # one that was told to end, the one that was killed


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyhop\[ray\]'"):
        RayCluster()
