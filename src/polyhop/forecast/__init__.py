"""What each strategy would take, before it runs: one file for each kind of training, all answering the same question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyhop.errors import ConfigError
from polyhop.forecast import batches, servers, stages, whole
from polyhop.forecast.alike import alike_sight
from polyhop.forecast.computed import statistics_of_virtual
from polyhop.forecast.given import check_foreseen
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
    "statistics_of_virtual",
    "write_statistics",
]

_CHUNKS_PER_RANK = 4  # of ``pipeline``, unless they are given
_HALOS = ("exact", "stale")


def predictions(question: Question) -> Iterator[Prediction]:
    """Of every strategy that can train so on so many ranks."""
    _check(question.training)
    if question.training.num_neighbors is not None:
        yield from batches.predictions(question)
    elif question.num_ranks == 1:
        yield whole.single_prediction(question)
    else:
        yield from whole.halo_predictions(question)
        yield from stages.predictions(question)
        yield from servers.predictions(question)


def _check(training: Training) -> None:
    """ConfigError where a graph that is computed when read is to be trained on as one that is stored."""
    if training.inputs.are_computed and training.num_neighbors is None:
        raise ConfigError(
            "a graph that is computed when it is read has no lists of edges for training on the full graph: draw "
            "mini-batches, one fan-out for each layer, such as --fanout 15,10"
        )
    if training.inputs.are_computed and training.cache_bytes:
        raise ConfigError(
            "cache: a graph that is computed when it is read has no stored edges to tell hot rows by; leave cache out"
        )


# A strategy that is given


def of_given(question: Question, strategy: str, given: Mapping[str, Any]) -> Prediction:
    """``given``: options of the strategy that are not left as they are. ConfigError where such a run is not foreseen."""
    check_foreseen(strategy, given)
    _check(question.training)
    found = next(_ways(question, strategy, given), None)
    if found is None:
        raise ConfigError(
            f"strategy {strategy!r} is not foreseen for this model on {question.num_ranks} ranks"
        )
    return found


def _ways(question: Question, strategy: str, given: Mapping[str, Any]) -> Iterator[Prediction]:
    if question.training.num_neighbors is not None:
        yield from _of_batches(question, strategy, given)
    elif strategy == "single":
        yield whole.single_prediction(question)
    elif strategy == "halo" and question.sight.layers and given.get("halo", "exact") in _HALOS:
        yield whole.halo_prediction(question, given)
    elif strategy == "pipeline":
        yield from _of_stages(question, given)
    elif strategy == "serverless":
        functions = given.get("functions", 2)
        sizes = [] if functions == "auto" else [functions, given.get("intervals", 16)]
        yield from servers.predictions(question, *sizes)


def _of_batches(question: Question, strategy: str, given: Mapping[str, Any]) -> Iterator[Prediction]:
    if strategy == "macro" and given.get("macro", "auto") != "auto":
        yield batches.of_windows(question, given["macro"])
        return
    found = [each for each in batches.predictions(question) if each.strategy == strategy]
    depth = given.get("split_depth")
    if strategy == "split" and depth != "auto":
        wanted = question.training.counts.num_layers if depth is None else depth
        found = [each for each in found if each.options["split_depth"] == wanted]
    if (
        strategy == "data"
    ):  # with the cache that is given, or with none; ``split`` uses one where that is faster
        found = [each for each in found if ("cache" in each.options) == ("cache" in given)]
    yield from sorted(found, key=lambda each: each.epoch_s)


def _of_stages(question: Question, given: Mapping[str, Any]) -> Iterator[Prediction]:
    num_stages = given.get("stages") or question.num_ranks
    num_chunks = given.get("chunks") or _CHUNKS_PER_RANK * question.num_ranks
    found = stages.of_layout(question, num_stages, num_chunks, given.get("layer_costs", "auto"))
    if found is not None:
        yield found
