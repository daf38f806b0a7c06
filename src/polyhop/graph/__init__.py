"""Graph: the immutable records that flow through polyhop (Graph, Split, Part, Block, feature stores)."""

from polyhop.graph.block import Block, Transposed
from polyhop.graph.features import DenseFeatures, FeatureStore, SparseFeatures, SparseRows
from polyhop.graph.graph import Graph, Split, dense_features
from polyhop.graph.part import Part

__all__ = [
    "Block",
    "DenseFeatures",
    "FeatureStore",
    "Graph",
    "Part",
    "SparseFeatures",
    "SparseRows",
    "Split",
    "Transposed",
    "dense_features",
]
