"""Seeds to Blocks: one file per sampler, and the loader that samples ahead of training."""

from polyhop.sample.batch import MiniBatch
from polyhop.sample.full import full_block
from polyhop.sample.loader import Loaded, NeighborLoader
from polyhop.sample.neighbour import NeighbourSampler
from polyhop.sample.presample import Counts, Trial, presample
from polyhop.sample.splitting import Presampled, SplitQuality, judge, presampled, redundancy

__all__ = [
    "Counts",
    "Loaded",
    "MiniBatch",
    "NeighborLoader",
    "NeighbourSampler",
    "Presampled",
    "SplitQuality",
    "Trial",
    "full_block",
    "judge",
    "presample",
    "presampled",
    "redundancy",
]
