"""TensorBoard's own reader finds the scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyhop.errors import InputError
from polyhop.report.run import RunReader
from polyhop.report.tensorboard import write_tensorboard

pytest.importorskip("tensorboard")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    (path,) = folder.glob("events.*")
    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
            found.setdefault(value.tag, []).append((event.step, number))
    return found


def written(run: Path, folder: Path) -> Path:
    reader = RunReader(run)
    return write_tensorboard(reader.document(), reader.tallies, folder)


@pytest.mark.filterwarnings("ignore")
def test_scalars_of_the_run_and_of_ranks(make_run: Any, tmp_path: Path) -> None:
    target = written(make_run(), tmp_path / "board")
    assert target == tmp_path / "board" / "run"
    run = scalars(target)
    assert [step for step, _ in run["loss"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in run["loss"]] == pytest.approx([1 / e for e in range(1, 6)])
    assert run["seconds/training"][0] == (1, pytest.approx(0.85))
    rank = scalars(target / "rank1")
    assert rank["bytes/hidden"] == [(e, 207.0) for e in range(1, 6)]
    assert rank["seconds/wait"][2] == (3, pytest.approx(0.2))
    assert rank["memory/peak"][4] == (5, 1010.0)


def test_events_that_are_there_are_not_mixed_with_others(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    written(run, tmp_path / "board")
    with pytest.raises(InputError, match="exists already"):
        written(run, tmp_path / "board")
    assert [path.name for path in (tmp_path / "board").iterdir()] == ["run"]
