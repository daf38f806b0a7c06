"""Graph: the immutable records that flow through polyhop (Graph, Split, Block, feature stores)."""

from polyhop.graph.block import Block, Transposed
from polyhop.graph.features import DenseFeatures, FeatureStore, SparseFeatures, SparseRows
from polyhop.graph.graph import Graph, Split, dense_features

__all__ = [
    "Block",
    "DenseFeatures",
    "FeatureStore",
    "Graph",
    "SparseFeatures",
    "SparseRows",
    "Split",
    "Transposed",
    "dense_features",
]
