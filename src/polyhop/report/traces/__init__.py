"""Trace files, read once and line by line, into sums and shares of time whose size does not grow with the run."""

from polyhop.report.traces.clock import Clock
from polyhop.report.traces.closeup import Closeup, choose_epochs, read_closeup
from polyhop.report.traces.tally import RankTally

__all__ = ["Clock", "Closeup", "RankTally", "choose_epochs", "read_closeup"]
