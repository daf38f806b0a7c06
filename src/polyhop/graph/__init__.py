"""Graph: the immutable records that flow through polyhop (Graph, Split, Part, Block, feature stores)."""

from polyhop.graph.block import Block, Transposed
from polyhop.graph.features import DenseFeatures, FeatureStore, SparseFeatures, SparseRows
from polyhop.graph.fingerprint import fingerprint_graph
from polyhop.graph.graph import Graph, Split, dense_features
from polyhop.graph.part import GraphFacts, Part, SharedGraph

__all__ = [
    "Block",
    "DenseFeatures",
    "FeatureStore",
    "Graph",
    "GraphFacts",
    "Part",
    "SharedGraph",
    "SparseFeatures",
    "SparseRows",
    "Split",
    "Transposed",
    "dense_features",
    "fingerprint_graph",
]
