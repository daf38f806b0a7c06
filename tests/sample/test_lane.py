"""How far threads that work ahead may be ahead of a device. The device is not there: its events are told when to be over."""

from __future__ import annotations

import torch

from polyhop.sample.lane import Lane


class Event:
    def __init__(self, waited: list[int], number: int) -> None:
        self.waited, self.number = waited, number

    def synchronize(self) -> None:
        self.waited.append(self.number)


def test_the_oldest_results_are_waited_for() -> None:
    lane, waited = Lane(torch.device("cpu"), ahead=3), list[int]()
    for number in range(6):
        lane.keep_step()
        lane._handed.append(Event(waited, number))  # type: ignore[arg-type]
        assert len(lane._handed) <= 4
    assert waited == [0, 1]


def test_nothing_is_kept_where_there_are_no_streams() -> None:
    lane = Lane(torch.device("cpu"))
    lane.follow()
    lane.reads(torch.ones(2))
    with lane.work():
        mark = lane.mark()
    lane.hand_over(mark, [torch.ones(2)])
    lane.keep_step()
    assert not lane._handed
