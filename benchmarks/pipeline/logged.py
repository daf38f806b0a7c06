"""Measured figures of GNNPipe's authors, from the result logs in their repository (dreaming-panda/Mithril_MultiGPU,
nsdi2023/overall_performance, seed 1 unless said): 8 GPUs, 32 layers, 32 chunks.

Milliseconds an epoch: computing (mean of the GPUs, and most), messages between stages (mean), optimiser and the rest, the
epoch; and the epochs of graph-parallel and of hybrid training (means of three seeds). ``replayed`` is what the simulator
makes of them."""

from __future__ import annotations

from dataclasses import dataclass

from polyhop.strategies.pipeline_schedule import Layout, fill_drain
from polyhop.strategies.pipeline_simulate import ticked

__all__ = ["CASES", "GRAPHS", "NUM_CHUNKS", "NUM_STAGES", "Case", "replayed"]

NUM_STAGES = 8
NUM_CHUNKS = 32

GRAPHS = {
    "squirrel": (5_201, 1000),
    "physics": (34_493, 100),
    "flickr": (89_250, 100),
    "reddit": (232_965, 100),
}
"""Nodes and hidden columns."""


@dataclass(frozen=True)
class Case:
    graph: str
    model: str
    compute_ms: float
    slowest_ms: float
    message_ms: float
    rest_ms: float
    epoch_ms: float
    graph_parallel_ms: float
    hybrid_ms: float  # 4 stages of 2 ways, 32 chunks


CASES = [
    Case("squirrel", "gcn", 49.919, 54.849, 6.992, 2.241, 80.520, 190, 111),
    Case("squirrel", "graphsage", 96.848, 104.368, 7.317, 3.705, 147.160, 268, 191),
    Case("squirrel", "gcnii", 62.869, 76.501, 11.361, 2.431, 108.120, 198, 140),
    Case("squirrel", "resgcn+", 127.708, 147.743, 7.452, 4.203, 191.791, 269, 241),
    Case("physics", "gcn", 35.458, 50.421, 5.432, 1.303, 66.492, 53, 77),
    Case("physics", "graphsage", 61.953, 111.858, 5.582, 1.910, 133.696, 69, 125),
    Case("physics", "gcnii", 49.236, 85.430, 10.431, 1.336, 108.795, 60, 105),
    Case("physics", "resgcn+", 95.364, 106.020, 5.580, 1.921, 137.172, 80, 153),
    Case("flickr", "gcn", 37.073, 39.258, 7.652, 1.724, 63.616, 156, 90),
    Case("flickr", "graphsage", 66.023, 75.810, 9.204, 1.992, 104.634, 173, 126),
    Case("flickr", "gcnii", 51.903, 62.521, 14.335, 1.794, 95.143, 166, 116),
    Case("flickr", "resgcn+", 106.141, 124.617, 10.642, 2.315, 163.053, 186, 187),
    Case("reddit", "gcn", 238.105, 252.922, 25.149, 4.383, 357.839, 874, 392),
    Case("reddit", "graphsage", 376.948, 402.554, 25.810, 4.559, 533.218, 1082, 568),
    Case("reddit", "gcnii", 262.183, 285.869, 41.694, 4.271, 415.181, 902, 449),
    Case("reddit", "resgcn+", 340.544, 388.254, 25.856, 4.842, 509.496, 934, 546),  # seed 2
]


def replayed(case: Case) -> float:
    """Milliseconds of an epoch, simulated: one stage is the slowest (the first, whose inputs are wide), the others alike."""
    schedule = fill_drain(Layout(NUM_STAGES), [4 * at for at in range(NUM_STAGES + 1)], [range(NUM_CHUNKS)])
    others = (NUM_STAGES * case.compute_ms - case.slowest_ms) / (NUM_STAGES - 1)
    of_stage = [case.slowest_ms, *[others] * (NUM_STAGES - 1)]
    return case.rest_ms + ticked(
        schedule,
        lambda stage, task: of_stage[stage] / (2 * NUM_CHUNKS),
        lambda stage, task: case.message_ms / (2 * NUM_CHUNKS),
    )
