"""Run folder → tables and plots. Reads files only: it never imports the trainer, and the trainer never imports it."""

from polyhop.report.figure import save_figure
from polyhop.report.history import METRICS_FILE, History, read_history
from polyhop.report.text import bars, curve

__all__ = ["METRICS_FILE", "History", "bars", "curve", "read_history", "save_figure"]
