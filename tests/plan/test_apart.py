"""Measuring in a process of its own: the same answer, nothing of it stays, and what goes wrong is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from polyhop.nn import GCN
from polyhop.nn.counts import Counts
from polyhop.plan import Law
from polyhop.plan.apart import ApartError, run_apart
from polyhop.plan.calibrate import measured_law


def process_id() -> int:
    return os.getpid()


def print_and_sum(values: torch.Tensor) -> float:
    print("not an answer")
    return float(values.sum())


def fail() -> None:
    raise ValueError("no such luck")


def fall() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def held_bytes(num_bytes: int) -> float:
    held = bytearray(num_bytes)  # of zeros, which no page is taken for
    held[:: 1 << 12] = b"1" * len(held[:: 1 << 12])
    return peak_bytes()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_another_process_answers_and_is_gone() -> None:
    pid = run_apart(process_id)
    assert pid != os.getpid()
    assert not is_alive(pid)
    assert run_apart(print_and_sum, torch.arange(5)) == 10.0, "what is printed there is no answer"


def test_what_it_takes_is_not_held_here() -> None:
    """Half a gigabyte there; here the most that was ever resident hardly moves."""
    before = peak_bytes()
    assert run_apart(held_bytes, 1 << 29) >= 1 << 29
    assert peak_bytes() - before < 64e6


def peak_bytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def test_steps_are_timed_there() -> None:
    found = run_apart(measured_law, GCN(4, 4, 1, out_channels=2), 4)
    assert isinstance(found, Law)
    assert found.seconds(Counts(((1e6, 1e6),), 1e6, 1e3, 1.0)) > 0


def test_what_goes_wrong_is_told() -> None:
    with pytest.raises(ApartError, match="ValueError: no such luck"):
        run_apart(fail)
    with pytest.raises(ApartError, match="ended with code -9"):
        run_apart(fall)
    with pytest.raises(ApartError, match="cannot be sent"):
        run_apart(lambda: 1)
    start = time.monotonic()
    with pytest.raises(ApartError, match="ended with code -9"):
        run_apart(sleep, 600.0, timeout_s=0.5)
    assert time.monotonic() - start < 60


def test_a_class_of_the_script_is_not_known_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from polyhop.plan.apart import ApartError, run_apart\n"
        "def answer():\n    return 42\n"
        "print('started')\n"
        "try:\n    run_apart(answer)\n"
        "except ApartError as error:\n    print('told:', error)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.count("started") == 1, "the script itself is not run again"
    assert "told: " in done.stdout
    assert "answer" in done.stdout


def test_it_ends_with_whoever_asked(tmp_path: Path) -> None:
    """Killed, who asked can end nothing: the process sees that its input is closed."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from polyhop.plan.apart import run_apart\nimport test_apart\n"
        f"run_apart(test_apart.note_and_sleep, {str(tmp_path / 'pid')!r})\n"
    )
    asker = subprocess.Popen([sys.executable, str(script)])
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "pid").exists() and time.monotonic() < until:
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        assert is_alive(pid)
    finally:
        asker.kill()
        asker.wait()
    until = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    if is_alive(pid):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("it outlived whoever asked")


def test_an_interrupt_is_for_whoever_asks() -> None:
    """Ctrl-C goes to all processes of a terminal's group; this one is not in it."""
    assert run_apart(os.getpgrp) != os.getpgrp()


def note_and_sleep(path: str) -> None:
    beside = Path(path + "~")
    beside.write_text(str(os.getpid()))
    beside.rename(path)
    time.sleep(600)


def test_threads_may_ask_at_once() -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(run_apart(process_id))) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 2
