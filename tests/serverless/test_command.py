"""Launcher ``command``: functions that a command runs, and that they end with their server, wherever they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import torch
from remains import Remains  # type: ignore[import-not-found]
from test_serverless import on_rank  # type: ignore[import-not-found]

from polyhop.comm import run_in_threads
from polyhop.errors import LaunchError
from polyhop.graph import Graph
from polyhop.serverless.command import CommandLauncher
from polyhop.serverless.function import Order
from polyhop.serverless.local import Ended, LocalLauncher
from polyhop.serverless.mail import Came, Left
from polyhop.serverless.secrets import KeyPair
from polyhop.serverless.server import ServerlessError

MakeGraph = Callable[..., Graph]
KEYS = KeyPair.draw()
NOBODY = Order("job", "server0", "tcp://127.0.0.1:1", KEYS.public, KEYS.public, KEYS.secret, idle_s=300.0)
FUNCTION = f"{sys.executable} -m polyhop.serverless.function"


def trained(graph: Graph, **options: Any) -> Any:
    given = {"intervals": 3, "functions": 2, **options}
    return run_in_threads(1, on_rank, graph, "gcn", 0.4, 3, given, lambda step: step.crew)[0]


def until(found: Callable[[], Any], within_s: float = 30.0) -> Any:
    end = time.monotonic() + within_s
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


def test_a_command_gives_the_bits_of_local_functions(make_graph: MakeGraph, remains: Remains) -> None:
    """``env -u``: the command takes the setting of one thread away, as ssh and docker do."""
    graph = make_graph(80)
    expected = trained(graph)
    command = f"env -u OPENBLAS_NUM_THREADS -u OMP_NUM_THREADS {FUNCTION}"
    found = trained(graph, function_launcher="command", function_command=command)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert {each.exit_code for each in found[2].gone} == {0}


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("true", r"its command ended \(exit code 0\) before it dialled in to tcp://127"),
        ("cat /no/such/file", "No such file or directory"),
    ],
)
def test_a_command_that_runs_no_function_ends_the_run(
    make_graph: MakeGraph, remains: Remains, command: str, told: str
) -> None:
    with pytest.raises(ServerlessError, match=rf"(?s)20 functions ended with a failure.*{told}"):
        trained(make_graph(40), function_launcher="command", function_command=command)


def test_a_command_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    for name, why in (("missing", "No such file"), ("plain", "Permission denied")):
        with pytest.raises(LaunchError, match=rf"{name}' cannot be run: {why}"):
            LocalLauncher(NOBODY, command=[str(tmp_path / name)]).ensure(1)


class Scene:
    """A launcher of ``sleep``, its clock, and what the post would tell it."""

    def __init__(self) -> None:
        self.now, self.news = 100.0, list[Came | Left]()
        self.launcher = CommandLauncher(
            NOBODY, command=["sleep", "300"], news=self._told, comes_s=10.0, clock=lambda: self.now
        )

    def _told(self) -> list[Came | Left]:
        told, self.news = self.news, []
        return told

    def ended(self) -> list[Ended]:
        return until(self.launcher.ended)  # type: ignore[no-any-return]


def test_one_that_never_dials_in_and_one_whose_connection_is_lost(remains: Remains) -> None:
    scene = Scene()
    assert scene.launcher.ensure(3) == ["server0-0", "server0-1", "server0-2"]
    scene.now, scene.news = 109.0, [Came("server0-1"), Came("server0-2")]
    assert scene.launcher.ended() == []
    scene.now = 110.0
    (gone,) = scene.ended()
    assert (gone.function, gone.is_failure) == ("server0-0", True)
    assert gone.said == "it did not dial in within 10 s: can functions reach tcp://127.0.0.1:1?"
    scene.now, scene.news = (
        200.0,
        [Left("server0-1", True, "its connection is gone"), Left("server0-2", False, "idle")],
    )
    (gone,) = scene.ended()
    assert (gone.function, gone.is_failure, gone.said) == ("server0-1", True, "its connection is gone")
    assert scene.launcher.alive == ["server0-2"]
    os.kill(scene.launcher.pids["server0-2"], signal.SIGTERM)
    (gone,) = scene.ended()
    assert (gone.exit_code, gone.said) == (-signal.SIGTERM, "")
    assert scene.launcher.close() == []


# A server that has functions and is killed before it can end them.
SERVER = """
import os, signal, sys, time
from polyhop.serverless.function import Order
from polyhop.serverless.local import LocalLauncher
launcher = LocalLauncher(Order(*{order!r}, idle_s=300.0))
launcher.ensure(2)
time.sleep(1.5)
print(*launcher.pids.values(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_functions_do_not_outlive_their_server(remains: Remains) -> None:
    """They would wait for five minutes for a server that is gone."""
    order = (NOBODY.job, NOBODY.function, NOBODY.address, NOBODY.server_public, NOBODY.public, NOBODY.secret)
    done = subprocess.run(
        [sys.executable, "-c", SERVER.format(order=order)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids), 15)


def test_one_killed_before_it_has_its_order_is_only_replaced() -> None:
    launcher = LocalLauncher(NOBODY, command=["true"])
    for _ in range(20):
        launcher.ensure(2)  # writes into pipes that nobody reads any more
        until(lambda: not launcher.alive)
    launcher.ended()
    assert launcher.num_started == 40
