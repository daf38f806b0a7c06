"""Graph: the immutable records that flow through polyhop (Graph, Split, Part, Block, feature stores)."""

from polyhop.graph.block import Block, Transposed
from polyhop.graph.disk import FEATURE_STORES, DiskFeatures, ReadCounts, in_feature_store, kept_in
from polyhop.graph.features import DenseFeatures, FeatureStore, MatrixFeatures, SparseFeatures, SparseRows
from polyhop.graph.fingerprint import fingerprint_graph
from polyhop.graph.graph import Graph, Split, dense_features
from polyhop.graph.halo_block import Channel, HaloBlock, Reader, Sizes, Sums
from polyhop.graph.part import AnyPart, GraphFacts, Labels, Part, SharedGraph
from polyhop.graph.placed import PlacedFeatures
from polyhop.graph.pooled import PooledRows
from polyhop.graph.procedural import ProceduralPart, materialise, procedural_share

__all__ = [
    "FEATURE_STORES",
    "AnyPart",
    "Block",
    "Channel",
    "DenseFeatures",
    "DiskFeatures",
    "FeatureStore",
    "Graph",
    "GraphFacts",
    "HaloBlock",
    "Labels",
    "MatrixFeatures",
    "Part",
    "PlacedFeatures",
    "PooledRows",
    "ProceduralPart",
    "ReadCounts",
    "Reader",
    "SharedGraph",
    "Sizes",
    "SparseFeatures",
    "SparseRows",
    "Split",
    "Sums",
    "Transposed",
    "dense_features",
    "fingerprint_graph",
    "in_feature_store",
    "kept_in",
    "materialise",
    "procedural_share",
]
