"""Ranks on Ray: a local cluster of our own, one that is there already, and actors that are killed or stopped."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_functions
from remains import Remains

from polyhop import launch
from polyhop.errors import UnsupportedError
from polyhop.launch import Launch

PROGRAM = """
import json, sys
sys.path.insert(0, {path!r})
import rank_functions
from polyhop import launch
if __name__ == "__main__":
    if "shared" in sys.argv:
        import os, ray
        os.environ["PYTHONPATH"] = {path!r}
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    for name, args, restarts in json.loads(sys.argv[1]):
        patience_s = 3 if name == "end_at_once" else 30
        options = launch.Launch(engine="ray", num_ranks=2, peer_timeout_s=patience_s, max_restarts=restarts)
        try:
            told = launch.run(getattr(rank_functions, name), args, options)
        except Exception as error:
            told = f"{{type(error).__name__}}: {{error}}"
        print("told", json.dumps(told), flush=True)
"""


def run(tmp_path: Path, jobs: list[tuple[str, list[Any], int]], *more: str) -> list[Any]:
    pytest.importorskip("ray")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=str(Path(__file__).parent)))
    command = [sys.executable, "-W", "ignore", str(program), json.dumps(jobs), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("told ")]


def test_ranks_on_a_cluster_that_is_there(tmp_path: Path, remains: Remains) -> None:
    """Two runs on it: the room of the first is free again for the second."""
    result, error = run(tmp_path, [("add_up", ["x"], 0), ("raise_on", [1, "config"], 0)], "shared")
    assert (result["sum"], result["rank"], result["engine"]) == (3.0, 0, "ray")
    assert error == "ConfigError: rank 1: lr=-1: expected above 0"
    remains.check(within_s=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"), [("SIGKILL", "ended without a word"), ("SIGSTOP", "gave no sign for 3 s")]
)
def test_lost_actor_is_named_and_a_restart_makes_it_good(
    tmp_path: Path, remains: Remains, how: str, text: str
) -> None:
    once, again = run(
        tmp_path, [("end_at_once", [str(tmp_path), 1, how], 0), ("end_at_once", [str(tmp_path), 1, how], 1)]
    )
    assert once.startswith("PeerError: rank 1 (pid")
    assert text in once
    assert again == rank_functions.expected(2, 200)
    remains.check(within_s=20)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyhop\[ray\]'"):
        launch.run(rank_functions.add_up, (), Launch(engine="ray", num_ranks=2))
