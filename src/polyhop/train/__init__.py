"""The loop and what surrounds it: task, optimiser, evaluation, checkpoints, run folder, progress.

Modules here know only the few that the rest stands on; ``polyhop.trainer`` puts them together.
"""

from polyhop.train.config import Config, parse_bytes
from polyhop.train.state import Result, Session, State

__all__ = ["Config", "Result", "Session", "State", "parse_bytes"]
