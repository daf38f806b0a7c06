"""``polyhop plan --cluster``: plans for hosts that need not be there, and how training would scale on more of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyhop.cli import console
from polyhop.cli.recipe import Recipe
from polyhop.errors import ConfigError

if TYPE_CHECKING:
    from polyhop.forecast import GraphStatistics
    from polyhop.plan import Cluster, Limits, Link, Machine, Plan
    from polyhop.plan.curve import Curve
    from polyhop.train.config import Config

__all__ = ["Asked", "known_cluster", "plan_computed", "plan_for", "show_curves", "statistics_of"]

_PARTS = (2, 4, 8, 16)  # that a graph is cut into to see what they read of one another


@dataclass(frozen=True)
class Asked:
    """Which cluster and graph, in files; None: not given."""

    cluster: str | None = None
    statistics: Path | None = None
    statistics_out: Path | None = None
    curve: Path | None = None

    def check(self, name: str | None) -> None:
        """ConfigError where they do not go together."""
        if name is None and self.statistics is None:
            raise ConfigError("a plan needs a graph: give its name, or --statistics FILE with --cluster")
        if name is not None and self.statistics is not None:
            raise ConfigError(
                f"{name!r} and --statistics {self.statistics} both say what the graph is: leave one out"
            )
        if self.cluster is None and (self.statistics is not None or self.curve is not None):
            given = "--statistics" if self.statistics is not None else "--curve"
            raise ConfigError(
                f"{given} is for clusters: add --cluster FILE or a preset, such as --cluster p4d.24xlarge"
            )
        if self.statistics is not None and self.statistics_out is not None:
            raise ConfigError(
                f"--statistics-out: {self.statistics} has them already; leave one of the two out"
            )
        from polyhop.plan.files import check_writable

        if self.statistics_out is not None:
            check_writable(self.statistics_out, "--statistics-out")
        if self.curve is not None:
            from polyhop.plan.picture import check_name

            check_name(self.curve)
            check_writable(self.curve, "--curve")


def known_cluster(name: str, workers: int | None) -> tuple[Cluster, int]:
    """And so many of its ranks, all of them where no number is given."""
    from polyhop.plan import read_cluster

    cluster = read_cluster(name)
    ranks = workers or cluster.num_ranks
    if ranks > cluster.num_ranks:
        raise ConfigError(
            f"--workers {ranks}: the cluster has {cluster.num_ranks} ranks, {cluster.ranks_per_host} on each of its "
            f"{cluster.hosts} hosts; give fewer, or hosts: {cluster.hosts_of(ranks)}"
        )
    return cluster, ranks


def statistics_of(
    asked: Asked, recipe: Recipe, config: Config, partitioner: str
) -> tuple[GraphStatistics, Recipe]:
    """Read, or of a graph that is loaded without its features; and the recipe with its widths."""
    from polyhop.cli.ranks import check_procedural
    from polyhop.forecast import read_statistics, write_statistics

    if asked.statistics is not None:
        found = read_statistics(asked.statistics)
        return found, recipe.of_widths(found.num_features, found.num_classes, found.name)
    check_procedural(recipe, None, partitioner)
    found, recipe = _computed(recipe) or _surveyed(recipe, config, partitioner)
    if asked.statistics_out is not None:
        write_statistics(found, asked.statistics_out)
        console.say(f"statistics written to {asked.statistics_out}")
    return found, recipe


def _computed(recipe: Recipe) -> tuple[GraphStatistics, Recipe] | None:
    """Of a graph that nobody stores; None: of another one."""
    from polyhop.datasets import is_procedural, procedural_recipe
    from polyhop.forecast import statistics_of_virtual

    if not is_procedural(recipe.source):
        return None
    graph, num_train = procedural_recipe(recipe.source)
    found = statistics_of_virtual(graph, num_train, recipe.source)
    return found, recipe.of_widths(graph.num_features, graph.num_classes, recipe.source)


def plan_computed(
    recipe: Recipe, workers: int, config: Config, limits: Limits, machine: Machine | None, link: Link | None
) -> Plan | None:
    """On hosts like this one; None: the graph is stored, or made as a whole."""
    from polyhop.cluster_planner import plan_virtual
    from polyhop.datasets import procedural_recipe
    from polyhop.planner import PlanOptions

    known = _computed(recipe)
    if known is None:
        return None
    (statistics, recipe), (graph, _) = known, procedural_recipe(recipe.source)
    options = PlanOptions(limits, machine, link, console.say)
    return plan_virtual(recipe.build(0), graph, statistics, config, workers, options)


def _surveyed(recipe: Recipe, config: Config, partitioner: str) -> tuple[GraphStatistics, Recipe]:
    from polyhop.datasets import load_unread
    from polyhop.forecast import labelled
    from polyhop.forecast.survey import survey
    from polyhop.partition import default_method, partition
    from polyhop.planner import training_of, unread_inputs

    graph, about = load_unread(
        recipe.source, data_dir=recipe.data_dir, nodes=recipe.nodes, split=recipe.split
    )
    recipe, inputs = recipe.of_widths(about.num_features, about.num_classes, about.name), unread_inputs(about)
    training = training_of(recipe.build(0), graph, config, inputs, labelled(graph).numel())
    method = default_method() if partitioner == "auto" else partitioner
    parts = {each: partition(graph, each, method) for each in (1, *_PARTS) if each <= graph.num_nodes}
    return survey(graph, inputs, parts, training, partitioner=method, tell=console.say), recipe


def plan_for(
    asked: Asked,
    there: tuple[Cluster, int],
    statistics: GraphStatistics,
    recipe: Recipe,
    config: Config,
    limits: Limits,
    link: Link | None,
) -> tuple[Plan, list[Curve]]:
    """And curves; ``there``: the cluster, and how many of its ranks."""
    from polyhop.cluster_planner import plan_cluster, scale_cluster, with_law
    from polyhop.plan.picture import draw_curves
    from polyhop.planner import PlanOptions

    cluster, ranks = there
    model = recipe.build(0)
    options = PlanOptions(limits, link=link, tell=console.say)
    options = with_law(model, statistics, config, cluster, options)
    made = plan_cluster(model, statistics, config, cluster, ranks, options)
    curves = scale_cluster(model, statistics, config, cluster, options, made.chosen)
    if asked.curve is not None:
        draw_curves(curves, f"{statistics.name} on {cluster.name or 'the cluster'}, as foreseen", asked.curve)
    return made, curves


def show_curves(curves: list[Curve], asked: Asked) -> None:
    """One table for each, the chosen one first."""
    from polyhop.plan import duration, money

    for curve in curves:
        print(f"\n{curve.label}")
        rows: list[tuple[Any, ...]] = [("devices", "an epoch", "speed-up", "efficiency", "dollars", "")]
        for point in curve.points:
            dollars = "-" if point.dollars is None else money(point.dollars)
            note = point.name if point.fits else f"{point.name}; does not fit"
            speed, share = f"{point.speed_up:.2f}", f"{100 * point.efficiency:.0f} %"
            rows.append((f"{point.num_ranks:,}", duration(point.seconds), speed, share, dollars, note))
        widths = [max(len(row[at]) for row in rows) for at in range(5)]
        for row in rows:
            print(("  " + "  ".join([*(row[at].rjust(widths[at]) for at in range(5)), row[5]])).rstrip())
    if asked.curve is not None:
        print(f"\npicture written to {asked.curve}")
