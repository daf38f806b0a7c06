"""Scenes for test_heartbeat: ranks as forked processes that have nothing but a heartbeat. Run as a program, prints JSON.

One program for all scenes, as loading torch takes longer than all of them together; the scenes run at the same time.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyhop.comm.heartbeat import Heartbeat
from polyhop.comm.store import Patience

NUM_RANKS = 3
TIMEOUT_S = 2.5
HERE = "127.0.0.1"


class DiskStore:
    """As much of a torch Store as the heartbeat needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: str) -> None:
        (self.folder / "new").write_text(value)
        (self.folder / "new").rename(self.folder / key)

    def check(self, keys: list[str]) -> bool:
        return all((self.folder / key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        return (self.folder / key).read_bytes()


def sleep_in_c(heart: Heartbeat, seconds: float) -> None:
    """As a gloo wait: a native call that nothing interrupts (the GIL is free)."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ctypes.CDLL(None).usleep(100_000)


def work_then_leave(heart: Heartbeat) -> None:
    time.sleep(TIMEOUT_S * 1.3)
    heart.goodbye()


def leave_early(heart: Heartbeat) -> None:
    heart.goodbye()


def wait_for_ever(heart: Heartbeat) -> None:
    sleep_in_c(heart, 60)


def exit_without_word(heart: Heartbeat) -> None:
    os._exit(0)


def fail(heart: Heartbeat) -> None:
    heart.fail("ConfigError: lr=-1\nand more")


def take_loss(heart: Heartbeat) -> None:
    """The main thread notices by itself, and ends properly."""
    loss = heart.loss(30)
    assert loss is not None
    print(f"taken: {loss.text}", file=sys.stderr, flush=True)
    time.sleep(2.5)  # longer than a rank gets that has not asked
    heart.fail("PeerError")


def last_word_hangs(heart: Heartbeat) -> None:
    heart.on_loss(lambda loss: print(f"last word: {loss.rank}", file=sys.stderr, flush=True))
    heart.on_loss(lambda loss: time.sleep(60))
    wait_for_ever(heart)


def fork_child(heart: Heartbeat) -> None:
    """A child that outlives its rank must not keep its links open."""
    if os.fork() == 0:
        time.sleep(4)
        os._exit(0)
    os._exit(0)


Act = Callable[[Heartbeat], None]
# scene -> (what each rank does, what is done to a rank after a moment: (rank, signals with pauses before them))
SCENES: dict[str, tuple[tuple[Act, Act, Act], tuple[int, list[tuple[float, int]]] | None]] = {
    "well": ((work_then_leave, leave_early, work_then_leave), None),
    "kill 1": ((wait_for_ever, wait_for_ever, wait_for_ever), (1, [(0.5, signal.SIGKILL)])),
    "kill 0": ((wait_for_ever, wait_for_ever, wait_for_ever), (0, [(0.5, signal.SIGKILL)])),
    "stop 2": ((wait_for_ever, wait_for_ever, wait_for_ever), (2, [(0.5, signal.SIGSTOP)])),
    "stop 0": ((wait_for_ever, wait_for_ever, wait_for_ever), (0, [(0.5, signal.SIGSTOP)])),
    "stop 2, go on": (
        (wait_for_ever, wait_for_ever, wait_for_ever),
        (2, [(0.5, signal.SIGSTOP), (TIMEOUT_S + 3, signal.SIGCONT)]),
    ),
    "pause 1": (
        (work_then_leave, work_then_leave, work_then_leave),
        (1, [(0.3, signal.SIGSTOP), (TIMEOUT_S / 2, signal.SIGCONT)]),
    ),
    "pause 0": (
        (work_then_leave, work_then_leave, work_then_leave),
        (0, [(0.3, signal.SIGSTOP), (TIMEOUT_S / 2, signal.SIGCONT)]),
    ),
    "exit 1": ((take_loss, exit_without_word, wait_for_ever), None),
    "fail 1": ((wait_for_ever, fail, take_loss), None),
    "fail 0": ((fail, wait_for_ever, wait_for_ever), None),
    "last words": ((last_word_hangs, exit_without_word, wait_for_ever), None),
    "forked": ((wait_for_ever, fork_child, wait_for_ever), None),
}


def be_rank(folder: Path, rank: int, act: Act) -> None:
    errors = os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(errors, 2)
    patience = Patience(rank, 20)
    names = [f"rank {q} (pid {q}00 on host a)" for q in range(NUM_RANKS)]
    heart = Heartbeat.start(
        DiskStore(folder), rank, names, address=HERE, timeout_s=TIMEOUT_S, patience=patience
    )
    patience.close()
    (folder / f"ready-{rank}").write_text("")
    while not all((folder / f"ready-{q}").exists() for q in range(NUM_RANKS)):
        time.sleep(0.02)
    act(heart)


def start(folder: Path, acts: tuple[Act, Act, Act]) -> list[int]:
    pids = []
    for rank, act in enumerate(acts):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                be_rank(folder, rank, act)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def strike(folder: Path, pids: list[int], blow: tuple[int, list[tuple[float, int]]]) -> int:
    """Once all ranks are ready, in a process of its own; its pid."""
    pid = os.fork()
    if pid:
        return pid
    while not all((folder / f"ready-{rank}").exists() for rank in range(NUM_RANKS)):
        time.sleep(0.02)
    rank, signals = blow
    for pause_s, number in signals:
        time.sleep(pause_s)
        (folder / "struck").write_text(str(time.monotonic()))
        os.kill(pids[rank], number)
    os._exit(0)


def main() -> None:
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as parent:
        scenes = {}
        for at, (name, (acts, blow)) in enumerate(SCENES.items()):
            folder = Path(parent) / str(at)
            folder.mkdir()
            pids = start(folder, acts)
            scenes[name] = (folder, pids)
            if blow is not None:
                strike(folder, pids, blow)
        ended: dict[int, tuple[int, float]] = {}
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid:
                ended[pid] = (os.waitstatus_to_exitcode(status), time.monotonic())
            elif all(
                p in ended
                for name, (_, pids) in scenes.items()
                if name not in ("stop 0", "stop 2")
                for p in pids
            ):
                break
            else:
                time.sleep(0.02)
        for name, (folder, pids) in scenes.items():
            struck = (folder / "struck").read_text() if (folder / "struck").exists() else "0"
            told[name] = {
                "codes": [ended.get(pid, (None, 0.0))[0] for pid in pids],
                "seconds": [ended.get(pid, (None, 0.0))[1] - float(struck) for pid in pids],
                "said": [(folder / f"stderr-{rank}").read_text() for rank in range(NUM_RANKS)],
            }
            for pid in pids:
                if pid not in ended:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
