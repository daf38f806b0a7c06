"""Training on the full graph with graph servers and stateless functions (Dorylus, Thorpe et al., 2021). One step an epoch.

    rank       a graph server: holds its part, gathers and scatters on its cores, hands dense work out, keeps the ledger
    function   a short-lived process without torch: pulls a task, computes, brings rows and gradients of weights back

Every part is cut into intervals of nodes that go through the layers independently, so that while functions compute for
some the server gathers for others. With ``staleness`` None an interval waits for the rows it reads (``pipe``): weights
are those of one process on the full graph, to rounding, and the same bits for any number of functions, whatever faults
they have. With S >= 0 it reads what is there, at most S + 1 epochs old.

Gradients of weights come with the rows they belong to in one message, are summed in the order of intervals and then of
ranks, and the loop takes its optimiser's step on every rank alike: once an epoch, or (``weight_steps``) as often as a group
of intervals has ended it, while the others go on with the version of the weights that they began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from polyhop.errors import ConfigError, UnsupportedError
from polyhop.exchange import RowFetch, RowFormat
from polyhop.graph import Graph, SharedGraph
from polyhop.sample.wire import Wire
from polyhop.strategies.held import HeldPart
from polyhop.strategies.step import Loss, Placement, Step, Team, WholeGraph
from polyhop.trace import NO_TRACE, Trace

__all__ = ["NAME", "Config", "build", "hold"]

NAME = "serverless"


@dataclass(frozen=True)
class Config:
    """The options this strategy takes from the trainer."""

    num_neighbors: Sequence[int] | None = None  # must be None: every step is on the full graph
    feature_dtype: str = "auto"  # of the input rows of the halo, which cross once
    max_epochs: int = 1  # none is begun after the last
    seed: int = 0
    functions: int | str = 2  # of each server; "auto": as many as are worth most
    intervals: int = 16  # of each server
    staleness: int | None = None  # None: pipe
    pipe_epochs: int | None = (
        None  # the first and the last that are exact, whatever the staleness; None: a fifth
    )
    weight_steps: int = 1  # an epoch; more: of a group of intervals each, not waiting for the others
    fuse_loss: bool = True
    rematerialise: bool = True
    extrapolate: bool | None = (
        None  # old rows, gradients and weights go on as they last changed; None: where staleness >= 1
    )
    stream: bool = True
    edge_functions: bool = False  # attention weights of GAT are tasks too
    function_launcher: str = "local"  # local | command | aws | ray
    function_command: str | None = None  # that runs a function, of launcher "command"
    function_host: str | None = None  # address of this host at which functions and other servers reach it
    function_name: str | None = None  # of AWS Lambda: name or ARN
    function_endpoint: str | None = None  # of AWS Lambda; None: the region's
    function_region: str | None = None  # of AWS Lambda; None: as boto3 finds it
    function_memory: int | None = None  # MB; None: as it was made on AWS, else as orders say
    prices: str | Path | None = (
        None  # table by which the run is billed; None: the one that ships with polyhop
    )
    server_kind: str | None = None  # of those prices, as which a rank is billed


def hold(graph: SharedGraph, placement: Placement, team: Team, config: Config) -> HeldPart:
    """What evaluation needs of this rank's part."""
    layout = RowFormat.of(graph.part, graph.num_nodes, config.feature_dtype)
    return HeldPart(graph, placement, team.line, RowFetch(graph.part, layout, Wire(graph.num_nodes)))


def build(
    model: nn.Module,
    graph: Graph | SharedGraph,
    config: Config,
    *,
    train_ids: Tensor,
    whole: WholeGraph | HeldPart,
    loss: Loss,
    terms_per_row: int = 1,
    trace: Trace = NO_TRACE,
    team: Team | None = None,
) -> Step:
    """This rank's step; ``train_ids`` are local rows of its labelled train nodes. All ranks build together."""
    if team is None or not isinstance(graph, SharedGraph) or not isinstance(whole, HeldPart):
        raise ConfigError(
            f"strategy {NAME!r} runs on ranks: give --workers N, or start it with torchrun (one process: strategy 'single')"
        )
    if config.num_neighbors is not None:
        raise ConfigError(
            f"strategy {NAME!r} trains on the full graph, and num_neighbors={list(config.num_neighbors)} asks for "
            "mini-batches: leave it out (--fanout), or use strategy 'data' or 'macro'"
        )
    if config.weight_steps > 1 and config.staleness is None:
        raise ConfigError(
            f"weight_steps={config.weight_steps} changes weights while intervals are on their way, and staleness=None "
            "(pipe) promises the numbers of one process: give staleness=0 or more (--staleness 0), or one step"
        )
    if whole.placement.device.type != "cpu" or whole.placement.autocast is not None:
        raise ConfigError(
            f"strategy {NAME!r} computes on CPUs, in float32 or float64: give device='cpu' and precision='32-true' or "
            "'64-true'"
        )
    try:
        from polyhop.strategies.serverless_step import ServerlessStep
    except ImportError as error:
        raise UnsupportedError(
            f"strategy {NAME!r} talks to functions over ZeroMQ, and {error.name} is not installed: pip install "
            "'polyhop[serverless]'"
        ) from error
    return ServerlessStep(model, graph, whole, config, train_ids, terms_per_row, trace, team)
