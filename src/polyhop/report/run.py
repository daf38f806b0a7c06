"""One run, explained: its folder's files read into one document of plain values, again and again as they grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyhop.report.run_files import RunFiles, check_run, read_files, trace_files
from polyhop.report.sections import (
    about,
    bits,
    bubbles,
    clock_of,
    course,
    epoch_lengths,
    functions,
    memory,
    options,
    phases,
    prediction,
    timeline,
    traffic,
)
from polyhop.report.traces import RankTally

__all__ = ["RunReader"]


class RunReader:
    """Reads a run folder; ``refresh`` reads what is new, ``document`` explains what is known."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        check_run(path)
        self.path, self.name = path, name or path.resolve().name
        self._tallies: dict[int, RankTally] = {}
        self._files: RunFiles | None = None

    @property
    def tallies(self) -> list[RankTally]:
        """Of the ranks whose traces say anything, in rank order."""
        return [tally for tally in self._tallies.values() if tally.attempts]

    def refresh(self) -> None:
        """Read what was written since. A trace that became shorter is another run's: it is read from its start."""
        for rank, path in trace_files(self.path).items():
            known = self._tallies.get(rank)
            if known is None or path.stat().st_size < known.offset:
                known = self._tallies[rank] = RankTally(path, rank)
            known.read()
        self._tallies = dict(sorted(self._tallies.items()))
        self._files = read_files(self.path)

    def document(self, *, has_timeline: bool = True) -> dict[str, Any]:
        """Sections by name; one that has nothing to say is None."""
        if self._files is None:
            self.refresh()
        assert self._files is not None
        files, tallies = self._files, self.tallies
        clock = clock_of(tallies)
        bill = files.found.get("bill") or (files.get("result").get("summary") or {}).get("bill")
        found: dict[str, Any] = {
            "name": self.name,
            "path": str(self.path),
            "state": files.state,
            "about": about(files, tallies),
            "result": files.found.get("result"),
            "options": options(files),
            "course": course(files),
            "lengths": epoch_lengths(tallies),
            "phases": phases(tallies) if tallies else None,
            "traffic": traffic(tallies) if tallies else None,
            "bubbles": bubbles(tallies),
            "bits": bits(tallies),
            "functions": functions(tallies, clock, bill),
            "memory": memory(tallies),
            "partition": files.found.get("partition"),
        }
        found["prediction"] = prediction(files.found.get("plan"), found)
        found["numbers"] = _numbers(found)
        found["notes"] = [*files.notes, *self._notes(tallies, found)]
        if has_timeline:
            found["timeline"] = timeline(tallies, clock) if tallies else None
        return found

    def _notes(self, tallies: list[RankTally], found: dict[str, Any]) -> list[str]:
        notes = []
        num_broken = sum(tally.num_broken for tally in self._tallies.values())
        if num_broken:
            lines = "1 line is" if num_broken == 1 else f"{num_broken:,} lines are"
            notes.append(f"{lines} not readable in the traces: written while the process was killed?")
        if not tallies:
            notes.append("no trace: nothing is known of where the seconds went")
        elif found["lengths"] is None:
            notes.append(
                "the trace has no end of an epoch yet: seconds and bytes per epoch come with the first"
            )
        ranks = found["about"]["num_ranks"] or 0
        if tallies and ranks > len(tallies):
            notes.append(
                f"traces of {len(tallies)} of {ranks} ranks are here; those of other hosts can be copied into the folder"
            )
        return notes


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    """The few that sum a run up."""
    result, lengths, epochs = found["result"] or {}, found["lengths"] or {}, found["course"]["epoch"]
    best = [value for value in found["course"].get("val", []) if value is not None]
    threads = (found["phases"] or {}).get("threads", [])
    mains = [entry["seconds"] for entry in threads if entry["is_main"]]
    sent = found["traffic"] or {}
    seconds = found["course"].get("seconds") or [None]
    return {
        "test": result.get("test"),
        "best_val": result.get("best_val", max(best, default=None)),
        "best_epoch": result.get("best_epoch"),
        "epochs": epochs[-1] if epochs else None,
        "seconds": seconds[-1],
        "epoch_s": lengths.get("train_s"),
        "wait_share": _wait_share(mains),
        "sent_bytes": sum(sum(entry["training"].values()) for entry in sent["ranks"]) if sent else None,
        "peak_bytes": (found["memory"] or {}).get("peak"),
        "dollars": ((found["functions"] or {}).get("bill") or {}).get("dollars"),
    }


def _wait_share(mains: list[dict[str, float]]) -> float | None:
    """Of training alone, mean over ranks."""
    train = [sum(s for name, s in own.items() if name not in ("evaluate", "checkpoint")) for own in mains]
    shares = [own.get("wait", 0.0) / whole for own, whole in zip(mains, train, strict=True) if whole > 0]
    return sum(shares) / len(shares) if shares else None
