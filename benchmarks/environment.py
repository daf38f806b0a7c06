"""The peers' own environment: made by the bench, apart from the project's, so that peers never shape our dependencies.

polyhop needs only torch and numpy there, so all sides run in one process, alternating, on the same torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import ROOT, Figure

__all__ = ["ensure_peers", "run_section"]

PEERS = ROOT / ".venv-peers"
# torch comes first and alone: a peer must never choose it. DGL declares dependencies it does not need, hence --no-deps;
# 1.1.3 is the newest that runs on this torch.
STEPS: tuple[tuple[str, ...], ...] = (
    ("torch==2.13.0",),
    ("numpy", "scipy", "psutil", "networkx", "requests", "tqdm", "packaging", "torch_geometric==2.8.1"),
    ("--no-deps", "dgl==1.1.3"),
)


def ensure_peers() -> Path:
    """Python of the peers' environment; made on first use (about 1.2 GB, a few minutes)."""
    python = PEERS / "bin" / "python"
    marker = PEERS / "steps.json"
    wanted = json.dumps(STEPS)
    if python.exists() and marker.exists() and marker.read_text() == wanted:
        return python
    print(f"making the peers' environment in {PEERS.name}/ (torch, PyG, DGL; once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
    for step in STEPS:
        print("  pip install " + " ".join(step), flush=True)
        command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *step]
        subprocess.run(command, check=True)
    marker.write_text(wanted)
    return python


def _link_package(folder: Path) -> Path:
    """A folder that holds only polyhop, to put on the peers' path without shadowing anything else."""
    import polyhop

    package = Path(polyhop.__file__).resolve().parent
    (folder / "polyhop").symlink_to(package)
    return folder


def run_section(
    bench: str, section: str, num_threads: int, *, is_quick: bool, has_peers: bool = True
) -> list[Figure]:
    """Run one section in a process of its own inside the peers' environment, or our own; its output streams to ours."""
    python = ensure_peers() if has_peers else Path(sys.executable)
    with tempfile.TemporaryDirectory(prefix="polyhop-bench-") as name:
        folder = Path(name)
        answer = folder / "figures.json"
        environment = {
            **os.environ,
            "DGLBACKEND": "pytorch",
            "OMP_NUM_THREADS": str(num_threads),
            "MKL_NUM_THREADS": str(num_threads),
            "POLYHOP_THREADS": str(num_threads),
            # Never a silent fallback in a figure: without Triton there is a warning, which is an error here.
            "POLYHOP_KERNELS": os.environ.get("POLYHOP_KERNELS", "auto" if bench == "gpu" else "native"),
            "PYTHONPATH": os.pathsep.join([str(_link_package(folder)), str(ROOT)]),
            "PYTHONWARNINGS": "ignore,error:polyhop runs on plain torch kernels"
            if bench == "gpu"
            else "ignore",
        }
        command = [str(python), "-m", "benchmarks.section", bench, section, str(answer), str(int(is_quick))]
        start = time.perf_counter()
        print(f"\n== {bench}: {section} ({num_threads} thread{'s' if num_threads > 1 else ''})", flush=True)
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        print(f"   {section} took {time.perf_counter() - start:.0f} s", flush=True)
        if done.returncode != 0 or not answer.exists():
            print(f"   {section} FAILED with exit status {done.returncode}", flush=True)
            return []
        return [Figure(**figure) for figure in json.loads(answer.read_text())]
