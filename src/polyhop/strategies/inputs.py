"""Aggregated inputs: what a first layer sums of its inputs, summed once over all neighbours and stored with every node.

    without   L hops are drawn; rows x of the innermost frontier; layer 0 sums them
    with      L - 1 hops are drawn; rows [x | z] of the frontier before it; layer 0 is dense. z = sum over all neighbours

Training is then what fan-out -1 in the innermost hop would give: that hop is exact, its fan-out is not used. A strategy
asks ``aggregated_inputs`` once; it samples and fetches by ``graph`` and ``num_neighbors`` of what comes back, and puts
``first`` between loading and the model. Evaluation stays as it is: on the graph itself.

Sums over a partitioned graph are made by all ranks together, every remote row fetched once, and are kept in the folder of
parts where there is one; sums of a graph in one process are kept in memory, or in a file where its features are in one and
``spill_dir`` is given.

Legend: N nodes, n own nodes, L layers, F features, W columns of a stored row: 2 F, or F where the layer reads the sum alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from polyhop.comm import Collective
from polyhop.errors import ConfigError, UnsupportedError
from polyhop.exchange.aggregate import MEMORY_BYTES, PartRows, filled, rows_in_file, stored_rows
from polyhop.graph import (
    Block,
    DenseFeatures,
    DiskFeatures,
    FeatureStore,
    Graph,
    Part,
    SharedGraph,
    SparseFeatures,
)
from polyhop.graph.aggregated import AggregatedRows, FixedAggregate
from polyhop.graph.fingerprint import digest, row_ids
from polyhop.nn.model import Model
from polyhop.nn.rows import Rows, gathered
from polyhop.partition import open_parts
from polyhop.partition.kept import KeptRows, made_from
from polyhop.sample import full_block

__all__ = ["AggregatedInputs", "aggregated_inputs", "summed_once"]


@dataclass(frozen=True, eq=False)
class AggregatedInputs:
    """What a strategy trains on in place of the graph and the fan-outs it was given."""

    graph: Graph | SharedGraph  # the same, with stored rows [., W] as its features
    num_neighbors: tuple[int, ...]  # L - 1, from the seeds outward
    aggregate: FixedAggregate
    unused: int  # the innermost fan-out

    def first(self, x: Rows, blocks: Sequence[Block]) -> tuple[AggregatedRows, tuple[Block, ...]]:
        """(inputs, L blocks) for the model, of stored rows (or a pool of them) and the L - 1 blocks that were drawn."""
        rows, below = gathered(x, blocks[0])
        assert isinstance(rows, Tensor), "stored rows are dense"
        return self.aggregate.split(rows), (_without_edges(below), below, *blocks[1:])

    @property
    def note(self) -> str:
        """What a run's first lines say of it."""
        return (
            f"first layer from stored sums over all neighbours ({self.aggregate.name}, rows of {self._width:,} columns): "
            f"hops drawn {', '.join(map(str, self.num_neighbors))}; the innermost fan-out {self.unused} is not used"
        )

    @property
    def _width(self) -> int:
        return self.graph.num_features


def _without_edges(below: Block) -> Block:
    """The first layer's block: as many destinations as sources, which are the next block's sources."""
    return Block(
        torch.zeros(below.num_src + 1, dtype=torch.int64, device=below.device),
        below.indices[:0],
        below.num_src,
        src_ids=below.src_ids,
        in_degree=below.in_degree,
    )


def summed_once(model: nn.Module, x: Rows, block: Block) -> tuple[Rows | AggregatedRows, Block]:
    """(inputs, first block) of a model that reads the same block, with all in-edges, in every step: the first layer's sums
    of x's rows where no parameter changes them, and a block without edges; x and the block as they are where there are none.
    """
    if not isinstance(model, Model) or not isinstance(x, Tensor) or block.rows is not None:
        return x, block
    try:
        aggregate = model.fixed_aggregate()
    except UnsupportedError:
        return x, block
    with torch.no_grad():
        z = aggregate.apply(block, x)
        start = block.dst_start
        own = x[start : start + block.num_dst].clone() if aggregate.has_own else None  # lets go of the others
    return AggregatedRows(z, own), _destinations(block)


