"""A run folder becomes a document whose sections are what its lines add up to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyhop.errors import InputError
from polyhop.report.explain import Explainer
from polyhop.report.run import RunReader


def document(path: Path) -> dict[str, Any]:
    return RunReader(path).document()


def test_a_finished_run(make_run: Any) -> None:
    found = document(make_run())
    assert found["state"] == "finished"
    assert (found["about"]["graph"], found["about"]["model"], found["about"]["num_ranks"]) == (
        "tiny",
        "GCN",
        2,
    )
    assert found["numbers"]["epochs"] == 5
    assert found["numbers"]["epoch_s"] == pytest.approx(0.85)
    assert found["numbers"]["wait_share"] == pytest.approx(0.2 / 0.85)
    assert found["numbers"]["sent_bytes"] == pytest.approx(100 + 200 + 2 * 10)
    assert found["numbers"]["peak_bytes"] == 1010.0
    assert found["course"]["loss"] == [1 / e for e in range(1, 6)]
    assert found["notes"] == []
    for absent in ("bubbles", "bits", "functions", "partition", "prediction"):
        assert found[absent] is None


def test_phases(make_run: Any) -> None:
    phases = document(make_run())["phases"]
    assert phases["names"] == ["compute", "wait", "evaluate", "rest"]
    mains = [thread for thread in phases["threads"] if thread["is_main"]]
    assert [thread["rank"] for thread in mains] == [0, 1]
    assert mains[0]["seconds"] == pytest.approx({"compute": 0.6, "wait": 0.2, "evaluate": 0.15, "rest": 0.05})
    assert mains[0]["flight_s"] == pytest.approx({"communicate": 0.4})
    assert phases["over_epochs"]["wait"] == pytest.approx([0.2] * 5)
    assert phases["train_s"] == pytest.approx([0.85] * 5)


def test_traffic(make_run: Any) -> None:
    traffic = document(make_run())["traffic"]
    assert traffic["busiest"] == 1
    assert traffic["ranks"][1] == {
        "rank": 1,
        "training": {"hidden": 200.0, "gradients": 10.0},
        "evaluation": {"hidden": 7.0},
        "setup": {"hidden": 50.0},
    }
    assert traffic["layers"] == [{"layer": 1, "direction": "forward", "bytes": 300.0}]
    assert traffic["over_epochs"]["hidden"] == [314.0] * 5


def test_bubbles_of_a_pipeline(make_run: Any, made: SimpleNamespace) -> None:
    """Of 0.8 s, rank 0 computes chunks for 0.6 and rank 1 for 0.4; waiting inside a chunk is not computing."""
    run = make_run(strategy="pipeline")
    for rank, seconds in enumerate((0.3, 0.2)):
        lines = [made.start(rank), *made.marks(0, 0.0, 0, 0, 1)]
        for epoch in (1, 2):
            at = epoch - 1.0
            lines.append(made.span("wait", at + 0.1, 0.05, layer=1, direction="forward"))
            lines.append(made.span("forward", at, seconds + 0.05, chunk=0, layer=0))
            lines.append(made.span("backward", at + 0.4, seconds, chunk=0, layer=0))
            lines += [
                made.span("compute", at, 0.8, step=epoch - 1),
                *made.marks(epoch, float(epoch), 0, 0, 1),
            ]
        made.write(run / f"trace-rank{rank}.jsonl", lines)
    bubbles = document(run)["bubbles"]
    assert [rank["idle"] for rank in bubbles["ranks"]] == pytest.approx([0.25, 0.5])
    assert bubbles["ranks"][1]["over_epochs"] == pytest.approx([0.5, 0.5])
    assert bubbles["mean"] == pytest.approx(0.375)


def test_widths_of_all_ranks_together(make_run: Any, made: SimpleNamespace) -> None:
    run = make_run()
    for rank, rows in enumerate(({"bits2": 30, "bits8": 10}, {"bits2": 10})):
        chosen = {"kind": "counter", "name": "widths", "at": 2.5, "epoch": 3, "layer": 1, "backward": 1}
        made.write(run / f"trace-rank{rank}.jsonl", [*made.rank_lines(rank, 5), chosen | rows])
    bits = document(run)["bits"]
    assert bits == {
        "widths": [2, 8],
        "choices": [
            {"epoch": 3, "layer": 1, "direction": "backward", "rows": {2: 40.0, 8: 10.0}, "mean": 3.2}
        ],
    }


def test_functions_and_their_bill(make_run: Any, made: SimpleNamespace) -> None:
    run = make_run(strategy="serverless")
    told = [
        {
            "kind": "counter",
            "name": "crew",
            "at": at,
            "functions": n,
            "in_flight": 1,
            "waiting": 0,
            "again": 0,
            "dollars": n / 10,
        }
        for at, n in ((2.5, 3), (3.5, 4))
    ]
    decided = {"kind": "instant", "name": "functions", "at": 3.0, "wanted": 4, "had": 3, "why": "queues grow"}
    made.write(run / "trace-rank0.jsonl", [*made.rank_lines(0, 5), *told, decided])
    (run / "bill.json").write_text('{"dollars": 0.5, "is_local": true}')
    found = document(run)
    assert found["functions"]["ranks"][0]["functions"] == [3.0, 4.0]
    assert found["functions"]["ranks"][0]["at_s"] == [2.5, 3.5]
    assert found["functions"]["decided"] == [{"rank": 0, "at_s": 3.0, "wanted": 4, "why": "queues grow"}]
    assert found["numbers"]["dollars"] == 0.5


def test_a_run_that_still_trains_and_one_that_ended_early(make_run: Any) -> None:
    run = make_run(is_done=False)
    assert document(run)["state"] == "running"
    for path in run.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    assert document(run)["state"] == "ended early"


def test_a_result_of_before_the_run_was_continued_does_not_end_it(make_run: Any) -> None:
    run = make_run()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"epochs": 3}))
    assert document(run)["state"] == "running"


def test_what_is_missing_or_damaged_is_told(make_run: Any) -> None:
    run = make_run()
    (run / "trace-rank1.jsonl").unlink()
    (run / "config.json").write_text('{"num_ranks": 2')
    (run / "partition.json").write_text("[1]")
    with (run / "trace-rank0.jsonl").open("a") as file:
        file.write("not a line\n")
    (run / "metrics.jsonl").write_text('{"epoch": 1, "loss": NaN}\n{"epoch": 2, "loss": 0.5}\n{"epo')
    found = document(run)
    assert found["course"] == {"epoch": [1, 2], "loss": [None, 0.5]}
    notes = "\n".join(found["notes"])
    assert "config.json cannot be read" in notes
    assert "partition.json is no record" in notes
    assert "1 line is not readable" in notes
    json.dumps(found, allow_nan=False)


def test_ranks_whose_traces_are_elsewhere(make_run: Any) -> None:
    run = make_run(num_ranks=2)
    (run / "trace-rank1.jsonl").unlink()
    assert "traces of 1 of 2 ranks are here" in " ".join(document(run)["notes"])


def test_a_run_before_its_first_epoch(make_run: Any, made: SimpleNamespace) -> None:
    run = make_run(is_done=False)
    (run / "metrics.jsonl").unlink()
    for rank in range(2):
        made.write(run / f"trace-rank{rank}.jsonl", [made.start(rank), *made.marks(0, 1.0, 0, 0, 1)])
    found = document(run)
    assert found["lengths"] is None
    assert "no end of an epoch yet" in " ".join(found["notes"])
    assert found["timeline"] is None


def test_a_trace_that_became_shorter_is_read_anew(make_run: Any, made: SimpleNamespace) -> None:
    run = make_run(epochs=5)
    reader = RunReader(run)
    assert reader.document()["lengths"]["count"] == 5
    for rank in range(2):
        made.write(run / f"trace-rank{rank}.jsonl", made.rank_lines(rank, 2))
    reader.refresh()
    assert reader.document()["lengths"]["count"] == 2


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        RunReader(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="is not a run folder"):
        RunReader(tmp_path)


def test_a_long_course_is_thinned_but_keeps_its_best_and_last(make_run: Any) -> None:
    run = make_run(epochs=2)
    lines = [{"epoch": e, "loss": 1.0, "val": 0.9 if e == 3333 else 0.5} for e in range(1, 10_001)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    course = document(run)["course"]
    assert len(course["epoch"]) < 1600
    assert course["epoch"][-1] == 10_000
    assert max(course["val"]) == 0.9


def test_runs_compared(make_run: Any) -> None:
    runs = [make_run("a", lr=0.01), make_run("b", lr=0.02, graph="other")]
    found = Explainer(runs).document()
    differing = {row["name"]: row["values"] for row in found["comparison"]["options"]}
    assert differing == {"graph": ["tiny", "other"], "lr": [0.01, 0.02]}
    assert "different graphs (tiny, other)" in found["comparison"]["notes"][0]
    results = {row["name"]: row["values"] for row in found["comparison"]["results"]}
    assert results["epochs"] == [5, 5]


def test_names_that_tell_runs_apart(make_run: Any) -> None:
    runs = [make_run("x/run"), make_run("y/run")]
    assert [run["name"] for run in Explainer(runs).document()["runs"]] == ["x/run", "y/run"]
    twice = Explainer([runs[0], runs[0]]).document()["runs"]
    assert [run["name"][-4:] for run in twice] == [" (1)", " (2)"]
