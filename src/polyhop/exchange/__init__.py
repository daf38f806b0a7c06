"""Rows brought to where they are needed, and sums back to their owners; messages as bytes."""

from polyhop.exchange.codec import DTYPES, RowCodec
from polyhop.exchange.features import RowFetch, RowFormat
from polyhop.exchange.gradients import GradientSum, bucket_sizes
from polyhop.exchange.halo import Halo
from polyhop.exchange.loader import PartBatch, PartLoader, Seeds
from polyhop.exchange.pool import Pool, pool_row_bytes
from polyhop.exchange.window import Loaded, WindowLoader

__all__ = [
    "DTYPES",
    "GradientSum",
    "Halo",
    "Loaded",
    "PartBatch",
    "PartLoader",
    "Pool",
    "RowCodec",
    "RowFetch",
    "RowFormat",
    "Seeds",
    "WindowLoader",
    "bucket_sizes",
    "pool_row_bytes",
]
