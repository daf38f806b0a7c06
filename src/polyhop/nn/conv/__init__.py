"""Convolutions: one file per layer, each with PyG's arguments, state-dict keys and full-graph numbers."""

from polyhop.nn.conv.gat import GATConv
from polyhop.nn.conv.gcn import GCNConv
from polyhop.nn.conv.gcn2 import GCN2Conv
from polyhop.nn.conv.gin import GINConv
from polyhop.nn.conv.sage import SAGEConv
from polyhop.nn.conv.wrapped import Wrapped, wrap

__all__ = ["GATConv", "GCN2Conv", "GCNConv", "GINConv", "SAGEConv", "Wrapped", "wrap"]
