"""What a run will take whose strategy and options are given: nothing is left to choose.

Options that set a way apart and that forecasts know of are listed here; a run that sets another one is not foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyhop.errors import ConfigError
from polyhop.forecast import batches, servers, stages, whole
from polyhop.forecast.question import Question
from polyhop.plan import Prediction

__all__ = ["FORESEEN", "check_foreseen", "of_given"]

FORESEEN: Mapping[str, frozenset[str]] = {
    "single": frozenset(),
    "data": frozenset({"cache"}),
    "macro": frozenset({"cache", "macro"}),
    "split": frozenset({"cache", "split_depth"}),
    "pushpull": frozenset(),
    "halo": frozenset({"bits", "halo", "halo_sums", "naive_halo", "overlap", "recompute"}),
    "pipeline": frozenset({"stages", "chunks"}),
    "serverless": frozenset({"functions", "intervals"}),
}
_CHUNKS_PER_RANK = 4  # of ``pipeline``, unless they are given
_HALOS = ("exact", "stale")


def check_foreseen(strategy: str, given: Mapping[str, Any]) -> None:
    """ConfigError where an option is set that no forecast knows of."""
    unknown = sorted(set(given) - FORESEEN[strategy])
    if unknown:
        raise ConfigError(f"strategy {strategy!r} is not foreseen with {', '.join(unknown)}")


def of_given(question: Question, strategy: str, given: Mapping[str, Any]) -> Prediction:
    """``given``: options of the strategy that are not left as they are. ConfigError where such a run is not foreseen."""
    check_foreseen(strategy, given)
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
    ):  # with the cache that is given, or with none; ``split`` uses it where that is faster
        found = [each for each in found if ("cache" in each.options) == ("cache" in given)]
    yield from sorted(found, key=lambda each: each.epoch_s)


def _of_stages(question: Question, given: Mapping[str, Any]) -> Iterator[Prediction]:
    num_stages = given.get("stages") or question.num_ranks
    num_chunks = given.get("chunks") or _CHUNKS_PER_RANK * question.num_ranks
    found = stages.of_layout(question, num_stages, num_chunks)
    if found is not None:
        yield found
