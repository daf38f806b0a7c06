"""What each strategy would take, before it runs: one file for each kind of training, all answering the same question."""

from __future__ import annotations

from collections.abc import Iterator

from polyhop.forecast import batches, servers, stages, whole
from polyhop.forecast.alike import alike_sight
from polyhop.forecast.given import check_foreseen, of_given
from polyhop.forecast.question import Question
from polyhop.forecast.sight import Sight, labelled, look, look_at
from polyhop.forecast.statistics import (
    GraphStatistics,
    Measured,
    Seen,
    read_statistics,
    write_statistics,
)
from polyhop.forecast.training import Inputs, Training
from polyhop.plan import Prediction

__all__ = [
    "GraphStatistics",
    "Inputs",
    "Measured",
    "Question",
    "Seen",
    "Sight",
    "Training",
    "alike_sight",
    "check_foreseen",
    "labelled",
    "look",
    "look_at",
    "of_given",
    "predictions",
    "read_statistics",
    "write_statistics",
]


def predictions(question: Question) -> Iterator[Prediction]:
    """Of every strategy that can train so on so many ranks."""
    if question.training.num_neighbors is not None:
        yield from batches.predictions(question)
    elif question.num_ranks == 1:
        yield whole.single_prediction(question)
    else:
        yield from whole.halo_predictions(question)
        yield from stages.predictions(question)
        yield from servers.predictions(question)
