"""Rows brought to where they are needed, and sums back to their owners; messages as bytes."""

from polyhop.exchange.batch_norm import account_statistics, shared_statistics
from polyhop.exchange.codec import DTYPES, MixedCodec, RowCodec
from polyhop.exchange.crossing import Crossing, Lists, Spans
from polyhop.exchange.features import RowFetch, RowFormat
from polyhop.exchange.gradients import GradientSum, bucket_sizes
from polyhop.exchange.halo import Halo
from polyhop.exchange.layout import LayerEdges, Layout, lay_out, layer_edges
from polyhop.exchange.loader import PartBatch, PartLoader, Seeds
from polyhop.exchange.pool import Pool, pool_row_bytes
from polyhop.exchange.window import Loaded, WindowLoader

__all__ = [
    "DTYPES",
    "Crossing",
    "GradientSum",
    "Halo",
    "LayerEdges",
    "Layout",
    "Lists",
    "Loaded",
    "MixedCodec",
    "PartBatch",
    "PartLoader",
    "Pool",
    "RowCodec",
    "RowFetch",
    "RowFormat",
    "Seeds",
    "Spans",
    "WindowLoader",
    "account_statistics",
    "bucket_sizes",
    "lay_out",
    "layer_edges",
    "pool_row_bytes",
    "shared_statistics",
]
