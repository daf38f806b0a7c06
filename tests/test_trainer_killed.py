"""Killed with SIGKILL at random moments and resumed, a run ends with the weights of an undisturbed one, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Runs in an interpreter of its own that has imported everything but started no thread; each attempt is a fork of it, so
# that a kill costs no new import. Arguments: folder, mode, number of kills, seed of the moments.
DRIVER = """
import os, random, shutil, signal, sys, time
from pathlib import Path

import torch

import polyhop
from conftest import planted_graph
from polyhop.train.files import read_tensors

folder, mode, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(1)
moments = random.Random(seed)
options = {"max_epochs": 12, "patience": 50, "schedule": "cosine", "warmup": 3, "clip": 5.0}
options |= {"progress": "none", "device": "cpu", "foresee": False}
if mode == "mini-batch":
    options |= {"num_neighbors": [5, 3], "batch_size": 16, "max_epochs": 6}


def train(run, **more):
    graph = planted_graph(240)
    torch.manual_seed(0)
    model = polyhop.nn.GAT(8, 16, num_layers=2, out_channels=3, dropout=0.4, norm="batch_norm")
    polyhop.Trainer(run_dir=run, **options, **more).fit(model, graph)


def attempt(run, **more):
    child = os.fork()
    if child == 0:
        try:
            train(run, **more)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return child


started = time.perf_counter()
assert os.waitpid(attempt(folder / "whole"), 0)[1] == 0
whole_s = time.perf_counter() - started
landed = 0
while not landed:  # a machine that has become faster since: sooner, from the start
    shutil.rmtree(folder / "killed", ignore_errors=True)
    for number in range(kills):
        child = attempt(folder / "killed", resume="auto", checkpoint_every=moments.choice([1, 2, 3, 7]))
        time.sleep(moments.uniform(0.05, 0.9) * whole_s)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
        landed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            break
    whole_s /= 2
assert os.waitpid(attempt(folder / "killed", resume="auto"), 0)[1] == 0
a, b = (read_tensors(folder / run / "model.safetensors") for run in ("whole", "killed"))
assert a.keys() == b.keys()
different = [name for name in a if not torch.equal(a[name], b[name])]
metrics = [[line.split('"seconds"')[0] for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
           for run in ("whole", "killed")]
print(f"landed={landed} different={different} same_metrics={metrics[0] == metrics[1]}")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("mode", ["full graph", "mini-batch"])
def test_killed_at_random_moments(tmp_path: Path, mode: str) -> None:
    seed = random.SystemRandom().randrange(2**31)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-c", DRIVER, str(tmp_path), mode, "6", str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, f"seed {seed}\n{run.stderr[-3000:]}"
    words = dict(word.split("=") for word in run.stdout.split())
    assert words["different"] == "[]", f"seed {seed}"
    assert words["same_metrics"] == "True", f"seed {seed}"
    assert int(words["landed"]) >= 1, f"seed {seed}"


def test_sigterm_from_outside_saves_and_leaves(tmp_path: Path) -> None:
    code = f"""
import polyhop, sys
from conftest import planted_graph
from polyhop.errors import Interrupted
try:
    graph = planted_graph(240)
    model = polyhop.nn.GCN(8, 16, num_layers=2, out_channels=3)
    polyhop.Trainer(run_dir={str(tmp_path / "run")!r}, max_epochs=100_000, progress="json").fit(model, graph)
except Interrupted as error:
    print(error, file=sys.stderr)
    sys.exit(143)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if '"epoch"' in line and "event" in line and '"epoch": 3,' in line:
            break
    started = time.monotonic()
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 143, err
    assert "stopped by SIGTERM after step" in err
    assert "resume='auto'" in err
    assert time.monotonic() - started < 60
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
