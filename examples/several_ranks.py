"""Train one model on two ranks, from Python: the numbers of one process.

    python examples/several_ranks.py

The graph is cut into two parts in a folder; each rank reads its own part, and what it needs of the other comes over the
network. The same function runs on other hosts under torchrun (engine="torchrun") or on a Ray cluster (engine="ray").
"""

import tempfile
from pathlib import Path

import torch

import polyhop
from polyhop.launch import Launch, RankContext, run
from polyhop.nn import GraphSAGE
from polyhop.partition import open_parts, partition, save_parts

OPTIONS = {"max_epochs": 2, "num_neighbors": [10, 5], "batch_size": 512, "seed": 0, "progress": "none"}


def make_model(graph) -> GraphSAGE:
    torch.manual_seed(0)
    return GraphSAGE(graph.num_features, 32, num_layers=2, out_channels=graph.num_classes, dropout=0.3)


def train(context: RankContext, folder: str) -> float:
    """What every rank does; a function of the module's top level, so that other processes can find it."""
    line = context.comm
    graph = open_parts(folder).share(line.rank, line.num_ranks)
    result = polyhop.Trainer("data", **OPTIONS).fit(make_model(graph), graph, line=line)
    sent = line.traffic.now()
    print(f"rank {line.rank} of {line.num_ranks}: {sent.total_bytes / 1e6:.1f} MB sent")
    return result.test


def main() -> tuple[float, float]:
    graph = polyhop.load("synth:arxiv?scale=0.02")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "parts"
        save_parts(graph, partition(graph, 2, "fennel"), folder)
        together = run(train, (str(folder),), Launch(num_ranks=2))
    alone = polyhop.Trainer("single", **OPTIONS).fit(make_model(graph), graph).test
    print(f"test accuracy {together:.3f} on two ranks, {alone:.3f} in one process")
    return together, alone


if __name__ == "__main__":
    main()
