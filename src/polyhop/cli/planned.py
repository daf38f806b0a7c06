"""``polyhop train --plan FILE``: a plan is obeyed by the run that it was made for, and by no other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.cli.recipe import MODELS, Recipe
from polyhop.errors import ConfigError, unknown

if TYPE_CHECKING:
    from polyhop.graph import Graph, SharedGraph
    from polyhop.plan import Plan, Purpose

__all__ = ["Planned", "planned"]

# Where functions run and what they cost, links of these hosts: no plan says it.
_OF_THE_PLACE = {"link_costs", "prices", "server_kind"}
_OF_THE_PLACE |= {
    f"function_{each}" for each in ("command", "endpoint", "host", "launcher", "memory", "name", "region")
}


@dataclass(frozen=True)
class Planned:
    """What a plan gives to a run."""

    path: Path
    settings: dict[str, Any]  # of the trainer
    partitioner: str | None  # None: whatever makes the parts
    purpose: Purpose | None
    plan: Plan

    def check_graph(self, graph: Graph | SharedGraph) -> None:
        """ConfigError unless it is the graph of the plan."""
        if self.purpose is not None:
            theirs = (self.purpose.graph, self.purpose.num_nodes, self.purpose.num_edges)
            own = (graph.name, graph.num_nodes, graph.num_edges)
            if theirs != own:
                raise ConfigError(
                    f"{self.path} is a plan for {_graph(*theirs)}, and this is {_graph(*own)}: make one for it"
                )


def planned(
    path: Path,
    recipe: Recipe,
    options: Mapping[str, Any],
    num_ranks: int,
    given: Collection[str],
    partitioner: str,
) -> Planned:
    """Read; ConfigError if it is for other ranks, of another strategy or model, or if options ``given`` contradict it."""
    from polyhop.partition import METHODS
    from polyhop.plan import read_plan
    from polyhop.planner import settings_of

    found = read_plan(path)
    try:
        settings = settings_of(found)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    asked, chosen = options["strategy"], found.chosen.strategy
    if "strategy" in given and asked not in ("auto", chosen):
        raise ConfigError(f"--strategy {asked}, and {path} is a plan for {chosen}: give one of them")
    if found.num_ranks != num_ranks:
        raise ConfigError(
            f"{path} is a plan for {found.num_ranks} ranks: give --workers {found.num_ranks}, or make one for as many"
        )
    if found.purpose is not None:
        _check_purpose(path, found.purpose, recipe, options)
    _check_given(path, settings, options, given)
    if found.partitioner is not None and found.partitioner not in METHODS:
        raise ConfigError(f"{path}: a plan with {unknown('partitioner', found.partitioner, METHODS)}")
    if found.partitioner is not None and partitioner not in ("auto", found.partitioner):
        raise ConfigError(
            f"--partitioner {partitioner}, and {path} is a plan with parts by {found.partitioner}: leave --partitioner out, "
            "or make another plan"
        )
    return Planned(path, settings, found.partitioner, found.purpose, found)


def _check_purpose(path: Path, purpose: Purpose, recipe: Recipe, options: Mapping[str, Any]) -> None:
    fan_outs = options["num_neighbors"]
    names = {made: name for name, (made, _) in MODELS.items()}
    facts = [
        ("model", names.get(purpose.model, purpose.model), recipe.model),
        ("layers", purpose.num_layers, recipe.layers),
        ("hidden", purpose.hidden if purpose.hidden is not None else recipe.hidden, recipe.hidden),
        ("heads", purpose.heads, recipe.more.get("heads", 1) if purpose.heads is not None else None),
        ("fanout", _fan_outs(purpose.num_neighbors), _fan_outs(fan_outs)),
    ]
    if fan_outs is not None and purpose.num_neighbors is not None:
        facts.append(("batch-size", purpose.batch_size, options["batch_size"] or 1024))
    differing = [each for each in facts if each[1] != each[2]]
    if differing:
        theirs = " ".join(f"--{name} {value}" for name, value, _ in differing)
        own = " ".join(f"--{name} {value}" for name, _, value in differing)
        raise ConfigError(
            f"{path} is a plan for {theirs}, and this run has {own}: give what the plan is for, or make another"
        )


def _check_given(
    path: Path, settings: Mapping[str, Any], options: Mapping[str, Any], given: Collection[str]
) -> None:
    """The plan says how ranks train: what is given beside it must agree."""
    from polyhop.planner import FOR_ALL
    from polyhop.strategies import STRATEGIES
    from polyhop.train.config import Config, parse_bytes

    usual = {each.name: each.default for each in fields(Config)}
    of_strategies = {each.name for module in STRATEGIES.values() for each in fields(module.Config)}
    bound = (of_strategies | {"cache", "device_cache", "split_groups"}) - FOR_ALL - _OF_THE_PLACE
    for name in sorted(bound.intersection(given, options)):
        theirs, own = settings.get(name, usual[name]), options[name]
        is_same = own == theirs
        if name in ("cache", "device_cache") and theirs is not None:
            is_same = parse_bytes(own) == parse_bytes(theirs)
        if not is_same:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} {own}, and {path} is a plan with {option} {theirs}: leave --{option} out, or make another plan"
            )


def _fan_outs(given: Collection[int] | None) -> str:
    return "full" if given is None else ",".join(map(str, given))


def _graph(name: str, num_nodes: int, num_edges: int) -> str:
    return f"{name} ({num_nodes:,} nodes, {num_edges:,} edges)"
