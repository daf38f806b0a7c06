"""Seeds to Blocks: one file per sampler, and the loader that samples ahead of training."""

from polyhop.sample.batch import MiniBatch
from polyhop.sample.full import full_block
from polyhop.sample.loader import Loaded, NeighborLoader
from polyhop.sample.neighbour import NeighbourSampler

__all__ = ["Loaded", "MiniBatch", "NeighborLoader", "NeighbourSampler", "full_block"]
