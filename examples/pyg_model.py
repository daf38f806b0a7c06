"""Bring what you have from PyG: a Data object, a convolution that polyhop does not have, and trained weights.

python examples/pyg_model.py        needs torch-geometric: pip install 'polyhop[pyg]'
"""

import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, GraphSAGE

import polyhop
from polyhop.nn import GraphSAGE as OurGraphSAGE
from polyhop.nn import SAGEConv, Stack


def ring(num_nodes: int = 600) -> Data:
    """Three arcs of a ring, each its own class; features tell little, neighbours tell more."""
    nodes = torch.arange(num_nodes)
    edges = torch.cat(
        [torch.stack([nodes, (nodes + hop) % num_nodes]) for hop in (-3, -2, -1, 1, 2, 3)], dim=1
    )
    y = nodes * 3 // num_nodes
    torch.manual_seed(0)
    x = torch.randn(num_nodes, 8) + 0.5 * torch.nn.functional.one_hot(y, 8)
    code = torch.randint(4, (num_nodes,))
    return Data(x=x, edge_index=edges, y=y, train_mask=code < 2, val_mask=code == 2, test_mask=code == 3)


def main() -> float:
    data = ring()
    graph = polyhop.load(data)

    # 1. A PyG convolution among ours: wrapped on the way in, trained like any other layer.
    model = Stack([GraphConv(8, 32, aggr="mean"), SAGEConv(32, 3)], dropout=0.2)
    result = polyhop.Trainer(max_epochs=40).fit(model, graph)
    print(f"mixed layers: test accuracy {result.test:.3f}")

    # 2. Weights move both ways, because names and shapes are the same.
    theirs = GraphSAGE(8, 32, num_layers=2, out_channels=3)
    ours = OurGraphSAGE(8, 32, num_layers=2, out_channels=3)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        difference = (ours(data.x, data.edge_index) - theirs(data.x, data.edge_index)).abs().max()
    print(f"same weights: outputs differ by {float(difference):.1e}")
    return float(difference)


if __name__ == "__main__":
    main()
