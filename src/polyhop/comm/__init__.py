"""How ranks exchange tensors, every byte counted: the only code that touches torch.distributed."""

from polyhop.comm.collective import Collective, Pending
from polyhop.comm.groups import GroupLine, TieredLine, group_size
from polyhop.comm.threads import ThreadCollective, Turns, run_in_threads
from polyhop.comm.traffic import Cost, Traffic

__all__ = [
    "Collective",
    "Cost",
    "GroupLine",
    "Pending",
    "ThreadCollective",
    "TieredLine",
    "Traffic",
    "Turns",
    "group_size",
    "run_in_threads",
]
