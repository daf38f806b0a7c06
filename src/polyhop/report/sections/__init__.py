"""Sections of a report: each file makes one of them, plain values, from what the traces and the small files say."""

from polyhop.report.sections.about import about, course, options
from polyhop.report.sections.bits import bits
from polyhop.report.sections.bubbles import bubbles
from polyhop.report.sections.compare import compare
from polyhop.report.sections.functions import functions
from polyhop.report.sections.memory import memory
from polyhop.report.sections.phases import epoch_lengths, phases
from polyhop.report.sections.prediction import prediction
from polyhop.report.sections.timeline import clock_of, timeline
from polyhop.report.sections.traffic import traffic

__all__ = [
    "about",
    "bits",
    "bubbles",
    "clock_of",
    "compare",
    "course",
    "epoch_lengths",
    "functions",
    "memory",
    "options",
    "phases",
    "prediction",
    "timeline",
    "traffic",
]
