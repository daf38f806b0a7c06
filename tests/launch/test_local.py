"""The local launcher with real processes: results, errors, signals, and a parent that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import rank_functions
from remains import Remains

from polyhop import launch
from polyhop.errors import ConfigError, LaunchError, PeerError
from polyhop.launch import Launch

PARENT = """
import sys
sys.path.insert(0, {path!r})
import rank_functions
from polyhop import launch
from polyhop.errors import Interrupted
if __name__ == "__main__":
    try:
        launch.run(rank_functions.wait_to_be_stopped, ({folder!r}, 0.5), launch.Launch(num_ranks=2, pin=False))
    except Interrupted as error:
        print(error)
        sys.exit(143)
"""


@contextmanager
def parent_of_two(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that runs two ranks, in a process group of its own, as in a terminal."""
    program = folder / "program.py"
    program.write_text(PARENT.format(path=str(Path(__file__).parent), folder=str(folder)))
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield parent
    finally:
        parent.kill()
        parent.communicate()


def ranks_at_work(parent: subprocess.Popen[str], folder: Path) -> list[int]:
    """Wait until both ranks run their function; their pids."""
    files = [folder / f"pid-0-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None, parent.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def test_result_settings_and_traffic(
    tmp_path: Path, remains: Remains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start for all that a good run shows."""
    monkeypatch.setenv("POLYHOP_TRAFFIC_DIR", str(tmp_path / "traffic"))
    monkeypatch.setenv("POLYHOP_LATENCY_S", "0.01")
    options = Launch(num_ranks=2, threads=1)
    assert options.latency_s == 0.01
    result = launch.run(rank_functions.add_up, ("x", 3), options)
    assert (result["sum"], result["rank"], result["num_ranks"]) == (3.0, 0, 2)
    assert (result["attempt"], result["engine"], result["more"]) == (0, "local", ("x", 3))
    cores = len(os.sched_getaffinity(0))
    assert result["settings"] == [[cores // 2 if cores >= 2 else cores, 1, 1]] * 2
    for rank in range(2):
        told = json.loads((tmp_path / "traffic" / f"rank-{rank}.json").read_text())
        assert told["rank"] == rank
        assert (
            told["bytes"]["gradients"] == 8
        )  # half the ranks scatter their one number, the other half gathers it
        assert told["messages"]["ids"] == 1
    assert not launch.is_rank_process()


def test_error_keeps_its_class_and_names_its_rank(remains: Remains) -> None:
    with pytest.raises(ConfigError) as caught:
        launch.run(rank_functions.raise_on, (1, "config"), Launch(num_ranks=2, pin=False, max_restarts=3))
    assert str(caught.value) == "rank 1: lr=-1: expected above 0"
    assert "raise_on" in "".join(caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [("key", KeyError, "rank 0: 'x'"), ("own", PeerError, "rank 0: rank_functions.Odd: odd")],
)
def test_errors_of_other_kinds(remains: Remains, kind: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        launch.run(rank_functions.raise_on, (0, kind), Launch(num_ranks=2, pin=False))
    assert text in str(caught.value.args[0])


@pytest.mark.slow
def test_error_of_all_ranks_is_told_once(remains: Remains) -> None:
    with pytest.raises(ConfigError) as caught:
        launch.run(rank_functions.raise_everywhere, (), Launch(num_ranks=3, pin=False))
    assert str(caught.value) == "lr=-1: expected above 0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"), [("exit", "exit code 3"), ("SIGSEGV", "was killed by SIGSEGV"), ("SIGKILL", "SIGKILL")]
)
def test_rank_that_ends_without_a_word(tmp_path: Path, remains: Remains, how: str, text: str) -> None:
    with pytest.raises(PeerError, match=rf"rank 2 \(pid \d+\).*{text}"):
        launch.run(
            rank_functions.end_at_once,
            (str(tmp_path), 2, how),
            Launch(num_ranks=3, pin=False, peer_timeout_s=3),
        )


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_signal_is_passed_on_once_and_ranks_may_save(
    tmp_path: Path, remains: Remains, number: signal.Signals
) -> None:
    """To the whole group, as Ctrl-C is: a rank that got it twice would not save."""
    with parent_of_two(tmp_path) as parent:
        ranks_at_work(parent, tmp_path)
        os.killpg(parent.pid, number)
        said, errors = parent.communicate(timeout=60)
        assert parent.returncode == 143, errors
    assert said.strip() == f"stopped by {number.name}"
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    remains.check()


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_signal_while_ranks_start(tmp_path: Path, remains: Remains, after_s: float) -> None:
    with parent_of_two(tmp_path) as parent:
        until = time.monotonic() + 60
        while len(remains.processes()) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(after_s)
        parent.send_signal(signal.SIGTERM)
        said, errors = parent.communicate(timeout=60)
        assert parent.returncode == 143, errors
    assert said.startswith("stopped by SIGTERM")
    assert "Traceback" not in errors
    remains.check()


def test_ranks_die_with_a_killed_parent(tmp_path: Path, remains: Remains) -> None:
    with parent_of_two(tmp_path) as parent:
        pids = ranks_at_work(parent, tmp_path)
        assert set(pids) <= set(remains.processes())
        parent.kill()
        parent.wait()
        remains.check(within_s=10)
    assert not list(tmp_path.glob("saved-*"))


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(LaunchError, match="top level"):
        launch.run(lambda context: None, (), Launch(num_ranks=2))
    with pytest.raises(LaunchError, match="pickled"):
        launch.run(rank_functions.add_up, (open, lambda: 0), Launch(num_ranks=2))


@pytest.mark.slow
def test_program_without_a_guard_is_told(tmp_path: Path, remains: Remains) -> None:
    """A program that starts ranks while it is imported would start them again in every rank."""
    program = tmp_path / "program.py"
    program.write_text(
        PARENT.format(path=str(Path(__file__).parent), folder="x").replace(
            'if __name__ == "__main__":', "if True:"
        )
    )
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=100)
    assert run.returncode != 0
    assert "if __name__ == '__main__':" in run.stderr
    assert "ended without a word (exit code 1)" in run.stderr
