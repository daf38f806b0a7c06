"""One run of section ``memory``: trains one way in processes of its own, and notes what every rank had resident at most.

Run as ``python -m benchmarks.plan.memory_rank JOB`` (a file). The system keeps the most that a process had resident (VmHWM)
and forgets it when told to, so phases can be told apart:

    start       process, imports, the line to the others; the graph, who owns what, the own part
    training    from there to the end of the last epoch but one
    run         from there to the end: another epoch, and evaluation after it

Freed memory is kept for later steps and never fits them quite, so that what is resident grows over the first steps: runs on
the full graph, whose epochs are steps, have several.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.plan.cases import SEED, Case
from polyhop import launch

__all__ = ["MemoryJob", "arguments", "measure", "num_epochs"]

_FULL_EPOCHS, _EPOCHS = 8, 2
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_PEAK = "5"  # what clear_refs takes for "forget the most"


@dataclass(frozen=True)
class MemoryJob:
    """One way to train one case."""

    case: Case
    answer: str  # folder
    num_ranks: int
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> MemoryJob:
        return cls(**{**given, "case": Case(**given["case"])})


def arguments(job_file: Path) -> list[str]:
    """The command that starts all ranks of a run."""
    return [sys.executable, "-m", "benchmarks.plan.memory_rank", str(job_file)]


def num_epochs(case: Case) -> int:
    """Of a run."""
    return _FULL_EPOCHS if case.fan_outs is None else _EPOCHS


def measure(context: launch.RankContext | None, job_file: str) -> None:
    """Write what this rank had resident to ANSWER/rank-<k>.json."""
    from polyhop.cli.ranks import share_of
    from polyhop.graph import Graph, SharedGraph
    from polyhop.partition import Partition, default_method, partition

    job = MemoryJob.from_json(json.loads(Path(job_file).read_text()))
    line = None if context is None else context.comm
    found = {"process": resident("VmRSS")}

    def cut(graph: Graph) -> Partition:
        return partition(graph, job.num_ranks, default_method(), seed=SEED)

    held: Graph | SharedGraph
    if line is None:
        held = job.case.recipe().load()
    else:
        held = share_of(line, job.case.recipe(), None, cut, num_parts=job.num_ranks)
    found["start"] = resident("VmHWM")
    found["held"] = resident("VmRSS")
    forget_peak()
    _train(job, held, line, lambda name: found.update({name: resident("VmHWM")}))
    rank = 0 if line is None else line.rank
    (Path(job.answer) / f"rank-{rank}.json").write_text(json.dumps(found))


def _train(job: MemoryJob, held: Any, line: Any, note: Callable[[str], None]) -> None:
    from polyhop.trainer import Trainer

    case = job.case
    size = None if case.fan_outs is None else case.batch_size

    epochs = num_epochs(case)

    def on_epoch(record: dict[str, Any]) -> None:
        if record["epoch"] == epochs - 1:
            note("training")

    trainer = Trainer(
        job.strategy, num_neighbors=case.fan_outs, batch_size=size, seed=SEED, max_epochs=epochs, eval_every=epochs,
        progress="none", callbacks=[on_epoch], **job.options,
    )  # fmt: skip
    trainer.fit(case.built(held), held, line=line)
    note("run")


def resident(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since it was last forgotten."""
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def forget_peak() -> None:
    """From here on, the most is of what follows."""
    _CLEAR.write_text(_PEAK)


def main(job_file: str) -> None:
    """All ranks of the run; one process alone where there is one."""
    from benchmarks.plan.memory_rank import measure as found_by_name

    ranks = MemoryJob.from_json(json.loads(Path(job_file).read_text())).num_ranks
    if ranks == 1:
        import torch

        torch.set_num_threads(1)
        found_by_name(None, job_file)
    else:
        asked = launch.Launch(num_ranks=ranks, threads=1, pin=False, peer_timeout_s=300.0)
        launch.run(found_by_name, (job_file,), asked)


if __name__ == "__main__":
    main(sys.argv[1])
