"""What a rank holds, from sizes: its part, mini-batches on their way, what is kept for the backward pass, evaluation.

    part        lists of edges, facts of own and halo nodes, input rows, labels
    step        a mini-batch in hand and those loaded ahead: rows and blocks; what autograd keeps; weights, gradients, Adam
    evaluation  two tables of rows of a layer over the own nodes, and a piece of the edges

Loading is not counted apart: a rank that loads the whole graph to cut its part out lets go of it before it trains.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyhop.forecast.question import Question
from polyhop.forecast.sight import Cut

__all__ = ["evaluation_bytes", "part_bytes", "stage_bytes", "step_bytes", "weight_bytes", "whole_bytes"]

_FACT_BYTES = 8 + 4 + 4 + 8  # of a source: the user's id, two degrees, place in the halo
_KEPT = 2.5  # values that autograd keeps for each value of a layer's rows: inputs, sums, masks


def part_bytes(question: Question) -> float:
    """Of the largest part."""
    training, parts = question.training, question.num_ranks
    nodes, edges = training.num_nodes / parts, training.num_edges / parts
    structure = 4 * edges + 8 * nodes + _FACT_BYTES * (nodes + min(edges, training.num_nodes - nodes) * 0.3)
    return structure + nodes * question.training.inputs.row_bytes + 16 * nodes


def weight_bytes(question: Question) -> float:
    """Parameters, gradients, what Adam keeps, messages of gradients."""
    return 5.0 * question.training.num_parameters * question.training.value_bytes


def step_bytes(
    question: Question, rows: Sequence[float], edges: Sequence[float], loaded_bytes: float
) -> float:
    """``rows`` [L + 1], ``edges`` [L]: of a mini-batch after each hop, seeds first."""
    layers = question.training.counts.layers
    inputs = rows[-1] * question.training.inputs.num_features * question.training.value_bytes
    blocks = 4 * sum(edges) + 20 * sum(rows)
    kept = sum(
        rows[len(layers) - 1 - at] * layer.out_columns + rows[len(layers) - at] * layer.mapped_columns
        for at, layer in enumerate(layers)
    )
    ahead = 1 + question.training.prefetch
    return ahead * (inputs + blocks) + _KEPT * question.training.value_bytes * kept + weight_bytes(question)


def whole_bytes(question: Question, cut: Cut | None = None, *, recompute: bool = False) -> float:
    """Of training on the full graph, or on the largest part of it."""
    training, layers = question.training, question.training.counts.layers
    nodes, edges, halo = float(training.num_nodes), float(training.num_edges), 0.0
    if cut is not None:
        rank = int(cut.nodes.argmax())
        nodes, edges, halo = float(cut.nodes[rank]), float(cut.edges[rank]), float(cut.halo[:, rank].sum())
    each = [nodes * layer.out_columns + (nodes + halo) * layer.mapped_columns for layer in layers]
    kept = max(each) + nodes * sum(layer.in_columns for layer in layers[1:]) if recompute else sum(each)
    structure = edges * 16 + (nodes + halo) * 40
    inputs = (nodes + halo) * question.training.inputs.row_bytes + nodes * question.training.inputs.row_bytes
    return structure + inputs + _KEPT * question.training.value_bytes * kept + weight_bytes(question)


def stage_bytes(question: Question, num_stages: int, num_ways: int, *, has_history: bool) -> float:
    """Of a stage of ``pipeline``: edges of all chunks of its way, tables and gradients of its layers' rows, what is kept."""
    training, layers = question.training, question.training.counts.layers
    nodes, edges = training.num_nodes / num_ways, training.num_edges / num_ways
    columns = sum(layer.in_columns for layer in layers[1:]) / num_stages
    kept = sum(layer.out_columns + layer.mapped_columns for layer in layers) / num_stages
    tables = nodes * columns * (2 + has_history)
    inputs = nodes * question.training.inputs.row_bytes
    values = question.training.value_bytes * (tables + _KEPT * nodes * kept)
    return edges * 16 + nodes * 60 + inputs + values + weight_bytes(question)


def evaluation_bytes(question: Question) -> float:
    training, parts = question.training, question.num_ranks
    layers = question.training.counts.layers
    widest = max(max(layer.mapped_columns, layer.out_columns) for layer in layers)
    tables = 2 * training.num_nodes / parts * widest * question.training.value_bytes
    return part_bytes(question) + tables + weight_bytes(question)
