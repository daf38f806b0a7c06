"""Rows brought to where they are needed, and sums back to their owners; messages as bytes."""

from polyhop.exchange.codec import DTYPES, RowCodec
from polyhop.exchange.features import RowFetch, RowFormat
from polyhop.exchange.gradients import GradientSum, bucket_sizes
from polyhop.exchange.halo import Halo
from polyhop.exchange.loader import PartBatch, PartLoader, Seeds

__all__ = [
    "DTYPES",
    "GradientSum",
    "Halo",
    "PartBatch",
    "PartLoader",
    "RowCodec",
    "RowFetch",
    "RowFormat",
    "Seeds",
    "bucket_sizes",
]
