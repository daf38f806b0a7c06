"""Layers and models as if there were one device: PyG's names, arguments and state-dict keys, over Blocks."""

from polyhop.nn.basic import GAT, GCN, GIN, BasicGNN, GraphSAGE
from polyhop.nn.conv import GATConv, GCN2Conv, GCNConv, GINConv, SAGEConv, Wrapped, wrap
from polyhop.nn.deepgcn import DeepGCN, DeepGCNLayer
from polyhop.nn.gcnii import GCNII
from polyhop.nn.layer import Layer, as_block
from polyhop.nn.model import Model, State
from polyhop.nn.modules import MLP, BatchNorm, JumpingKnowledge, LayerNorm
from polyhop.nn.stack import Stack

__all__ = [
    "GAT",
    "GCN",
    "GCNII",
    "GIN",
    "MLP",
    "BasicGNN",
    "BatchNorm",
    "DeepGCN",
    "DeepGCNLayer",
    "GATConv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "GraphSAGE",
    "JumpingKnowledge",
    "Layer",
    "LayerNorm",
    "Model",
    "SAGEConv",
    "Stack",
    "State",
    "Wrapped",
    "as_block",
    "wrap",
]
