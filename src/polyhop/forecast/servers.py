"""A forecast of ``serverless`` with functions on the ranks' own hosts: graph work on servers, dense pieces on functions that
share the cores. What functions of a cloud would be worth is another question (``polyhop plan --strategy serverless``).

Rows of every dense piece go to a function and back, forward and backward, sealed and opened on the way (B bytes):

    cores    c * (graph + B seal_s)   of a server, and what functions compute and seal, on the same cores
    epoch    all of it over the cores, and a round of messages for each layer, forward and backward

Legend: L layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from polyhop.forecast.memory import servers_memory
from polyhop.forecast.question import Question
from polyhop.graph import Sizes
from polyhop.nn import GAT, GCN, GraphSAGE
from polyhop.nn.counts import Counts
from polyhop.plan import Prediction

__all__ = ["predictions"]

# Measured with functions of one host (docs/serverless.md): 1.29 GB/s of tensors leave and come back at a server that does
# nothing else, 0.21 ms a task without content. numpy multiplies as fast as torch does; activations take longer.
_SEAL_S = 0.8e-9  # of a byte, at each end
_TASK_S = 0.4e-3  # of a task, both ends
_INTERVALS, _FUNCTIONS = 16, 2


def predictions(
    question: Question, num_functions: int = _FUNCTIONS, num_intervals: int = _INTERVALS
) -> Iterator[Prediction]:
    """Exact, in the order of layers; none for models that functions have no pieces of."""
    if type(question.training.model) not in (GCN, GraphSAGE, GAT):
        return
    training, cut = question.training, question.sight.cut
    rank = int(cut.edges.argmax())
    nodes, edges = round(float(cut.nodes[rank])), round(float(cut.edges[rank]))
    sizes = Sizes(nodes, nodes, edges)
    total = Counts()
    for layer in training.counts.layers:
        total += layer.of(sizes)
    computing = question.law.seconds(total)
    widths = [layer.in_columns + layer.out_columns for layer in training.counts.layers]
    inputs = training.counts.layers[0].in_columns if training.inputs.row_length is None else 0
    moved = 2.0 * nodes * training.value_bytes * (sum(widths) - training.counts.layers[0].in_columns + inputs)
    tasks = 2.0 * num_intervals * (training.counts.num_layers + 1)
    busy = computing + 2 * _SEAL_S * moved + tasks * _TASK_S
    processes = question.crowding * (1 + num_functions)
    seconds = busy * max(1.0, question.crowding) if processes > 1 else busy / 2
    rows = float(cut.halo[:, rank].sum()) * sum(layer.out_columns for layer in training.counts.layers[:-1])
    crossing = 2 * rows * training.value_bytes
    wait = 2 * training.counts.num_layers * question.link.latency_s + crossing / question.link.bytes_per_s
    yield Prediction(
        strategy="serverless",
        options={"functions": num_functions, "intervals": num_intervals},
        name=f"serverless, {num_functions} functions a rank",
        is_exact=True,
        epoch_s=seconds + wait,
        parts={"compute": seconds, "wait": wait},
        memory=servers_memory(question),
        sent={"tasks": moved / 2, "results": moved / 2, "rows": crossing / 2, "sums": crossing / 2},
        evaluate_s=question.slowed * computing / 3,
        bound="the cores are busy",
        num_ranks=question.num_ranks,
    )