def _destinations(block: Block) -> Block:
    """The block's destinations alone, as sources and destinations, without edges."""
    own = slice(block.dst_start, block.dst_start + block.num_dst)
    return Block(
        torch.zeros(block.num_dst + 1, dtype=torch.int64, device=block.device),
        block.indices[:0],
        block.num_dst,
        src_ids=None if block.src_ids is None else block.src_ids[own],
        in_degree=None if block.in_degree is None else block.in_degree[own],
    )


def aggregated_inputs(
    model: nn.Module,
    graph: Graph | SharedGraph,
    num_neighbors: Sequence[int],
    dtype: torch.dtype,
    *,
    line: Collective | None = None,
    feature_dtype: str = "auto",
    memory_bytes: int = MEMORY_BYTES,
    spill_dir: str | Path | None = None,
) -> AggregatedInputs:
    """The inputs of a model that trains on a graph, or on this rank's share of one: then all ranks call it together.

    ``num_neighbors`` has one fan-out per layer. ``dtype`` (float32 or float64) is that of sums and stored rows.
    UnsupportedError says why the model or the graph cannot be trained so.
    """
    aggregate, x = _checked(model, graph, num_neighbors, feature_dtype)
    *kept, unused = num_neighbors
    wide: Graph | SharedGraph
    if isinstance(graph, Graph):
        spill = None if spill_dir is None or not getattr(x, "is_mapped", True) else Path(spill_dir)
        wide = replace(graph, x=_of_graph(graph, x, aggregate, dtype, memory_bytes, spill))
    else:
        assert line is not None, "a share of a graph comes with a line to the other ranks"
        rows = _of_part(graph, x, aggregate, dtype, line, memory_bytes)
        facts = replace(graph.facts, num_features=rows.num_features)
        wide = replace(graph, part=replace(graph.stored("aggregate_inputs"), x=rows), facts=facts)
    return AggregatedInputs(wide, tuple(kept), aggregate, unused)


def _checked(
    model: nn.Module, graph: Graph | SharedGraph, num_neighbors: Sequence[int], feature_dtype: str
) -> tuple[FixedAggregate, FeatureStore]:
    """The first layer's sum and the features, or an error that says why there can be none."""
    name = type(model).__name__
    if not isinstance(model, Model):
        raise UnsupportedError(
            f"{name}: aggregated inputs are not possible: it is no model of polyhop.nn, so nothing says what its first "
            "layer sums; build it from polyhop.nn (GraphSAGE, GCN, GIN, Stack)"
        )
    aggregate, x = model.fixed_aggregate(), graph.x
    if len(num_neighbors) < 2:
        raise UnsupportedError(
            f"{name}: aggregated inputs take the place of the innermost hop, and a model of one layer has no other"
        )
    if x is None:
        raise ConfigError("the graph has no features: give x [N, F] (for instance degrees or a one-hot id)")
    edges = graph.edge_weight if isinstance(graph, Graph) else graph.part.edge_weight
    parts = [getattr(x, "values", None), getattr(x, "scale", None), edges]
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        raise UnsupportedError(
            f"graph {graph.name!r}: aggregated inputs are not possible: its features or edge weights are learnable, so the "
            "sums change at every step"
        )
    if isinstance(x, SparseFeatures):
        raise UnsupportedError(
            f"graph {graph.name!r}: aggregated inputs are not possible: its features are sparse, and sums over neighbours "
            f"would be dense rows of {x.num_features:,} columns; give dense features"
        )
    if feature_dtype == "int8" and aggregate.has_own and aggregate.name == "sum":
        raise UnsupportedError(
            f"{name}: aggregated inputs do not go with feature_dtype='int8': a row and the sum of its neighbours would "
            "share one scale, and the sum leaves nothing of the row; use 'bfloat16' or 'auto'"
        )
    return aggregate, x


def _of_graph(
    graph: Graph,
    x: FeatureStore,
    aggregate: FixedAggregate,
    dtype: torch.dtype,
    memory_bytes: int,
    spill_dir: Path | None,
) -> DenseFeatures:
    def gather(ids: Tensor) -> Tensor:
        rows = x.gather(ids)
        assert isinstance(rows, Tensor), "sparse features are refused before"
        return rows.to(dtype)

    out = rows_in_file((graph.num_nodes, aggregate.width(x.num_features)), dtype, spill_dir)
    pieces = stored_rows(
        full_block(graph), gather, aggregate, x.num_features, dtype, memory_bytes=memory_bytes
    )
    return DenseFeatures(filled(out, pieces), is_mapped=spill_dir is not None)


