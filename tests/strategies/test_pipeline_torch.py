"""The same schedule on torch's own pipelining runtime: an engine that shares nothing with ours but the plan and the layers.

Chunks are dependent here in another way too: one function per layer writes own rows, reads others, and on the way back adds
what chunks after this one have left for its rows (the buffer function), where ours starts several roots at once. The runtime
is private to torch, wants equal chunks and no inference of shapes by a run beforehand, which would write into the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyhop import nn as layers
from polyhop.comm import Collective
from polyhop.graph import Graph
from polyhop.kernels.keys import Key
from polyhop.partition import Partition, share
from polyhop.strategies import Team, pipeline, pipeline_setup, place
from polyhop.strategies.pipeline_schedule import Schedule
from polyhop.train.loss import cross_entropy_sum

try:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        FORWARD,
        FULL_BACKWARD,
        _Action,
        _PipelineScheduleRuntime,
    )

    MISSING = ""
    if not hasattr(_PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        MISSING = "has no _PipelineScheduleRuntime._prepare_schedule_with_comms"
except ImportError as error:
    MISSING = f"lacks its private runtime of schedules ({error})"

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"torch {torch.__version__} {MISSING}")

MakeGraph = Callable[..., Graph]
STAGES, CHUNKS, NODES, LAYERS, HIDDEN = 2, 4, 60, 5, 12
MODELS: dict[str, Callable[[Graph], nn.Module]] = {
    "gcnii": lambda g: layers.GCNII(g.num_features, HIDDEN, LAYERS, g.num_classes, dropout=0.3),
    "deepgcn": lambda g: layers.DeepGCN(g.num_features, HIDDEN, LAYERS, g.num_classes, dropout=0.3),
    "gat": lambda g: layers.GAT(g.num_features, HIDDEN, LAYERS, g.num_classes, dropout=0.3, heads=2),
}


def actions_of(schedule: Schedule) -> dict[int, list[Any]]:
    """Computing alone, by rank; torch adds the messages. Its micro-batches are places in the order of chunks."""
    kinds = {"forward": FORWARD, "backward": FULL_BACKWARD}
    return {
        rank: [
            _Action(schedule.layout.stage(rank), kinds[task.direction], task.tick)
            for task in schedule.tasks(rank)
        ]
        for rank in range(schedule.layout.num_ranks)
    }


class _Buffer(torch.autograd.Function):
    """Own rows into the table, others out of it; back: own gradients and what later chunks left, others to earlier ones."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, tables: _Tables, layer: int, chunk: int) -> Tensor:
        ctx.tables, ctx.layer, ctx.chunk = tables, layer, chunk
        at = tables.chunks[chunk]
        tables.rows[layer][at.start : at.stop] = own
        return torch.cat([own, tables.rows[layer][at.others]])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tables, at = ctx.tables, ctx.tables.chunks[ctx.chunk]
        left = tables.grads[ctx.layer]
        is_earlier = tables.place[at.other_chunks] < tables.place[ctx.chunk]
        left.index_add_(0, at.others[is_earlier], grad[at.num_rows :][is_earlier])
        return grad[: at.num_rows] + left[at.start : at.stop], None, None, None


class _Tables:
    """What a stage keeps of all rows: as ours had it before the epoch."""

    def __init__(self, step: Any, order: list[int]) -> None:
        self.chunks = step.chunks
        self.rows = {layer: rows.clone() for layer, rows in step.history.rows.items()}
        self.grads = {layer: torch.zeros_like(rows) for layer, rows in self.rows.items()}
        self.place = torch.empty(len(order), dtype=torch.int64)
        self.place[torch.tensor(order)] = torch.arange(len(order))


