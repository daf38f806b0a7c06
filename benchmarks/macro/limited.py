"""A training run with features six times the memory and more: strategy ``macro``, rows read from disk, edges mapped.

The run is a process in a memory cgroup, page cache included, which ends it if it asks for more. It must end with the
weights, to the bit, of the same run without a limit and with mapped features.

Run as ``python -m benchmarks.macro.limited STORE PARTS STEPS ANSWER`` it is one of the two.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure
from benchmarks.macro.disk import enter, limited, peak_bytes, why_not

__all__ = ["run"]

NODES, DEGREE, WIDTH, CLASSES = 1_000_000, 12, 1024, 16  # rows as wide as IGB's
LIMIT = 640_000_000
MEMORY = "100MB"  # of the window, out of that
BATCH, FAN_OUTS = 128, (10, 5)
CHUNK_ROWS = 1 << 14


def run(*, is_quick: bool) -> Iterator[Figure]:
    """Seconds, pages and peak memory of the limited run; whether its weights are those of the unlimited one."""
    size, steps = NODES * WIDTH * 4, 8 if is_quick else 64
    with tempfile.TemporaryDirectory(
        prefix="polyhop-limited-", dir=os.environ.get("POLYHOP_BENCH_DIR")
    ) as name:
        folder = Path(name)
        reason = why_not(folder, size)
        if reason:
            print(f"  limited: skipped: {reason}", flush=True)
            return
        _write(folder / "parts")
        ours = _measure("disk", folder, steps)
        free = _measure("mapped", folder, steps)
    counts = ours["counts"]
    what = (
        f"{size / 1e9:.2f} GB of features, limit {LIMIT / 1e6:.0f} MB: {steps} steps of {BATCH} seeds, fan-out "
        f"{','.join(map(str, FAN_OUTS))}, --macro auto --memory {MEMORY}, no evaluation; {counts['num_rows']:,} rows by "
        f"{counts['num_reads']:,} reads of {counts['pages_read']:,} pages"
    )
    yield Figure("limited_features", size / LIMIT, "x", "bytes of features over the memory limit", at_least=6)
    yield Figure("limited_epoch_s", ours["seconds"], "s", what)
    yield Figure(
        "limited_peak_mb", ours["peak"] / 1e6, "MB", "of the process and its page cache, as the cgroup counts"
    )
    is_same = ours["weights"] == free["weights"]
    details = f"weights against a run without a limit, features mapped ({free['seconds']:.3g} s): 1 = equal to the bit"
    yield Figure("limited_same_weights", float(is_same), "", details, at_least=1)


def _write(path: Path) -> None:
    """One part; its edges by a power law, its feature rows written in pieces."""
    import torch

    from polyhop.graph import DenseFeatures, Graph, Split
    from polyhop.partition import partition, save_parts
    from polyhop.partition.files import ArrayFile

    rng = torch.Generator().manual_seed(0)
    rank = (NODES * torch.rand(NODES * DEGREE, generator=rng, dtype=torch.float64) ** 3).long()
    sources = (rank * 2_654_435_761 % NODES).view(NODES, DEGREE).sort(1).values.reshape(-1).int()
    nothing = torch.zeros(0, dtype=torch.int64)
    graph = Graph(
        torch.arange(0, NODES * DEGREE + 1, DEGREE), sources, DenseFeatures(torch.zeros(NODES, 1)),
        torch.randint(CLASSES, (NODES,), generator=rng),
        Split(torch.randperm(NODES, generator=rng).sort().values, nothing, nothing),
        num_classes=CLASSES, name="limited",
    )  # fmt: skip
    save_parts(graph, partition(graph, 1, "block"), path)
    with ArrayFile(path / "part-00000" / "x.npy", torch.float32, (NODES, WIDTH)) as file:
        for start in range(0, NODES, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, NODES - start)
            file.write(
                torch.randint(1 << 30, (rows, WIDTH), generator=rng, dtype=torch.int32).view(torch.float32)
            )
        entry = file.entry()
    about = json.loads((path / "manifest.json").read_text())
    about["num_features"], about["files"]["part-00000/x.npy"] = WIDTH, entry
    (path / "manifest.json").write_text(json.dumps(about))


def _measure(store: str, folder: Path, steps: int) -> dict[str, Any]:
    answer = folder / f"{store}.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.macro.limited",
        store,
        str(folder / "parts"),
        str(steps),
        str(answer),
    ]
    with limited(LIMIT) if store == "disk" else nullcontext() as group:
        entered = None if group is None else enter(group)
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=entered)
    if done.returncode != 0:
        raise RuntimeError(f"the run with features {store} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(answer.read_text())
    print(f"    {store}: {found}", flush=True)
    return found


def _train(store: str, parts: str, steps: str, answer: str) -> None:
    import torch

    from polyhop import nn
    from polyhop.comm import Collective, run_in_threads
    from polyhop.partition import open_parts
    from polyhop.trainer import Trainer

    def fit(line: Collective) -> None:
        share = open_parts(parts).share(0, 1, features=store)
        assert share.split is not None
        few = share.split.train[:: max(1, share.split.train.numel() // (BATCH * int(steps)))][
            : BATCH * int(steps)
        ]
        object.__setattr__(share.split, "train", few)
        torch.manual_seed(0)
        model = nn.GraphSAGE(WIDTH, 32, num_layers=len(FAN_OUTS), out_channels=CLASSES)
        trainer = Trainer(
            "macro", max_epochs=1, num_neighbors=FAN_OUTS, batch_size=BATCH, memory=MEMORY, feature_store=store,
            progress="none", seed=1,
        )  # fmt: skip
        began = time.perf_counter()
        trainer.fit(model, share, line=line)
        taken = time.perf_counter() - began
        digest = hashlib.blake2b(digest_size=8)
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        counts = getattr(share.x, "counts", None)
        found = {"seconds": taken, "peak": peak_bytes(), "weights": digest.hexdigest()}
        Path(answer).write_text(json.dumps(found | {"counts": None if counts is None else asdict(counts)}))

    run_in_threads(1, fit)


if __name__ == "__main__":
    _train(*sys.argv[1:])
