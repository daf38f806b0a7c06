"""Train on arrays of your own, with mini-batches, and keep the run.

    python examples/own_graph.py [RUN_FOLDER]

The graph here is drawn with NumPy: 2,000 people in 4 groups who mostly know others of their group, each with 16 noisy
numbers. Replace ``people`` by whatever gives you an edge list, features and labels.
"""

import sys

import numpy as np
import torch

import polyhop
from polyhop.nn import GraphSAGE


def people(num_nodes: int = 2000, num_groups: int = 4, num_features: int = 16):
    """Edges [2, E], features [N, F], labels [N]."""
    rng = np.random.default_rng(0)
    group = rng.integers(num_groups, size=num_nodes)
    a, b = rng.integers(num_nodes, size=(2, 40 * num_nodes))
    keeps = rng.random(a.size) < np.where(group[a] == group[b], 0.5, 0.05)
    edges = np.unique(np.stack([a, b])[:, keeps & (a != b)], axis=1)
    centre = 0.4 * rng.normal(size=(num_groups, num_features))
    features = rng.normal(size=(num_nodes, num_features)) + centre[group]
    return edges, features.astype(np.float32), group


def main(run_dir: str | None = None) -> float:
    edges, features, group = people()
    order = np.random.default_rng(1).permutation(len(group))
    graph = polyhop.load(
        {
            "edge_index": edges,
            "x": features,
            "y": group,
            "train": order[:1000],
            "val": order[1000:1500],
            "test": order[1500:],
        }
    )
    print(graph)

    torch.manual_seed(0)
    model = GraphSAGE(graph.num_features, 32, num_layers=2, out_channels=graph.num_classes, dropout=0.2)
    trainer = polyhop.Trainer(max_epochs=10, num_neighbors=[10, 5], batch_size=256, run_dir=run_dir)
    result = trainer.fit(model, graph)

    scores = trainer.predict(model, graph)  # every node, every neighbour, layer by layer
    print(
        f"test accuracy {result.test:.3f}; node 0 is of group {int(scores[0].argmax())}, in truth {group[0]}"
    )
    return result.test


if __name__ == "__main__":
    main(*sys.argv[1:2])
