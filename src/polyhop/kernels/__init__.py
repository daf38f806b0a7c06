"""Kernels: one op per file, each with checks, a gradient, and the choice between native C++ and plain torch."""

from polyhop.kernels.attention import attention
from polyhop.kernels.draw import draw
from polyhop.kernels.dropout import dropout, dropout_values
from polyhop.kernels.gather import gather_rows
from polyhop.kernels.keys import Key, Purpose, fold
from polyhop.kernels.memory import kept_memory
from polyhop.kernels.quantise import (
    NotFiniteError,
    dequantise_rows,
    quantise_rows,
    quantised_bytes,
    quantised_row_bytes,
)
from polyhop.kernels.random import random_u32
from polyhop.kernels.relabel import Relabel
from polyhop.kernels.sample import Sampled, SampledLayer, Sampler
from polyhop.kernels.scatter import scatter_add_rows
from polyhop.kernels.spmm import aggregate, spmm
from polyhop.kernels.transpose import transpose

__all__ = [
    "Key",
    "NotFiniteError",
    "Purpose",
    "Relabel",
    "Sampled",
    "SampledLayer",
    "Sampler",
    "aggregate",
    "attention",
    "dequantise_rows",
    "draw",
    "dropout",
    "dropout_values",
    "fold",
    "gather_rows",
    "kept_memory",
    "quantise_rows",
    "quantised_bytes",
    "quantised_row_bytes",
    "random_u32",
    "scatter_add_rows",
    "spmm",
    "transpose",
]