class _StageModule(nn.Module):
    """Layers first .. stop - 1 on the rows of one chunk, whose number comes with the micro-batch."""

    def __init__(
        self, model: Any, step: Any, rank: int, order: list[int], key: Key, begun: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.model, self.key, self.begun = model, key, begun
        self.first, self.stop = step.bounds[rank], step.bounds[rank + 1]
        self.names = list(step.pieces.states[max(self.first, 1)])
        self.tables = _Tables(step, order)

    def forward(self, *given: Tensor, chunk: Tensor) -> Any:
        number, model = int(chunk), self.model
        at = self.tables.chunks[number]
        state = dict(zip(self.names, given, strict=False))
        for layer in range(self.first, self.stop):
            if layer == 0:
                own = slice(at.start, at.stop)
                state = {
                    name: rows[at.sources()] if name == "h" else rows[own]
                    for name, rows in self.begun.items()
                }
            else:
                rows = _Buffer.apply(state["h"], self.tables, layer, number)
                state = model.dropped(layer - 1, state | {"h": rows}, ids=at.block.src_ids, key=self.key)
            state = model.undropped(layer, at.block, state, key=self.key)
        if self.stop < model.num_layers:
            found = tuple(state[name] for name in self.names)
            return found if len(found) > 1 else found[0]
        ids = at.block.dst_ids()
        last = model.dropped(model.num_layers - 1, state, ids=ids, key=self.key)
        return model.finish(last, ids=ids, key=self.key)


def by_torch(graph: Graph, model: Any, step: Any, rank: int, epoch: int) -> dict[str, Tensor]:
    """Gradients of this rank's weights after one step of torch's runtime, from the tables as they are."""
    assert graph.x is not None
    assert graph.y is not None
    assert graph.split is not None
    schedule, key, ids = step.schedule(epoch), Key(3, epoch), step.chunks.ids
    order = [task.chunk for task in schedule.tasks(0, "forward")]
    model.zero_grad(set_to_none=True)
    x = graph.x.all()
    assert isinstance(x, Tensor)
    begun = dict(model.begin(x.double()[ids], ids=ids, key=key))
    leaves = {name: rows.detach().requires_grad_(rows.requires_grad) for name, rows in begun.items()}
    rows = NODES // CHUNKS
    crossing = tuple(
        torch.zeros(rows, *shape, dtype=dtype, requires_grad=True)
        for shape, dtype in step.pieces.states[step.bounds[1]].values()
    )
    logits = torch.zeros(rows, graph.num_classes, dtype=torch.float64, requires_grad=True)
    blank = torch.zeros(rows, 1, dtype=torch.float64)
    stage = PipelineStage(
        _StageModule(model, step, rank, order, key, leaves),
        rank,
        STAGES,
        torch.device("cpu"),
        input_args=(blank,) if rank == 0 else crossing,
        output_args=crossing if rank == 0 else (logits,),
    )
    train = graph.split.train[graph.y[graph.split.train] >= 0]
    labels = torch.full((NODES,), -1).index_put((train,), graph.y[train].long())
    in_order = torch.cat([ids[step.chunks[chunk].rows] for chunk in order])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy_sum(out[y >= 0], y[y >= 0]) / train.numel()

    runtime = _PipelineScheduleRuntime([stage], CHUNKS, loss_fn=loss, scale_grads=False)
    runtime._prepare_schedule_with_comms(actions_of(schedule))
    inputs = (torch.zeros(NODES, 1, dtype=torch.float64),) if rank == 0 else ()
    target = labels[in_order] if rank == STAGES - 1 else None
    runtime.step(*inputs, target=target, chunk=torch.tensor(order))
    if rank == 0:
        needed = [name for name in sorted(begun) if begun[name].requires_grad]
        if needed:
            torch.autograd.backward([begun[name] for name in needed], [leaves[name].grad for name in needed])
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def both(line: Collective, graph: Graph, name: str, folder: str) -> list[tuple[dict[str, Tensor], ...]]:
    """(ours, torch's) of two epochs; weights move between them, so the second one's history is of other weights."""
    owner = (torch.arange(graph.num_nodes) % line.num_ranks).int()
    held = share(graph, Partition(owner, line.num_ranks), line.rank)
    config, team = pipeline.Config(chunks=CHUNKS), Team(line)
    torch.manual_seed(7)
    model = MODELS[name](graph).double().train()
    assert held.split is not None
    assert held.part.y is not None
    chosen = pipeline_setup.choose_chunks
    pipeline_setup.choose_chunks = lambda block, wanted, seed: (torch.arange(NODES) % CHUNKS).int()
    try:
        step: Any = pipeline.build(
            model,
            held,
            config,
            train_ids=held.split.train[held.part.y[held.split.train] >= 0],
            whole=pipeline.hold(held, place("cpu", "64-true"), team, config),
            loss=cross_entropy_sum,
            team=team,
        )
    finally:
        pipeline_setup.choose_chunks = chosen
    store = dist.FileStore(str(Path(folder) / f"store-{name}"), STAGES)
    dist.init_process_group("gloo", store=store, rank=line.rank, world_size=STAGES)
    found = []
    try:
        step._sweep(0)
        for epoch in range(2):
            theirs = by_torch(graph, model, step, line.rank, epoch)
            model.zero_grad(set_to_none=True)
            step.gradients(0, Key(3, epoch))
            ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append((ours, theirs))
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.5)
    finally:
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_torch_s_runtime_gives_the_same_gradients(
    make_graph: MakeGraph, ranks: Callable[..., list[Any]], tmp_path: Path, name: str
) -> None:
    """Bit for bit, of every weight, on both stages."""
    graph = make_graph(NODES)
    for epochs in ranks(STAGES, both, graph, name, str(tmp_path)):
        for ours, theirs in epochs:
            assert ours
            assert ours.keys() == theirs.keys()
            for weight, grad in ours.items():
                assert torch.equal(theirs[weight], grad), weight
                assert weight.endswith("bias") or grad.abs().max() > 0
