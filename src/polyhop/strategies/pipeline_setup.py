"""What a pipeline settles before its first epoch, all ranks alike: what can be spread, the chunk of each node, what layers
cost, who shares a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from polyhop.comm import Collective, GroupLine
from polyhop.errors import UnsupportedError
from polyhop.graph import Block, SharedGraph, SparseFeatures
from polyhop.nn.model import Model
from polyhop.nn.rows import Rows
from polyhop.strategies.pipeline_chunks import Chunks, choose_chunks
from polyhop.strategies.pipeline_pieces import Pieces
from polyhop.strategies.pipeline_profile import cut_matters, is_measured, measured_costs
from polyhop.strategies.pipeline_schedule import Layout
from polyhop.strategies.pipeline_ways import Ways, check_chunks, check_counts, choose_ways
from polyhop.strategies.step import Placement

__all__ = ["checked_model", "layer_costs", "line_of_stage", "note", "num_sweeps", "shared_owner"]


def checked_model(model: nn.Module) -> Model:
    """The model, if its layers can be run apart, on some rows at a time."""
    name = type(model).__name__
    if not isinstance(model, Model) or type(model).forward is not Model.forward:
        raise UnsupportedError(
            f"{name} is not made of begin, layer and finish alone, so its layers cannot be spread over ranks: build it from "
            "polyhop.nn (GCN, GCNII, DeepGCN, ..., or Stack for your own layers)"
        )
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UnsupportedError(
                f"{name} has BatchNorm, which needs the statistics of all rows at once, and a stage sees one chunk at a "
                "time: use norm='layer' with norm_kwargs={'mode': 'node'}, or strategy 'halo', which shares statistics"
            )
    return model


def num_sweeps(wish: int | str, model: nn.Module, period: int, has_past_gradients: bool) -> int:
    """Forward passes before an epoch. By itself one where units are dropped: rows of the epoch before were computed with
    others dropped below them, which takes most of what history is off; and none where history is wished to be old.
    """
    if wish != "auto":
        return int(wish)
    drops = any(_drop_rate(module) > 0 for module in model.modules())
    return int(drops and period == 1 and not has_past_gradients)


def _drop_rate(module: nn.Module) -> float:
    """Share of units that a module drops in training."""
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", None)
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def shared_owner(
    block: Block, wanted: int, layout: Layout, seed: int, line: Collective
) -> tuple[Tensor, list[int]]:
    """(the chunk of each node, chunks of each way); rank 0 chooses. All ranks call it together."""
    num_ways = layout.num_ways
    check_chunks(wanted, layout)
    chosen = torch.zeros(block.num_dst + num_ways, dtype=torch.int32)
    if line.rank == 0 and num_ways == 1:
        owner = choose_chunks(block, wanted, seed)
        chosen = torch.cat([owner, owner.max()[None] + 1])
    elif line.rank == 0:
        owner, counts = choose_ways(block, wanted, num_ways, seed)
        chosen = torch.cat([owner, torch.tensor(counts, dtype=torch.int32)])
    chosen = line.broadcast(chosen.to(line.device), kind="ids").cpu()
    owner, counts = chosen[: block.num_dst], chosen[block.num_dst :].tolist()
    check_counts(counts, block.num_dst)
    return owner, counts


def layer_costs(
    wish: str,
    model: Model,
    pieces: Pieces,
    graph: SharedGraph,
    chunks: Chunks,
    bits: int,
    layout: Layout,
    placement: Placement,
    line: Collective,
) -> list[float]:
    """By which stages are balanced; where they are measured, rank 0 does it. All ranks call it together."""
    num_set = _num_set(graph, line)
    counted = pieces.costs(graph.num_features, graph.num_nodes, graph.num_edges, num_set)
    is_wished = is_measured(wish, counted, len(chunks), cut_matters=cut_matters(pieces, bits))
    if not is_wished or layout.num_stages == 1:
        return counted
    found = torch.zeros(len(counted), dtype=torch.float64)
    if line.rank == 0:
        costs = measured_costs(model, pieces, partial(_like_inputs, graph), chunks, placement)
        found = torch.tensor(costs, dtype=torch.float64)
    return line.broadcast(found.to(line.device), kind="sizes").tolist()


def _num_set(graph: SharedGraph, line: Collective) -> float | None:
    """Values in an input row of rank 0, where rows are kept sparse. All ranks call it together."""
    if not isinstance(graph.part.x, SparseFeatures):
        return None
    rows = graph.part.x.rows
    own = torch.tensor([rows.values.numel() / max(rows.shape[0], 1)], dtype=torch.float64)
    return float(line.broadcast(own.to(line.device), kind="sizes"))


def _like_inputs(graph: SharedGraph, num_rows: int) -> Rows:
    """Input rows of this rank, over again where it has fewer."""
    x = graph.part.x
    if x is None or x.num_rows == 0:
        drawn = torch.Generator().manual_seed(0)
        return torch.randn(num_rows, graph.num_features, generator=drawn)
    return x.gather(torch.arange(num_rows) % x.num_rows)


def line_of_stage(layout: Layout, line: Collective) -> Collective:
    """The line to the ways of this rank's stage. All ranks call it together."""
    near = GroupLine(line, layout.team(layout.stage(line.rank)))
    return near if layout.num_ways == 1 else near.fork()


def note(chunks: Chunks, ways: Ways, bounds: Sequence[int], is_exact: bool) -> str:
    """What a run's first lines say of it."""
    stages = ", ".join(str(stop - start) for start, stop in pairwise(bounds))
    text = (
        f"stages of {stages} layers, {len(chunks)} chunks of {min(chunks.sizes)} to {max(chunks.sizes)} nodes"
    )
    if len(ways) > 1:
        share = int(ways.num_read.sum()) / max(chunks.num_nodes, 1)
        text += f" in {len(ways)} ways that exchange {share:.2f} rows a node and layer"
    if is_exact:
        return f"{text}; no history is read"
    reads = int(chunks.reads().sum()) / max(sum(chunk.num_rows for chunk in chunks.chunks), 1)
    return f"{text} that read {reads:.2f} rows of others a node, about half of them history"
