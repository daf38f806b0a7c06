"""``polyhop train`` on ranks that cannot work: the message says what, where and what to do, and nothing stays behind.

What can be seen before ranks start is checked in this process; the rest needs them, and most of that is slow.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REMAINS = Path(__file__).parents[1] / "launch" / "remains.py"


@pytest.fixture(autouse=True)
def _no_remains(tmp_path: Path) -> Iterator[None]:
    """No process, port or shared memory stays, and no folder of a run that did not begin."""
    spec = importlib.util.spec_from_file_location("remains", REMAINS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    remains = module.Remains()
    yield
    remains.check()
    assert not (tmp_path / "run").exists()


@pytest.fixture
def ranked(small: list[str]) -> list[str]:
    """Arguments of a run on ranks that would take a moment."""
    return ["train", *small, "--fanout", "4,3", "--run-dir", "run"]


@pytest.fixture
def parts(polyhop: Callable[..., Any], tiny_dir: Path) -> Path:
    """A folder of four parts of ``tiny``, in the working directory."""
    shown = polyhop(
        "partition", "tiny", "--data-dir", tiny_dir, "--parts", 4, "--method", "hash", "--out", "parts"
    )
    assert shown.code == 0, shown.err
    return Path("parts")


@dataclass(frozen=True)
class Ended:
    code: int
    err: str

    def says(self, pattern: str) -> None:
        """It failed, with one line that matches."""
        assert self.code == 1, self.err
        told = [line for line in self.err.splitlines() if line.startswith("polyhop: error: ")]
        assert len(told) == 1, self.err
        assert re.search(pattern, told[0]), told[0]


def start_rank(
    rank: int, num_ranks: int, host: str, port: int, arguments: list[str], folder: Path
) -> subprocess.Popen[str]:
    """A rank as torchrun would start it."""
    told = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": host, "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in told.items()}
    command = [sys.executable, "-m", "polyhop", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> Ended:
    try:
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    return Ended(process.returncode, err)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------- before any rank starts


def test_parts_that_do_not_divide(polyhop, ranked: list[str], parts: Path) -> None:
    shown = polyhop(*ranked, "--workers", 3, "--parts", parts)
    Ended(shown.code, shown.err).says(
        "parts has 4 parts, which 3 ranks cannot share evenly: use a number of ranks that divides 4, or partition again "
        "with --parts 3"
    )


def test_parts_of_a_newer_format(polyhop, ranked: list[str], parts: Path) -> None:
    about = json.loads((parts / "manifest.json").read_text())
    (parts / "manifest.json").write_text(json.dumps(about | {"format": 99}))
    shown = polyhop(*ranked, "--workers", 2, "--parts", parts)
    Ended(shown.code, shown.err).says(
        r"parts has format 99, this polyhop reads up to \d+: upgrade polyhop, or make the folder again"
    )


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 8), r"bytes, expected \d+: damaged"),
        (Path.unlink, "No such file"),
    ],
    ids=["truncated", "missing"],
)
def test_a_damaged_part(
    polyhop, ranked: list[str], parts: Path, harm: Callable[[Path], None], message: str
) -> None:
    harm(parts / "part-00002" / "indices.npy")
    shown = polyhop(*ranked, "--workers", 2, "--parts", parts)
    Ended(shown.code, shown.err).says(
        f"parts/part-00002/indices.npy: .*{message}.*; copy it again, or make the folder again"
    )


def test_parts_of_another_graph(
    polyhop, ranked: list[str], parts: Path, tiny_dir: Path, two_communities: Callable[..., Any]
) -> None:
    shutil.copytree(tiny_dir, "data")
    np.savez("data/wide.npz", **two_communities(num_features=20))
    np.savez("data/alias.npz", **two_communities())
    given = ["--data-dir", "data", "--workers", 3, "--parts", parts]
    shown = polyhop(*[{"tiny": "wide"}.get(word, word) for word in ranked], *given[:3], 2, *given[4:])
    Ended(shown.code, shown.err).says(
        r"parts holds parts of 'tiny' \(80 nodes, 12 features\), not of 'wide' \(80 nodes, 20 features\): give the folder"
    )
    shown = polyhop(*[{"tiny": "alias"}.get(word, word) for word in ranked], *given)
    Ended(shown.code, shown.err).says(
        "3 ranks cannot share evenly"
    )  # the same graph by another name is no fault


def test_no_folder_of_parts(polyhop, ranked: list[str]) -> None:
    Path("parts").mkdir()
    shown = polyhop(*ranked, "--workers", 2, "--parts", "parts")
    Ended(shown.code, shown.err).says("parts is no partition folder: it has no manifest.json")


def test_no_fan_outs(polyhop, small: list[str]) -> None:
    shown = polyhop("train", *small, "--run-dir", "run", "--workers", 2, "--strategy", "data")
    Ended(shown.code, shown.err).says("ranks train on mini-batches: give --fanout, one number per layer")


# ---------------------------------------------------------------- one rank


def test_a_rank_that_never_starts(ranked: list[str], free_port: int, tmp_path: Path) -> None:
    arguments = [*ranked, "--start-timeout", "3"]
    ended(start_rank(0, 2, "127.0.0.1", free_port, arguments, tmp_path)).says(
        rf"rank 1 of 2 never came to the meeting at 127\.0\.0\.1:{free_port} within 3 s. Check that .* started"
    )


def test_a_busy_port(ranked: list[str], busy_port: int, tmp_path: Path) -> None:
    ended(start_rank(0, 2, "127.0.0.1", busy_port, ranked, tmp_path)).says(
        rf"cannot open the meeting at 127\.0\.0\.1:{busy_port}: port {busy_port} is busy, .*choose another port"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "host", "message"),
    [
        (
            0,
            "192.0.2.99",
            r"192\.0\.2\.99 is no address of this host \(.*MASTER_ADDR must name the host that rank 0",
        ),
        (
            1,
            "192.0.2.99",
            r"rank 1 did not reach the store at 192\.0\.2\.99:\d+ within 3 s: .*Check that rank 0",
        ),
        (
            1,
            "127.0.0.1",
            r"within 3 s: connection refused: nothing listens there yet. Check that rank 0 was started",
        ),
        (1, "no-such-host.invalid", r"the name 'no-such-host\.invalid' does not resolve"),
    ],
    ids=["not here", "not there", "nobody there", "no name"],
)
def test_a_wrong_address(
    ranked: list[str], free_port: int, tmp_path: Path, rank: int, host: str, message: str
) -> None:
    arguments = [*ranked, "--start-timeout", "3"]
    ended(start_rank(rank, 2, host, free_port, arguments, tmp_path)).says(message)


@pytest.mark.slow
def test_another_program_at_the_port(ranked: list[str], busy_port: int, tmp_path: Path) -> None:
    arguments = [*ranked, "--start-timeout", "3"]
    ended(start_rank(1, 2, "127.0.0.1", busy_port, arguments, tmp_path)).says(
        rf"something answers at 127\.0\.0\.1:{busy_port}, but it is no store .*: check MASTER_PORT"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "more", "message"),
    [
        (0, ["--workers", "3"], "3 ranks were asked for, but torchrun started 2 .*leave the number out"),
        (0, ["--max-restarts", "1"], r"torchrun starts ranks again: .*torchrun --max-restarts"),
        (2, [], "RANK=2 with WORLD_SIZE=2: ranks are 0 to 1"),
    ],
)
def test_what_torchrun_was_told_otherwise(
    ranked: list[str], free_port: int, tmp_path: Path, rank: int, more: list[str], message: str
) -> None:
    ended(start_rank(rank, 2, "127.0.0.1", free_port, [*ranked, *more], tmp_path)).says(message)


# ---------------------------------------------------------------- two ranks


def run_two(
    given: list[list[str]], port: int, folders: list[Path], numbers: tuple[int, int] = (0, 1)
) -> list[Ended]:
    processes = [
        start_rank(number, 2, "127.0.0.1", port, arguments, folder)
        for number, arguments, folder in zip(numbers, given, folders)
    ]
    return [ended(process) for process in processes]


@pytest.mark.slow
def test_two_ranks_of_one_number(ranked: list[str], free_port: int, tmp_path: Path) -> None:
    """The second of two ranks 1 is refused, and the first too: nobody can tell which was meant."""
    arguments = [*ranked, "--start-timeout", "20"]
    processes = [start_rank(number, 3, "127.0.0.1", free_port, arguments, tmp_path) for number in (0, 1, 1)]
    for end in [ended(process) for process in processes]:
        end.says(
            r"rank 1 was started twice: pid \d+ on host .*, and pid \d+ on host .*: give every process another RANK"
        )


@pytest.mark.slow
def test_ranks_started_differently(ranked: list[str], free_port: int, tmp_path: Path) -> None:
    arguments = [*ranked, "--start-timeout", "20"]
    for end in run_two([arguments, [*arguments, "--seed", "7"]], free_port, [tmp_path, tmp_path]):
        end.says("the ranks were started differently: seed is .*: start all of them with the same command")


@pytest.mark.slow
def test_a_host_without_the_folder(ranked: list[str], parts: Path, free_port: int, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    arguments = [*ranked, "--parts", "parts"]
    first, second = run_two([arguments, arguments], free_port, [tmp_path, tmp_path / "elsewhere"])
    second.says(
        "no folder parts on host .*: every host needs it, at the same path; share it, or copy manifest.json and"
    )
    first.says("rank 1 .* failed: PartitionError: no folder parts on host")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.slow
def test_hosts_with_different_folders(
    polyhop, ranked: list[str], parts: Path, tiny_dir: Path, free_port: int, tmp_path: Path
) -> None:
    made = polyhop(
        "partition", "tiny", "--data-dir", tiny_dir, "--parts", 2, "--method", "block", "--out", "b/parts"
    )
    assert made.code == 0, made.err
    arguments = [*ranked, "--parts", "parts"]
    first, second = run_two([arguments, arguments], free_port, [tmp_path, tmp_path / "b"])
    second.says("folder parts on host .* is not the one that rank 0 has: copy that to every host")
    first.says("rank 1 .* failed: PartitionError: folder parts on host")


@pytest.mark.slow
def test_a_damaged_part_that_only_its_rank_can_see(
    ranked: list[str], parts: Path, free_port: int, tmp_path: Path
) -> None:
    file = parts / "part-00003" / "x.npy"
    os.truncate(file, file.stat().st_size - 8)
    arguments = [*ranked, "--parts", "parts"]
    first, second = run_two([arguments, arguments], free_port, [tmp_path, tmp_path])
    second.says(
        r"parts/part-00003/x\.npy: .* bytes, expected .*: damaged; copy it again, or make the folder again"
    )
    first.says(r"rank 1 .* failed: PartitionError: parts/part-00003/x\.npy")


@pytest.mark.slow
def test_a_checkpoint_of_another_graph(
    polyhop, ranked: list[str], tiny_dir: Path, two_communities: Callable[..., Any]
) -> None:
    """Weights of 12 features cannot go on with parts of 20."""
    np.savez("wide.npz", **two_communities(num_features=20))
    first = polyhop("train", "tiny", "--data-dir", tiny_dir, *ranked[4:-2], "--run-dir", "old")
    assert first.code == 0, first.err
    given = [{"tiny": "wide.npz"}.get(word, word) for word in ranked]
    shown = polyhop(*given, "--workers", 2, "--resume", "old")
    Ended(shown.code, shown.err).says(
        "rank 0: old/checkpoints/.* was made by another run, so it cannot be continued: .*"
        "the checkpoint has 12, this run 20.* Give the same model, graph and options"
    )
