"""What the interfaces counted beside what the ranks say they have sent: rows for the table and for JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.lab.network import Network

__all__ = ["compare", "print_table"]

JUDGED_BYTES = 10_000_000  # below this, start-up and acknowledgements are too large a share
AGREES_WITHIN = 0.06


def _counted(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank left in rank-<rank>.json, as columns of its row; empty when it left nothing."""
    path = folder / f"rank-{rank}.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        total, messages = sum(said["bytes"].values()), sum(said["messages"].values())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = '{"rank": k, "bytes": {kind: n}, "messages": {kind: n}}'
        print(f"lab: {path.name} is not {expected}: {error!r}", file=sys.stderr)
        return {}
    return {
        "counted_bytes": total,
        "counted_messages": messages,
        "bytes": said["bytes"],
        "messages": said["messages"],
    }


def compare(
    network: Network, before: list[tuple[int, int]], codes: list[int | None] | None
) -> list[dict[str, Any]]:
    """A row per host: bytes since ``before``; with exit ``codes`` (of the first hosts' ranks) also the rank's own count."""
    rows = []
    for k, (start, now) in enumerate(zip(before, network.counters())):
        row: dict[str, Any] = {"rank": k, "address": network.addresses[k]}
        row |= {"sent_bytes": now[0] - start[0], "received_bytes": now[1] - start[1]}
        if codes is not None and k < len(codes):
            row |= {"exit_code": codes[k], "ratio": None, "agrees": None} | _counted(network.folder, k)
            if total := row.get("counted_bytes"):
                row["ratio"] = row["sent_bytes"] / total
                row["agrees"] = abs(row["ratio"] - 1) <= AGREES_WITHIN if total >= JUDGED_BYTES else None
        rows.append(row)
    return rows


def _verdict(row: dict[str, Any]) -> str:
    if "counted_bytes" not in row:
        return "the rank counted nothing"
    return {True: "yes", False: "NO", None: "too little to judge (< 10 MB)"}[row["agrees"]]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Interface bytes per host; where there are ranks, their exit codes ("ended": by the lab) and counts beside them."""
    has_ranks = "exit_code" in rows[0]
    title = f"host  {'address':<15}{'received':>14}{'sent':>14}"
    print(
        title
        + (f"{'counted':>14}{'messages':>10}{'ratio':>8}{'exit':>7}  agrees within 6 %" if has_ranks else "")
    )
    for row in rows:
        text = f"{row['rank']:>4}  {row['address']:<15}"
        text += f"{row['received_bytes'] / 1e6:>11.3f} MB{row['sent_bytes'] / 1e6:>11.3f} MB"
        if "exit_code" in row:
            counted, messages, ratio = row.get("counted_bytes"), row.get("counted_messages"), row["ratio"]
            text += f"{'-':>14}" if counted is None else f"{counted / 1e6:>11.3f} MB"
            text += f"{'-':>10}" if messages is None else f"{messages:>10,}"
            text += f"{'-':>8}" if ratio is None else f"{ratio:>8.4f}"
            text += f"{'ended' if row['exit_code'] is None else row['exit_code']:>7}  {_verdict(row)}"
        print(text)
