"""Virtual ranks in turns on one CUDA device, rows between them there too: the bytes of the CPU, memory by rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu import ranks  # noqa: E402
from benchmarks.gpu.virtual import Seen, measure  # noqa: E402

from polyhop.graph import SharedGraph  # noqa: E402
from polyhop.partition import partition  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TINY = ranks.Size("products?scale=0.0005", 12, 16, (3, 2, 2), 32, 8, 8, (), 2)
WAYS = {each.name: each for each in ranks.ways(TINY)}


@pytest.fixture(scope="module")
def shares() -> list[SharedGraph]:
    graph = ranks.made_graph(TINY)
    return ranks.shares_of(graph, partition(graph, ranks.NUM_RANKS, ranks.METHOD, seed=0))


def bytes_of(found: list[Seen]) -> list[list[dict[str, float]]]:
    return [[dict(cost.bytes) for cost in one.costs] for one in found]


@pytest.mark.parametrize("name", WAYS)
def test_ranks_take_turns(shares: list[SharedGraph], name: str) -> None:
    way = WAYS[name]
    found = measure(shares, way, device="cuda", rows_on="cuda")
    assert all(one.num_bytes > 0 for one in found)
    assert all(one.phases["compute"] > 0 for one in found)
    began, ended = min(one.wall[0] for one in found), max(one.wall[1] for one in found)
    assert sum(one.step_s for one in found) * len(found[0].costs) < 1.5 * (ended - began)
    if name != "halo_adaptive":  # widths follow values, and these are summed in another order
        assert bytes_of(found) == bytes_of(measure(shares, way, device="cpu", rows_on="cpu"))
