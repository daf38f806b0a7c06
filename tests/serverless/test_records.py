"""Records: what is read is exactly what was written, in any pieces and after any kill."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from polyhop.errors import InputError
from polyhop.serverless.bill import FunctionTrace, ServerTrace, Trace, bill
from polyhop.serverless.prices import load_prices
from polyhop.serverless.records import Key, Records, from_line, read_records, record_file, to_line, traces_of


def drawn(seed: int, session: int = 1) -> dict[Key, Trace]:
    """A server and some functions, at times of any length of fraction."""
    rng = random.Random(seed)
    found: dict[Key, Trace] = {
        (session, "server0"): ServerTrace("c5n.2xlarge", 1.7e12, 1.7e12 + rng.random() * 1e6)
    }
    for number in range(20):
        start = 1.7e12 + rng.random() * 1e5
        end = start + rng.random() * 1e5
        found[session, f"server0-{number}"] = FunctionTrace(
            start, end, rng.random() * 1e3, 192, rng.random() * (end - start) * 0.9, num_tasks=number
        )
    return found


def test_a_line_gives_back_what_it_was_made_of() -> None:
    for key, trace in drawn(0).items():
        assert from_line(to_line(key, trace)) == (key, trace)


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '{"kind": "egress", "session": 1, "name": "x"}',
                                  '{"kind": "function", "session": 1, "name": "x", "start_ms": 2}'])  # fmt: skip
def test_what_is_no_record_is_named(text: str) -> None:
    with pytest.raises(InputError, match="no record of a server or a function"):
        from_line(text)


def test_newer_lines_replace_older_ones_and_sessions_add_up(tmp_path: Path) -> None:
    first, second = drawn(1), drawn(2, session=2)
    early = dict(list(first.items())[:5])
    early[1, "server0"] = ServerTrace("c5n.2xlarge", 1.7e12, 1.7e12 + 10)  # a note while it ran
    file = Records(record_file(tmp_path, 0))
    file.add(early)
    file.add(first)
    file.add(first)  # nothing new: nothing is written
    assert len(record_file(tmp_path, 0).read_text().splitlines()) == 1 + len(first)
    Records(record_file(tmp_path, 0)).add(second)
    Records(record_file(tmp_path, 1)).add(drawn(3))
    assert read_records(record_file(tmp_path, 0)) == first | second
    expected = [*first.values(), *second.values(), *drawn(3).values()]
    assert bill(traces_of(tmp_path), load_prices()) == bill(expected, load_prices())


def test_a_line_that_a_kill_cut_short_costs_only_itself(tmp_path: Path) -> None:
    path, made = record_file(tmp_path, 0), drawn(4)
    Records(path).add(made)
    path.write_bytes(path.read_bytes()[:-30])
    Records(path).add(drawn(5, session=2))
    *_, last = made
    assert read_records(path) == {k: v for k, v in made.items() if k != last} | drawn(5, session=2)


def test_a_disk_that_refuses_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    records = Records(record_file(tmp_path / "file", 0))
    with pytest.warns(RuntimeWarning, match="records of functions stopped"):
        records.add(drawn(6))
    records.add(drawn(7))
