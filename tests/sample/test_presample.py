"""Pre-sampled counts are what the sampler draws, counted; and they repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polyhop.errors import ConfigError, InputError
from polyhop.graph import Graph, Split
from polyhop.sample import NeighborLoader, NeighbourSampler
from polyhop.sample.presample import Trial, presample

FAN_OUTS = [4, 3, 2]


def _by_hand(graph: Graph, trial: Trial, epochs: int, columns: list[int]) -> tuple[dict, dict, dict]:
    """The same counts, edge by edge, from mini-batches of the training sampler."""
    sampler = NeighbourSampler(graph, trial.num_neighbors, seed=trial.key_seed, method=trial.sampler)
    dst: dict[int, int] = {}
    pair: dict[tuple[int, int], int] = {}
    inputs: dict[int, int] = {}
    for epoch in range(epochs):
        for step, seeds in enumerate(trial.seeds(epoch)):
            batch = sampler.sample(seeds, epoch, step)
            for v in batch.input_ids.tolist():
                inputs[v] = inputs.get(v, 0) + 1
            for block, cost in zip(batch.blocks, columns, strict=True):
                ids, ends = block.src_ids.tolist(), block.indptr.tolist()
                for i in range(block.num_dst):
                    for row in block.indices[ends[i] : ends[i + 1]].tolist():
                        dst[ids[i]] = dst.get(ids[i], 0) + 1
                        at = (ids[row], ids[i])
                        pair[at] = pair.get(at, 0) + cost
    return dst, pair, inputs


@pytest.mark.parametrize("sampler", ["uniform", "labor"])
@pytest.mark.parametrize("columns", [None, [5, 2, 7]])
def test_counts_are_those_of_the_mini_batches(make_graph, sampler: str, columns) -> None:
    graph = make_graph(120)
    trial = Trial(graph, FAN_OUTS, 16, sampler, seed=3)
    counts = presample(trial, epochs=2, columns=columns)
    dst, pair, inputs = _by_hand(graph, trial, 2, columns or [1, 1, 1])
    assert counts.num_batches == 2 * len(trial) == 2 * -(-59 // 16)  # one train node has no label
    assert counts.dst.tolist() == [dst.get(v, 0) for v in range(120)]
    assert counts.inputs.tolist() == [inputs.get(v, 0) for v in range(120)]
    ends = zip(graph.indices.tolist(), graph.destinations.tolist(), strict=True)
    assert counts.edge.tolist() == [pair.get(end, 0) for end in ends]


def test_batches_are_cut_as_training_cuts_them(make_graph) -> None:
    graph = replace(make_graph(90), y=None)
    trial = Trial(graph, FAN_OUTS, 8, seed=1)
    loader = NeighborLoader(graph, FAN_OUTS, batch_size=8, seed=trial.key_seed, num_workers=0, gather=False)
    for epoch in (0, 2):
        assert torch.equal(torch.cat(trial.seeds(epoch)), loader.order(epoch))
    assert len(trial) == len(loader)


def test_repeats_and_differs_from_training(make_graph) -> None:
    graph = make_graph(150)
    first, again, other, later = (
        presample(Trial(graph, FAN_OUTS, 16, seed=seed, site=site), num_batches=3)
        for seed, site in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(first.edge, again.edge)
    assert torch.equal(first.dst, again.dst)
    for different in (other, later):
        assert not torch.equal(first.edge, different.edge)
    trial = Trial(graph, FAN_OUTS, 16)
    loader = NeighborLoader(graph, FAN_OUTS, batch_size=16, num_workers=0, gather=False)
    assert not torch.equal(torch.cat(trial.seeds(0))[:16], loader.order(0)[:16])


def test_batches_may_end_inside_an_epoch(make_graph) -> None:
    trial = Trial(make_graph(150), FAN_OUTS, 16)
    whole, more = len(trial), presample(trial, num_batches=len(trial) + 1)
    one = presample(trial, epochs=1)
    assert more.num_batches == whole + 1
    last = trial.sample(trial.seeds(1)[0], 1, 0)
    assert int((more.dst - one.dst).sum()) == sum(layer.indices.numel() for layer in last.layers)


def test_weights_for_a_partition(make_graph) -> None:
    graph = make_graph(120)
    counts = presample(Trial(graph, [2], 4), num_batches=2, columns=[3])
    assert int(counts.load.min()) == 1
    assert torch.equal(counts.load > 1, counts.dst > 0)
    assert torch.equal(counts.costs(keep_unsampled=False), counts.edge)
    kept = counts.costs()
    assert int(kept.min()) == 3
    assert torch.equal(kept - 3, 8 * counts.edge)


def test_refused(make_graph) -> None:
    graph = make_graph(60)
    nobody = replace(graph, y=torch.full((60,), -1))
    for wrong in (replace(graph, split=None), replace(graph, split=Split.of(60, None)), nobody):
        with pytest.raises(InputError, match="train"):
            Trial(wrong, FAN_OUTS)
    with pytest.raises(ConfigError, match="num_neighbors"):
        Trial(graph, [])
    with pytest.raises(ConfigError, match="batch_size = 0"):
        Trial(graph, FAN_OUTS, 0)
    with pytest.raises(ConfigError, match="Did you mean 'labor'"):
        Trial(graph, FAN_OUTS, 8, "labour")
    with pytest.raises(ConfigError, match="at least 1"):
        presample(Trial(graph, FAN_OUTS), epochs=0)
    with pytest.raises(ConfigError, match=r"columns = \[1\]: expected 3"):
        presample(Trial(graph, FAN_OUTS), columns=[1])
