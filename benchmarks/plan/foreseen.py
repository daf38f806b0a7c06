"""What the planner foresees of a published comparison: both of its systems as ways of ours, on the cluster of its set-up.

Systems that keep input rows on their GPUs in ways that ours do not (DGL with Quiver's cache, P3's columns) are foreseen by
the same formulas, and so is sampling on GPUs, by the time of an edge that the set-up has. Functions: ``foreseen_servers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plan import foreseen_servers
from benchmarks.plan.comparisons import Comparison
from polyhop.cluster_planner import question_of_cluster
from polyhop.forecast import GraphStatistics, Question, of_given
from polyhop.forecast.batches import of_variant
from polyhop.forecast.loads import Kept
from polyhop.forecast.statistics import Measured
from polyhop.graph import Block, Sizes
from polyhop.kernels.keys import Key
from polyhop.nn import GAT, GCN, GCNII, DeepGCN, GraphSAGE, SAGEConv
from polyhop.nn.counts import Counts, count_model
from polyhop.nn.model import State
from polyhop.nn.rows import Rows
from polyhop.plan import Cluster, Law, Prediction
from polyhop.plan.device import machine_of_device
from polyhop.planner import PlanOptions
from polyhop.strategies.work import Variant
from polyhop.train.config import Config

__all__ = ["foreseen", "predicted"]

# Data sheets: float32 Tflop/s, bytes and GB/s of memory.
_DEVICES: Mapping[str, Mapping[str, Any]] = {
    "A5000": {"gpu_tflops": 27.8, "gpu_memory_gb": 24, "gpu_memory_gb_s": 768},
    "A10G": {"gpu_tflops": 31.2, "gpu_memory_gb": 24, "gpu_memory_gb_s": 600},
    "V100-16GB": {"gpu_tflops": 15.7, "gpu_memory_gb": 16, "gpu_memory_gb_s": 900},
    "V100-32GB": {"gpu_tflops": 15.7, "gpu_memory_gb": 32, "gpu_memory_gb_s": 900},
}
# What kernels of the published systems reach of that, half of both, in place of what ours do: a summed value is read once.
_REACHED, _SUMMED_BYTES, _PASSED_BYTES, _NEAR = 0.5, 4.0, 12.0, 0.25
# Kernels of a layer, forward: products, the sum, its scale, bias, norm, activation, dropout, what is added. 0.1 ms for each,
# backward included: a layer of a chunk of Physics (GCN) takes some 0.4 ms in GNNPipe's logs.
_KERNELS = {"gcn": 4, "sage": 6, "gat": 8, "gcnii": 6, "resgcn": 8}
_KERNEL_S = 1e-4


def predicted(comparison: Comparison) -> float:
    """The ratio as foreseen."""
    if comparison.paper == "dorylus":
        return foreseen_servers.predicted(comparison)
    first, second = (foreseen(comparison, side) for side in (comparison.system, comparison.baseline))
    return second.epoch_s / first.epoch_s


def foreseen(comparison: Comparison, system: Mapping[str, Any]) -> Prediction:
    """Of one of the two."""
    cluster, ways = _cluster_of(comparison, system), ("strategy", "name")
    given = {name: value for name, value in system.items() if name not in ways}
    question = _question(comparison, system, cluster)
    if system["strategy"] == "pipeline":
        stages = {"all": cluster.num_ranks, "half": cluster.num_ranks // 2}.get(
            given["stages"], given["stages"]
        )
        chunks = given["chunks_per_device"] * cluster.num_ranks
        # Theirs divides layers by what they take there; ours counts them where a rank makes shared rows for itself.
        asked = {"stages": stages, "chunks": chunks, "layer_costs": "measured"}
        return of_given(question, "pipeline", asked)
    if system["strategy"] in ("halo", "macro"):
        return of_given(question, system["strategy"], given)
    depth = question.training.counts.num_layers if system["strategy"] == "split" else 0
    variant = Variant(system["strategy"], depth, given.get("cache") == "rows of others")
    uneven = comparison.graph.get("imbalance", 1.0) if system["strategy"] == "split" else 1.0
    return of_variant(question, variant, _kept(comparison, system), uneven)


def _kept(comparison: Comparison, system: Mapping[str, Any]) -> Kept:
    what = system.get("cache", "none")
    graph, cluster = comparison.graph, comparison.cluster
    if "cache_bytes" in cluster:  # devices that draw
        rooms = comparison.model.get("cache_bytes", {})
        room = 0.0 if what == "none" else rooms.get(graph["name"], cluster["cache_bytes"])
        return Kept(
            room,
            is_shared=what == "hottest rows of all devices",
            does_draw=True,
            peer_bytes_per_s=1e9 * cluster["peer_gb_s"],
            is_beside=system.get("loads_beside", False),
        )
    share = comparison.more.get("device_share", 0.0)
    return Kept(share * 4 * graph["num_features"] * graph["num_nodes"] / cluster["hosts"])


def _question(comparison: Comparison, system: Mapping[str, Any], cluster: Cluster) -> Question:
    more, ranks, given = comparison.more, cluster.num_ranks, dict[str, Any]()
    options = PlanOptions()
    if "fanout" in more:
        size = more.get("batch_size") or more["batch_size_per_rank"] * ranks
        given = {"num_neighbors": more["fanout"], "batch_size": size}
        if system.get("cache") == "rows of others":
            graph = comparison.graph
            rows = more["cached_share"] * graph["num_nodes"] / ranks
            given["cache"] = round(rows * (8 + 4 * graph["num_features"]))
    edge_s = system.get("edge_s", {}).get(comparison.graph["name"], comparison.cluster.get("edge_s"))
    if edge_s is not None:
        machine = replace(machine_of_device(cluster, ranks), node_s=0.0, edge_s=edge_s)
        options = PlanOptions(machine=machine)
    strategy = system["strategy"] if "fanout" in more else "auto"
    config = Config(strategy, **given)
    model, statistics = _model_of(comparison, system), _statistics_of(comparison)
    question = question_of_cluster(model, statistics, config, cluster, ranks, options)
    if "prefetch" in system:
        question = replace(question, training=replace(question.training, prefetch=system["prefetch"]))
    return replace(question, law=_law(comparison, cluster)) if cluster.gpus else question


def _law(comparison: Comparison, cluster: Cluster) -> Law:
    """Of the kernels that were published; sums of neighbours as fast as one device was measured to be on this graph."""
    read = _REACHED * 1e9 * cluster.gpu_memory_gb_s
    flop = 1 / (_REACHED * 1e12 * cluster.gpu_tflops)
    call = _KERNEL_S * _KERNELS[comparison.model["kind"]]
    rest = Law(0.0, 0.0, flop, _PASSED_BYTES / read, call, 1e6 * cluster.gpu_cache_mb)
    alone = comparison.graph.get("one_device")
    if alone is None:
        far = _SUMMED_BYTES / read
        return replace(rest, near_s=_NEAR * far, far_s=far)
    counts = _counts_alone(comparison, alone)
    value_s = (alone["seconds"] - rest.seconds(counts)) / counts.values
    return replace(rest, near_s=value_s, far_s=value_s)  # what of it the cache served is in the measurement


def _counts_alone(comparison: Comparison, alone: Mapping[str, Any]) -> Counts:
    """Of an epoch of the model that one device was timed with."""
    graph = comparison.graph
    columns, classes = graph["num_features"], graph["num_classes"]
    kind, hidden, layers = alone["kind"], alone["hidden"], alone["num_layers"]
    model = _model(kind, columns, hidden, layers, classes, 1, None, maps_first=False, projects=True)
    each = Sizes(graph["num_nodes"], graph["num_nodes"], graph["num_edges"])
    return count_model(model, columns).of([each] * layers)


def _statistics_of(comparison: Comparison) -> GraphStatistics:
    graph = comparison.graph
    sizes = {
        name: graph[name] for name in ("num_nodes", "num_edges", "num_features", "num_classes", "num_train")
    }
    bare = GraphStatistics(**sizes, name=graph["name"], exponent=graph.get("exponent"))
    halo = {int(parts): Measured(replicas) for parts, replicas in graph.get("halo", {}).items()}
    for parts, cut in graph.get(
        "cut_edges", {}
    ).items():  # rows follow, as if what crosses were spread at random
        share = cut * int(parts) / (int(parts) - 1)
        halo[int(parts)] = Measured(bare.expected_replicas(share, int(parts)), cut)
    if "halo_of_ways" in graph and comparison.system.get("stages") == "half":
        halo[2] = Measured(graph["halo_of_ways"])
    return replace(bare, halo=halo)


def _cluster_of(comparison: Comparison, system: Mapping[str, Any]) -> Cluster:
    given, devices = comparison.cluster, comparison.cluster["devices"]
    fields = ("inside_gb_s", "network_gbit_s", "inside_us", "network_us", "extends", "ranks")
    rates = {name: given[name] for name in fields if name in given}
    rates |= {name: comparison.graph[name] for name in fields if name in comparison.graph}  # measured there
    if system.get("stages") == "half":  # two ways of a stage are neighbours
        rates["inside_gb_s"] = given["pair_gb_s"]
    if given["device"] == "cpu":
        return Cluster.from_json({"hosts": given["hosts"], **rates})
    host = {
        "cores": 4 * devices,
        "memory_gb": 64 * devices,
        "cpu_tflops": 0.3 * devices,
        "cpu_memory_gb_s": 20 * devices,
    }
    return Cluster.from_json(
        {
            "hosts": given["hosts"],
            "gpus": devices,
            "network_gbit_s": 25,
            **host,
            **_DEVICES[given["device"]],
            **rates,
        }
    )


def _model_of(comparison: Comparison, system: Mapping[str, Any]) -> nn.Module:
    about = {**comparison.model, **comparison.more}
    return _model(
        about["kind"],
        comparison.graph["num_features"],
        about["hidden"],
        about["num_layers"],
        comparison.graph["num_classes"],
        about.get("heads", 1),
        about.get("norm"),
        maps_first=system.get("maps_first", False),
        projects=about.get("projects", False),
    )


@cache
def _model(
    kind: str,
    columns: int,
    hidden: int,
    layers: int,
    classes: int,
    heads: int,
    norm: str | None,
    *,
    maps_first: bool,
    projects: bool,
) -> nn.Module:
    """Sizes alone matter: weights are not drawn. ``maps_first``: layers map before they sum wherever that narrows rows;
    ``projects``: rows are mapped to the hidden width before the first layer, which therefore sums them anew each step."""
    sizes = (hidden if projects else columns, hidden, layers, classes)
    more = {"norm": norm, "norm_kwargs": {"mode": "node"}} if norm else {}
    with torch.device("meta"):
        if kind == "gat":
            made: nn.Module = GAT(*sizes, heads=heads)
        elif kind in ("gcn", "sage"):
            known = (
                {"gcn": _ProjectedGCN, "sage": _ProjectedSAGE}
                if projects
                else {"gcn": GCN, "sage": GraphSAGE}
            )
            made = known[kind](*sizes, **more)
            if projects:
                made.in_channels, made.projection = columns, nn.Linear(columns, hidden)
        else:
            made = {"gcnii": GCNII, "resgcn": DeepGCN}[kind](*sizes)
    made = made.to_empty(device="cpu")
    if maps_first and isinstance(made, GraphSAGE):
        made.convs = nn.ModuleList(_narrowing(conv) for conv in made.convs)
    return made


class _Projected:
    """Of rows that are mapped first."""

    begins_plain = False
    projection: nn.Linear

    def begin(self, x: Rows, *, ids: Tensor | None = None, key: Key | None = None) -> State:
        return {"h": self.projection(x)}


class _ProjectedGCN(_Projected, GCN):
    """Normalised sums."""


class _ProjectedSAGE(_Projected, GraphSAGE):
    """Means and own rows."""


def _narrowing(conv: nn.Module) -> nn.Module:
    conv.__class__ = _Narrowing
    return conv


class _Narrowing(SAGEConv):
    """Its order is that of DGL's: by widths alone."""

    def map_first(self, block: Block | Sizes, input_grad: bool) -> bool:
        return self.in_channels > self.out_channels
