"""What a forecast is asked: training on so many ranks of some machine, as far as ranks have seen the graph."""

from __future__ import annotations

from dataclasses import dataclass

from polyhop.forecast.sight import Sight
from polyhop.forecast.training import Training
from polyhop.plan import Law, Link, Machine
from polyhop.plan.topology import Topology
from polyhop.strategies.pipeline_schedule import Layout

__all__ = ["Question"]

# Measured on one AVX-512 core: 0.57 ms for Adam's step on 268,658 parameters; loop, labels and buckets of gradients 1 ms.
_STEP_S, _PARAMETER_S = 1e-3, 2.1e-9
_GPU_PARAMETER_S = 7e-11  # Adam reads four values and writes three, 28 bytes, at half of some 800 GB/s

# Of an exchange between layers beside its messages and their bytes, on the computing thread: lists, buffers, waking up.
# Fitted to 88 runs of strategy "halo" on 2 and 4 ranks of 2 cores: 2 to 3 ms.
_EXCHANGE_S = 2.5e-3


@dataclass(frozen=True, eq=False)
class Question:
    """The same for all strategies."""

    training: Training
    sight: Sight
    num_ranks: int
    machine: Machine
    link: Link  # between the ranks, each of which sends to all others alike
    law: Law  # of the model's computing on one rank
    crowding: float = 0.0  # ranks to a core
    topology: Topology | None = None  # who is near whom; None: every rank as near as any other
    device: str | None = None  # kind of what ranks compute on; None: what the model's weights are on

    @property
    def has_gpus(self) -> bool:
        """Whether ranks compute on GPUs, as the law is; a host may have some that they leave alone."""
        return (self.device or self.training.weights[0].device.type) != "cpu"

    @property
    def step_s(self) -> float:
        """Of a step beside what the model computes: the loop, the optimiser, the gradients put together."""
        each = _GPU_PARAMETER_S if self.has_gpus else _PARAMETER_S
        return _STEP_S + each * self.training.num_parameters

    @property
    def exchange_s(self) -> float:
        """Of an exchange between layers beside its messages: 0 where a GPU computes meanwhile."""
        return 0.0 if self.has_gpus else _EXCHANGE_S

    @property
    def ranks(self) -> range:
        """Those that must be looked at to know of all."""
        return range(1 if self.sight.is_alike else self.num_ranks)

    def boundary(self, layout: Layout, stage: int) -> Link:
        """From a stage of a pipeline to the next one, all ways at once."""
        if self.topology is None:
            return self.link
        return self.topology.across(
            (layout.rank(stage, way), layout.rank(stage + 1, way)) for way in range(layout.num_ways)
        )

    def inside_stage(self, layout: Layout) -> Link:
        """Between the ways of a stage; of the stage that is spread most."""
        if self.topology is None:
            return self.link
        found = [self.topology.among(layout.rank(at), layout.num_ways) for at in range(layout.num_stages)]
        return min(found, key=lambda link: link.bytes_per_s)

    @property
    def slowed(self) -> float:
        """How many times as long a second of computing takes where ranks outnumber cores."""
        return max(1.0, self.crowding)
