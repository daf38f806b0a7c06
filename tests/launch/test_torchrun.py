"""Ranks that torchrun started, or someone who sets the same variables; and what is said when the variables are wrong."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from remains import Remains

from polyhop import launch
from polyhop.errors import ConfigError, LaunchError
from polyhop.launch import Launch
from polyhop.launch.torchrun import seat_from_environment

PROGRAM = """
import json, os, sys, time
sys.path.insert(0, {path!r})
import rank_functions
from polyhop import launch
from polyhop.comm.heartbeat import Heartbeat
from polyhop.errors import PolyhopError
if os.environ.get("LEAVE_LATE"):
    leave = Heartbeat.goodbye
    Heartbeat.goodbye = lambda self: [leave(self), time.sleep(1.5)]  # and only then closes the store
options = launch.Launch(peer_timeout_s=20, start_timeout_s=60, pin=False, agreed={{"lr": sys.argv[2]}})
try:
    first = launch.run(getattr(rank_functions, sys.argv[1]), sys.argv[3:], options)
    second = launch.run(rank_functions.add_up, (), options)
    print(json.dumps([first, second["sum"], second["attempt"], second["engine"], launch.is_rank_process()]))
except PolyhopError as error:
    print(f"{{type(error).__name__}}: {{error}}")
    sys.exit(1)
"""

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(path=str(Path(__file__).parent)))
    return path


def free_port() -> int:
    """One that the system does not hand out by itself: between here and its use, others open connections."""
    for port in random.sample(range(20_000, 30_000), 50):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no free port from 20000 to 29999")


def start_by_hand(program: Path, port: int, rank: int, num_ranks: int, *args: str) -> subprocess.Popen[str]:
    """One process with the variables that torchrun would set, without its agent: rank 0 hosts the store."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, str(program), *args],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_starts_ranks_and_starts_them_again(tmp_path: Path, program: Path, remains: Remains) -> None:
    """Rank 1 is killed in the first attempt; torchrun starts both again, and our attempt counts with it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(program), "end_once", "0.1", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr[-3000:]
    # Ranks share the pipe: what one says may stand behind what the other said, on one line.
    starts = [m.start() for m in re.finditer(r"\[\[", run.stdout)]
    results = [json.JSONDecoder().raw_decode(run.stdout, start)[0] for start in starts]
    assert [rest for _, *rest in results] == [[3.0, 1, "torchrun", True]] * 2
    assert results[0][0] == results[1][0]
    assert "rank 1 (pid" in run.stdout  # what rank 0 said of the first attempt


def test_ranks_started_by_hand_meet_at_rank_0(
    program: Path, remains: Remains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: rank 1 is ready for the second run while rank 0 still has the store of the first, and waits for the second."""
    port = free_port()
    first = start_by_hand(program, port, 1, 2, "sum_up", "0.1")
    monkeypatch.setenv("LEAVE_LATE", "1")
    ranks = [first, start_by_hand(program, port, 0, 2, "sum_up", "0.1")]
    told = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert [json.loads(out) for out, _ in told] == [[3.0, 3.0, 0, "torchrun", True]] * 2


def test_ranks_started_with_other_options_all_say_so(program: Path, remains: Remains) -> None:
    port = free_port()
    ranks = [start_by_hand(program, port, rank, 2, "sum_up", lr) for rank, lr in ((0, "0.1"), (1, "0.2"))]
    told = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    for out, _ in told:
        assert out.startswith("LaunchError: the ranks were started differently: lr is '0.")


def test_seat_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}
    for name, value in {**VARIABLES, **more}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    seat = seat_from_environment(None)
    assert (seat.rank, seat.num_ranks, seat.local_rank, seat.num_local, seat.attempt) == (1, 2, 1, 2, 3)
    assert (seat.host, seat.port, seat.is_host, seat.has_own_store) == ("127.0.0.1", 29500, False, True)
    monkeypatch.setenv("RANK", "0")
    assert seat_from_environment(2).is_host
    assert seat_from_environment(2).has_own_store
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not seat_from_environment(2).is_host
    assert not seat_from_environment(2).has_own_store
    assert launch.is_rank_process()


@pytest.mark.parametrize(
    ("changed", "num_ranks", "text"),
    [
        ({"MASTER_ADDR": ""}, None, "MASTER_ADDR not set"),
        ({"RANK": "x"}, None, "RANK='x': expected a whole number"),
        ({"RANK": "2"}, None, "RANK=2 with WORLD_SIZE=2: ranks are 0 to 1"),
        ({"MASTER_PORT": "-1"}, None, "MASTER_PORT='-1'"),
        ({}, 4, "4 ranks were asked for, but torchrun started 2"),
    ],
)
def test_wrong_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], num_ranks: int | None, text: str
) -> None:
    for name, value in {**VARIABLES, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=text):
        seat_from_environment(num_ranks)


def test_restarts_are_torchruns_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="torchrun --max-restarts"):
        launch.run(len, (), Launch(engine="torchrun", max_restarts=1))  # type: ignore[arg-type]
