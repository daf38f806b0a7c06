"""A rank that is killed or stopped at any moment: named in time, nothing stays, and a restart gives the same result."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import rank_functions
from faults import strike
from remains import Remains

from polyhop import launch
from polyhop.errors import LaunchError, PeerError
from polyhop.launch import Launch

PEER_TIMEOUT_S = 3.0
SLACK_S = 25.0  # the launcher's own limits, and a machine that has other work
NUM_STEPS = 6000
MOMENTS = int(os.environ.get("POLYHOP_MOMENTS", "5"))  # of each signal; half as many with a restart


def test_killed_rank_is_named_and_a_restart_gives_the_same(tmp_path: Path, remains: Remains) -> None:
    options = Launch(num_ranks=2, peer_timeout_s=PEER_TIMEOUT_S, pin=False, max_restarts=1)
    before = time.monotonic()
    result = launch.run(rank_functions.end_at_once, (str(tmp_path), 1, "SIGKILL"), options)
    assert result == rank_functions.expected(2, 200)
    assert time.monotonic() - before < 120
    assert {path.name for path in tmp_path.glob("pid-*")} == {"pid-0-0", "pid-1-0", "pid-1-1"}


def test_stopped_rank_is_named_in_time(tmp_path: Path, remains: Remains) -> None:
    options = Launch(num_ranks=2, peer_timeout_s=PEER_TIMEOUT_S, pin=False)
    with pytest.raises(PeerError, match=r"rank 0 \(pid \d+ on host .*\) was lost: it gave no sign for 3 s"):
        launch.run(rank_functions.end_at_once, (str(tmp_path), 0, "SIGSTOP"), options)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize(("restarts", "num_blows"), [(0, MOMENTS), (1, (MOMENTS + 1) // 2)])
def test_struck_at_random_moments(
    tmp_path: Path, remains: Remains, number: signal.Signals, restarts: int, num_blows: int
) -> None:
    """That many blows that were felt, at moments from the start of the processes to the end of their work.

    How long a run takes depends on what else the machine does, so a run that ended before its blow gives the new measure.
    """
    seed = random.SystemRandom().randrange(2**31)
    moments = random.Random(seed)
    options = Launch(
        num_ranks=3, peer_timeout_s=PEER_TIMEOUT_S, start_timeout_s=20, pin=False, max_restarts=restarts
    )
    work = (str(tmp_path), NUM_STEPS)
    before = time.monotonic()
    whole = launch.run(rank_functions.loop, work, options)
    whole_s = time.monotonic() - before
    assert whole == rank_functions.expected(3, NUM_STEPS)
    felt: list[float] = []
    at_work = 0
    for _ in range(5 * num_blows):
        for path in tmp_path.glob("pid-*"):
            path.unlink()
        rank, after_s = moments.randrange(3), moments.uniform(0, 1) * whole_s
        struck = strike(rank_functions.loop, work, options, rank=rank, number=number, after_s=after_s)
        told = f"seed {seed}, rank {rank} after {after_s:.2f} of {whole_s:.2f} s: {struck}"
        remains.check(within_s=10)
        if struck.error is None:
            assert struck.result == whole, told
        else:
            assert not restarts, told
            assert isinstance(struck.error, PeerError | LaunchError), told
            assert f"rank {rank}" in str(struck.error), told
            limit_s = options.start_timeout_s if isinstance(struck.error, LaunchError) else PEER_TIMEOUT_S
            assert struck.seconds < limit_s + SLACK_S, told
        if not struck.is_felt:
            whole_s = struck.whole_s
            continue
        felt.append(struck.seconds)
        at_work += (tmp_path / f"pid-0-{rank}").exists()
        if len(felt) == num_blows:
            break
    print(
        f"{number.name}: {len(felt)} felt, {at_work} of them at work; slowest {max(felt):.1f} s from blow to end"
    )
    assert len(felt) == num_blows, f"seed {seed}: only {len(felt)} were felt"
    assert at_work >= num_blows // 5, f"seed {seed}: only {at_work} came while the ranks were at work"
