"""Which graph operation a server runs next: old rows are read only where functions would otherwise have nothing to do."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from polyhop.serverless.server import Server, Settings

CHAIN = ["D0", "A1", "D1"]  # operation A1 runs at step 1 forward, at 4 backward
GATHERS, BACKWARD = 1, 4


def server(tags: dict[int, list[int]], *, wishes: bool, tasks: int = 3, staleness: int | None = 0) -> Any:
    """Four intervals; those in ``tags`` can gather in epoch 5, and read rows of these epochs."""
    made = object.__new__(Server)
    made.settings = Settings(seed=0, staleness=staleness)
    made.post = SimpleNamespace(has_wishes=wishes, ledger=range(tasks))  # type: ignore[assignment]
    made._chain = CHAIN  # type: ignore[assignment]
    made._states = {number: SimpleNamespace(epoch=5, kept={}) for number in tags}  # type: ignore[misc]
    made._tags = lambda number, place, is_backward: tags[number]  # type: ignore[method-assign]
    made._wave = lambda number: int(number >= 12)  # type: ignore[method-assign]
    made._ready, made._is_pressed = [], False
    for number in tags:
        made._can_run(number, GATHERS)
    return made


def test_while_functions_have_work_what_would_read_old_rows_waits() -> None:
    assert server({10: [5, 4], 11: [4, 4]}, wishes=False)._chosen() is None
    assert server({10: [5, 4], 11: [5, 5]}, wishes=False)._chosen() == (5, 0, GATHERS, 11)


@pytest.mark.parametrize(("wishes", "tasks"), [(True, 3), (False, 0)])
def test_where_functions_lack_work_it_does_not(wishes: bool, tasks: int) -> None:
    made = server({10: [5, 4], 11: [5, 5]}, wishes=wishes, tasks=tasks)
    assert made._chosen() == (5, 0, GATHERS, 10)


def test_a_server_without_time_to_spare_does_not_wait() -> None:
    made = server({10: [5, 4], 11: [5, 5]}, wishes=False)
    now = time.perf_counter()
    for busy_s, chosen in ((8.0, 10), (2.0, 11)):  # of ten seconds
        made._looked, made.graph_s = (now - 10.0, 1.0), 1.0 + busy_s
        made._look_back()
        assert made._chosen() == (5, 0, GATHERS, chosen)


def test_of_one_wave_before_the_other() -> None:
    """Gradients of the first half go before the second half gathers."""
    made = server({12: [5, 5]}, wishes=True)
    made._states[10] = SimpleNamespace(epoch=5, kept={})
    made._can_run(10, BACKWARD)
    assert made._chosen() == (5, 0, BACKWARD, 10)
    del made._wave
    made.settings = Settings(seed=0, staleness=None)
    assert made._wave(12) == 0  # pipe has no waves


def test_giving_gradients_back_reads_nothing_of_others() -> None:
    made = server({10: [4, 4]}, wishes=False)
    made._ready.clear()
    made._can_run(10, BACKWARD)
    assert made._chosen() == (5, 0, BACKWARD, 10)
    made._states[10].kept[1] = True  # it has: what is left is to collect, which waits for its readers
    assert made._chosen() is None
