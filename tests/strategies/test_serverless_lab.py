"""Two graph servers and their functions on three hosts, functions killed all the while: the undisturbed weights."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

ROOT = Path(__file__).resolve().parents[2]
for _folder in ("scripts", "launch"):
    sys.path.insert(0, str(ROOT / "tests" / _folder))

from remains import Remains  # type: ignore[import-not-found]  # noqa: E402
from test_lab import LAB, left_by, network, why_not  # type: ignore[import-not-found]  # noqa: E402

FUNCTION = f"ip netns exec $LAB_HOST_2 {sys.executable} -m polyhop.serverless.function"
TRAIN = f"""exec {sys.executable} -m polyhop train "$0" --run-dir "$1" --model gcn --hidden 16 --seed 3 --epochs "$2" \
--eval-every "$2" --strategy serverless --functions 3 --intervals 5 --progress none --threads 1 --peer-timeout 30 \
--function-launcher command --function-command "{FUNCTION}" """


@pytest.fixture(scope="module", autouse=True)
def _can_run() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def remains() -> Iterator[Remains]:
    seen = Remains()
    yield seen
    seen.check(within_s=20)


class Killer:
    """kill -9 for a random one of the processes in a lab's third host, again and again."""

    def __init__(self, lab: int, seed: int) -> None:
        self._lab, self._rng = lab, random.Random(seed)
        self._over, self.num_killed = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._rng.uniform(0.05, 0.4)):
            with suppress(ProcessLookupError, network.LabError):
                hosts = [n for n in left_by(self._lab) if n.endswith("-2")]
                pids = [int(pid) for pid in network.ip("netns", "pids", hosts[0]).split()] if hosts else []
                if pids:
                    os.kill(self._rng.choice(pids), signal.SIGKILL)
                    self.num_killed += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=10)


def trained(graph: str, epochs: int, folder: Path, seed: int | None = None) -> tuple[dict[str, Any], int]:
    """What the lab told of a run, and how many functions were killed in it."""
    told = folder.with_suffix(".json")
    command = [str(LAB), "2", "--extra", "1", "--rate", "1gbit", "--timeout", "300", "--json", str(told)]
    lab = subprocess.Popen(
        [*command, "--", "bash", "-c", TRAIN, graph, str(folder), str(epochs)], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    killer = None if seed is None else Killer(lab.pid, seed)
    try:
        out, _ = lab.communicate(timeout=400)
    finally:
        lab.kill()
        if killer is not None:
            killer.close()
    assert lab.returncode == 0, out
    assert left_by(lab.pid) == []
    return json.loads(told.read_text()), 0 if killer is None else killer.num_killed


def weights(folder: Path, epochs: int) -> dict[str, bytes]:
    """Of the last checkpoint: what was trained, and the optimiser's sums."""
    last = folder / "checkpoints" / f"step-{epochs:08d}"
    return {name: (last / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")}


def tasks(folder: Path) -> list[dict[str, int]]:
    """What became of the tasks of every rank."""
    files = [folder / f"trace-rank{rank}.jsonl" for rank in range(2)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line.get("name") == "tasks"]


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "epochs"), [("debian-packages", 30), ("cora", 80), ("pubmed", 30)])
def test_functions_of_a_third_host_are_killed_and_nothing_changes(
    graph: str,
    epochs: int,
    tmp_path: Path,
    remains: Remains,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if graph != "debian-packages":
        monkeypatch.setenv("POLYHOP_DATA", str(request.getfixturevalue("data_dir")))
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    told, _ = trained(graph, epochs, calm)
    received = told["hosts"][2]["received_bytes"]
    assert received > 1_000_000  # functions did run there
    _, num_killed = trained(graph, epochs, struck, seed=1)
    assert weights(struck, epochs) == weights(calm, epochs)
    done = tasks(struck)
    assert num_killed >= 10
    assert sum(each["lost"] for each in done) >= 5  # leases that a function held when it was killed
    assert all(
        each["ok"] == each["offered"] == before["ok"] for each, before in zip(done, tasks(calm), strict=True)
    )
    assert [each["lost"] for each in tasks(calm)] == [0, 0]
    print(
        f"{graph}: {num_killed} killed, {[each['lost'] for each in done]} leases lost, {received / 1e6:.0f} MB there"
    )
