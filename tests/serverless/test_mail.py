"""Records at the post's counter: those of functions are values; those with arrays are only themselves."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("msgspec")

from polyhop.serverless.mail import Came, Done, Left, Work
from polyhop.serverless.wire import TaskKey


def test_news_are_values() -> None:
    assert Came("f") == Came("f") != Came("g")
    assert Left("f", False, "idle") == Left("f", False, "idle") != Left("f", True, "idle")
    assert len({Came("f"), Came("f"), Left("f", True, "")}) == 2


def test_what_holds_arrays_can_be_compared() -> None:
    """Values of arrays have no truth: two equal results would be an error."""
    key, arrays = TaskKey(0, 0, 0, 0, False), {"y": np.ones(3)}
    one, other = Done(key, arrays, {}), Done(key, arrays, {})
    assert one == one
    assert one != other


def test_the_version_is_asked_for_late() -> None:
    class Ticket:
        asked = 0

        def __int__(self) -> int:
            self.asked += 1
            return 3

    ticket = Ticket()
    work = Work(ticket, {}, lambda: ({}, {}))
    assert ticket.asked == 0
    assert int(work.version) == 3


def test_launchers_can_have_it_without_sockets() -> None:
    said = "import sys, polyhop.serverless.mail; print('zmq' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", said], text=True).split() == ["False", "False"]
