"""Run folder → tables, plots, a page, traces for other viewers. Reads files only: it never imports the trainer, and the
trainer never imports it."""

from polyhop.report.chrome import write_chrome_trace
from polyhop.report.explain import Explainer
from polyhop.report.figure import save_figure
from polyhop.report.history import METRICS_FILE, History, read_history
from polyhop.report.page import page
from polyhop.report.serve import Server
from polyhop.report.tensorboard import write_tensorboard
from polyhop.report.terminal import plain, show
from polyhop.report.text import bars, curve
from polyhop.report.whole_file import whole_file

__all__ = [
    "METRICS_FILE",
    "Explainer",
    "History",
    "Server",
    "bars",
    "curve",
    "page",
    "plain",
    "read_history",
    "save_figure",
    "show",
    "whole_file",
    "write_chrome_trace",
    "write_tensorboard",
]