def _of_part(
    graph: SharedGraph,
    x: FeatureStore,
    aggregate: FixedAggregate,
    dtype: torch.dtype,
    line: Collective,
    memory_bytes: int,
) -> FeatureStore:
    """This rank's stored rows: opened where all of its parts have them, else summed (and kept)."""
    part, width = graph.stored("aggregate_inputs"), aggregate.width(x.num_features)
    kept, cuts, first = None, [0, part.num_nodes], 0
    if graph.folder is not None:
        kept, cuts, first = _kept(graph, x, aggregate, dtype, line)
    found = [None if kept is None else kept.open(first + i) for i in range(len(cuts) - 1)]
    is_missing = torch.tensor([any(rows is None for rows in found)], dtype=torch.int64)
    if bool(line.all_reduce(is_missing, kind="sizes")):
        needs = bool(is_missing)
        sources = PartRows(
            part, graph.num_nodes, line, dtype, needs=needs, memory_bytes=memory_bytes, scratch=graph.folder
        )
        for i, rows in enumerate(found):
            if rows is not None:
                continue
            pieces = stored_rows(
                part.block(), sources.gather, aggregate, x.num_features, dtype,
                start=cuts[i], stop=cuts[i + 1], memory_bytes=memory_bytes,
            )  # fmt: skip
            if kept is None:
                found[i] = filled(torch.empty(part.num_nodes, width, dtype=dtype), pieces)
            else:
                found[i] = kept.write(first + i, dtype, (cuts[i + 1] - cuts[i], width), pieces)
    files = [None if kept is None else kept.file(first + i) for i in range(len(found))]
    return _like(x, [rows for rows in found if rows is not None], files)


def _like(x: FeatureStore, rows: list[Tensor], files: list[Path | None]) -> FeatureStore:
    """Stored rows of a rank's parts as one store, kept as its features are: read from disk, mapped, or in memory."""
    if files[0] is None:
        return DenseFeatures(rows[0])
    if isinstance(x, DiskFeatures):
        return DiskFeatures.joined([DiskFeatures(file) for file in files if file is not None])
    if len(rows) > 1:
        return DenseFeatures(torch.cat(rows))
    is_mapped = isinstance(x, DenseFeatures) and x.is_mapped
    return DenseFeatures(rows[0] if is_mapped else rows[0].clone(), None, is_mapped, files[0])


def _kept(
    graph: SharedGraph, x: FeatureStore, aggregate: FixedAggregate, dtype: torch.dtype, line: Collective
) -> tuple[KeptRows, list[int], int]:
    """Where stored rows are kept: (rows by part, bounds of this rank's parts among its own nodes, the first of them)."""
    assert graph.folder is not None
    folder, part = open_parts(graph.folder), graph.stored("aggregate_inputs")
    each = folder.num_parts // line.num_ranks
    first = line.rank * each
    cuts = (folder.bounds[first : first + each + 1] - part.start).tolist()
    seen = b"".join(_seen(part, x, start, stop) for start, stop in pairwise(cuts))
    own = torch.frombuffer(bytearray(seen), dtype=torch.uint8)
    everyone = line.all_gather(own, kind="sizes", counts=[len(seen)] * line.num_ranks)
    contents = bytes(torch.cat(everyone).tolist()).hex()
    kind = str(dtype).removeprefix("torch.")
    name = f"aggregate-{aggregate.name}-{kind}"
    return KeptRows(folder.path, name, made_from(folder.about, name, contents)), cuts, first


def _seen(part: Part, x: FeatureStore, start: int, stop: int) -> bytes:
    """8 bytes by which some of the rows and edge weights of nodes are recognised: they may be others than the folder's."""
    rows, weight = x.gather(row_ids(stop - start) + start), part.edge_weight
    assert isinstance(rows, Tensor), "sparse features are refused before"
    if weight is not None:
        weight = weight[int(part.indptr[start]) : int(part.indptr[stop])]
    return hashlib.blake2b(digest(rows, weight).encode(), digest_size=8).digest()
