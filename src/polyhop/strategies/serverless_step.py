"""One rank of strategy ``serverless``: its graph server, its post, its functions. Needs pyzmq and msgspec."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from polyhop.comm import Collective, Cost
from polyhop.errors import ConfigError
from polyhop.graph import SharedGraph, Sizes, SparseRows
from polyhop.kernels.keys import Key
from polyhop.nn import GATConv
from polyhop.serverless.crew import Crew, Launcher
from polyhop.serverless.function import Order
from polyhop.serverless.intervals import Intervals, cut_intervals
from polyhop.serverless.ledger import Terms
from polyhop.serverless.local import LocalLauncher
from polyhop.serverless.passes import Settings
from polyhop.serverless.post import Post
from polyhop.serverless.secrets import Entry, KeyPair, Keys
from polyhop.serverless.segments import Graph, Segment, segments
from polyhop.serverless.server import Server
from polyhop.serverless.server_rows import ServerRows
from polyhop.serverless.tuner import Tuner
from polyhop.strategies.held import HeldPart
from polyhop.strategies.serverless_books import BillOptions, Books, Tariff, told
from polyhop.strategies.serverless_cost import Mode, account
from polyhop.strategies.serverless_launch import FunctionOptions, Launching
from polyhop.strategies.serverless_live import Live, Tell
from polyhop.strategies.serverless_tuning import AUTO, Tuning, bounds_of
from polyhop.strategies.step import Team
from polyhop.trace import Trace

__all__ = ["TERMS", "Options", "ServerlessStep"]

TERMS = Terms()
"""How long leases last."""


class Options(FunctionOptions, BillOptions, Protocol):
    """The options of the strategy that a step reads."""

    @property
    def max_epochs(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def intervals(self) -> int: ...
    @property
    def staleness(self) -> int | None: ...
    @property
    def pipe_epochs(self) -> int | None: ...
    @property
    def weight_steps(self) -> int: ...
    @property
    def fuse_loss(self) -> bool: ...
    @property
    def rematerialise(self) -> bool: ...
    @property
    def extrapolate(self) -> bool | None: ...
    @property
    def stream(self) -> bool: ...
    @property
    def edge_functions(self) -> bool: ...


class ServerlessStep:
    """All ranks build and use it together. ``local`` makes the launcher of functions on this host, None: LocalLauncher.

    A step is of all intervals of all ranks; or, where an epoch has more than one (``weight_steps``), of one group of each
    rank: of the gradient, what the rows of its intervals add to it, times the number of groups. So the mean of an epoch's
    steps is the gradient of the whole, as far as its intervals saw the same weights.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: SharedGraph,
        whole: HeldPart,
        config: Options,
        train_ids: Tensor,
        terms_per_row: int,
        trace: Trace,
        team: Team,
        local: Callable[[Order], Launcher] | None = None,
    ) -> None:
        part, line, placement = graph.stored("strategy 'serverless'"), team.line, whole.placement
        self._line, self._team, self._config, self._model, self._trace = line, team, config, model, trace
        self.notes: list[str] = []
        count = sum(_each(train_ids.numel(), line)) * terms_per_row
        if count == 0:
            raise ConfigError(
                "the train set is empty: no node is both in the train split and labelled (label -1 = none)"
            )
        is_sparse = isinstance(whole.own_rows(torch.empty(0, dtype=torch.int64)), SparseRows)
        chain = segments(
            model,
            Sizes.of_many(graph.num_nodes),
            is_sparse=is_sparse,
            loss="binary_cross_entropy" if graph.is_multilabel else "cross_entropy",
            scale=1.0 / count,
            maps_late=bool(config.staleness),
        )
        layers = list(model.convs if hasattr(model, "convs") else model.layers)  # type: ignore[arg-type]
        if config.edge_functions and not any(isinstance(layer, GATConv) for layer in layers):
            raise ConfigError(
                f"edge_functions=True: {type(model).__name__} has no attention whose weights functions could compute; "
                "leave it out (--edge-functions), or train a GAT"
            )
        self.intervals = cut_intervals(part, whole.host_block, config.intervals, line)
        self.num_steps = config.weight_steps
        most = max(_each(len(self.intervals), line))
        if self.num_steps > most:
            raise ConfigError(
                f"weight_steps={self.num_steps}: each is of a group of intervals, and no rank has more than {most}: give "
                "fewer steps, or more intervals"
            )
        self._chain, self._fixed = chain, _fixed(chain, layers, self.intervals, whole, part.y, train_ids)
        launching = Launching(config)
        tariff = Tariff.of(config, config.function_memory or Order.memory_mb, Order.limit_s)
        self._start_servers(line, launching.host, trace)
        self.server = Server(
            chain,
            layers,
            self.intervals,
            part.src_ids.numel(),
            self._fixed,
            self.post,
            Settings(
                config.seed,
                float(model.dropout.p),  # type: ignore[union-attr, arg-type]
                config.staleness,
                config.max_epochs - 1,
                config.fuse_loss,
                config.rematerialise,
                config.stream,
                config.edge_functions,
                placement.dtype,
                config.max_epochs // 5 if config.pipe_epochs is None else config.pipe_epochs,
                config.weight_steps,
                _extrapolates(config),
            ),
            trace,
        )
        entry = self.post.entry
        order = Order(self._job, f"server{line.rank}", entry.address, entry.public, self._functions.public,
                      self._functions.secret)  # fmt: skip
        if config.function_memory is not None:
            order = replace(order, memory_mb=config.function_memory)
        try:
            is_local = config.function_launcher == "local"
            self.launcher: Launcher = (
                (local or LocalLauncher)(order) if is_local else launching.launcher(order, self.post)
            )
            tariff = tariff.with_memory(getattr(self.launcher, "memory_mb", tariff.memory_mb))
        except BaseException:
            self.server.close()
            self.post.close()
            raise
        self.tuning = self._tuned(tariff, trace) if config.functions == AUTO else None
        self.crew = Crew(self.launcher, self.post, self._wanted)
        self.books = Books(line.rank, self.crew, self.post.sheets, tariff)
        self.live = Live(self.post, self.crew, self.books, line.rank, line.num_ranks, trace)
        self._version, self._begun, self.is_stop_agreed = -1, -1, False
        rows = [each.num_rows for each in self.intervals]
        mode = "pipe" if config.staleness is None else f"staleness {config.staleness}"
        mode += f", {config.weight_steps} steps an epoch" if config.weight_steps > 1 else ""
        self.notes += [
            f"{len(rows)} intervals of {min(rows, default=0)} to {max(rows, default=0)} nodes a server, {mode}, "
            f"{config.functions} functions a server ({sum(isinstance(s, Graph) for s in chain)} graph operations)"
        ]

    def _start_servers(self, line: Collective, host: str | None, trace: Trace) -> None:
        """Keys of the job from rank 0, a post on every rank (at ``host``), and the way to all others."""
        own, drawn = KeyPair.draw(), [KeyPair.draw(), KeyPair.draw()]
        text = "|".join(
            [secrets.token_hex(8), *(each for pair in drawn for each in (pair.public, pair.secret))]
        )
        job, *keys = _shared_text(text, line)[0].split("|")
        self._job, self._functions = job, KeyPair(*keys[:2])
        own_host = socket.gethostname()
        self._num_here = _shared_text(own_host, line).count(own_host)  # ranks that share its cores
        self.post = Post(
            job,
            Keys(own, KeyPair(*keys[2:]), self._functions.public),
            host=host or line.address,
            terms=TERMS,
            trace=trace,
        )
        entries = _shared_text(f"{self.post.entry.address}|{own.public}", line)
        self.post.connect({q: Entry(*each.split("|")) for q, each in enumerate(entries) if q != line.rank})

    def _tuned(self, tariff: Tariff, trace: Trace) -> Tuning:
        bounds = bounds_of(tariff, len(self.intervals.own), self._line.num_ranks, self._num_here)
        return Tuning(Tuner(bounds), self.post, self.server, self.notes.append, trace)

    def _wanted(self) -> int:
        """Functions, as things are."""
        return self.tuning.wanted() if self.tuning is not None else int(self._config.functions)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter(range(start, self.num_steps))

    def gradients(self, batch: Any, key: Key) -> Tensor:
        names = dict(self._model.named_parameters())
        self._version += 1
        self.server.publish(self._version, names)
        if self._begun != key.epoch:
            self._begun = key.epoch
            self.server.go(key.epoch)
        found = self.server.wait(key.epoch, batch, self.live.tick)
        self.live.tick()
        if self.tuning is not None and batch == self.num_steps - 1:
            self.tuning.epoch_ended()
        trained = [(name, p) for name, p in names.items() if p.requires_grad]
        own = [found.gradients.get(name, torch.zeros_like(p)).reshape(-1) for name, p in trained]
        wish = float(self._team.asks_to_stop() or self.is_stop_agreed)
        told = torch.tensor([found.loss, wish], dtype=own[0].dtype)
        total = self._line.all_reduce(torch.cat([*own, told]), kind="gradients")
        self.is_stop_agreed = bool(total[-1] > 0)
        total *= self.num_steps
        at = 0
        for _, p in trained:
            p.grad = total[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        return total[-2].clone()

    def account(self) -> Cost:
        """Of an epoch without faults."""
        settings = self.server.settings
        mode = Mode(settings.fuses, settings.remakes, settings.streams, settings.dtype.itemsize)
        return account(self._chain, self.server.ops, self.intervals.own, self._fixed, mode)

    def counted(self) -> Cost:
        """Since the run began: what was sent, and results that came. Weights are beside the account."""
        post = self.post
        sizes, counts = dict(post.sent), dict(post.sent_messages)
        results = {"results": post.received["results"]}, {"results": post.messages["Push"]}
        return Cost(sizes | results[0], counts | results[1])

    def watch(self, tell: Tell) -> None:
        """``tell`` is called now and then while epochs are waited for."""
        self.live.tell = tell

    def keep_records(self, folder: Path) -> None:
        """What functions are paid for goes to a run's folder."""
        self.books.keep(folder)

    def summary(self) -> dict[str, Any]:
        """The run is over: functions end, and what all of them cost. All ranks call it together."""
        self._end_functions()
        found = self.books.total(lambda text: _shared_text(text, self._line))
        self.notes.append(told(found, self.books.tariff))
        return {"bill": {**found.to_json(), **self.books.tariff_facts()}}

    def _end_functions(self) -> None:
        self.post.dismiss("the run is over")
        self.crew.close()
        self.books.end()

    def close(self) -> None:
        """End functions and sockets."""
        self._end_functions()
        self._trace.counter("tasks", functions=len(self.crew.gone), **self.post.ledger.counts)
        self.server.close()
        self.post.close()

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        return


def _fixed(
    chain: Sequence[Segment],
    layers: Sequence[Any],
    intervals: Intervals,
    whole: HeldPart,
    y: Tensor | None,
    train_ids: Tensor,
) -> dict[int, dict[str, Any]]:
    """Rows that no epoch changes, by interval: inputs, labels, and what the first layer gathers of inputs alone."""
    assert y is not None, "the trainer checks that labels are there"
    is_trained = torch.zeros(y.shape[0], dtype=torch.bool)
    is_trained[train_ids] = True
    found: dict[int, dict[str, Any]] = {}
    for interval in intervals:
        mine: dict[str, Any] = {}
        trained, labels = is_trained[interval.rows], y[interval.rows]
        if y.dim() == 2:
            mine["labels"], mine["mask"] = labels.to(torch.uint8).numpy(), trained.to(torch.uint8).numpy()
        else:
            mine["labels"] = torch.where(trained, labels, -1).long().numpy()
        rows = whole.placement.rows(whole.own_rows(torch.arange(interval.start, interval.stop)))
        mine["h0"] = ServerRows(rows) if isinstance(rows, SparseRows) else rows
        for segment in chain:
            if isinstance(segment, Graph) and not segment.has_gradient:
                read = whole.placement.rows(whole.features.gather(interval.sources))
                with torch.no_grad():
                    mine[segment.gives] = layers[segment.layer].aggregate(interval.block, read, None)
        found[interval.number] = mine
    return found


def _shared_text(text: str, line: Collective) -> list[str]:
    """Every rank's text. All ranks call it together."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=line.device)
    return [bytes(each.tolist()).decode() for each in line.all_gather(own, kind="sizes")]


def _each(count: int, line: Collective) -> list[int]:
    """Every rank's number."""
    counts = line.all_gather(
        torch.tensor([count], device=line.device), kind="sizes", counts=[1] * line.num_ranks
    )
    return list(torch.cat(counts).tolist())


def _extrapolates(config: Options) -> bool:
    """Unless it is said: where intervals begin epochs early. It takes a second copy of what is gathered, and time."""
    return bool(config.staleness) if config.extrapolate is None else config.extrapolate
