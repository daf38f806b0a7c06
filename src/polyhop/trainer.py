"""Trainer: the composition root. ``fit`` is the data flow written once, top to bottom:

graph -> task -> strategy step -> loop (evaluate, checkpoint, report) -> best weights -> result
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyhop import strategies
from polyhop.comm import Collective
from polyhop.errors import ConfigError, PartitionError, PolyhopError
from polyhop.graph import DiskFeatures, Graph, SharedGraph, fingerprint_graph, in_feature_store
from polyhop.kernels import kept_memory
from polyhop.partition import Partition, default_method
from polyhop.partition import partition as make_partition
from polyhop.plan import PLAN_FILE, Limits, Plan, read_plan
from polyhop.planner import PlanOptions, learn_from, plan_graph, plan_together, settings_of
from polyhop.strategies import HeldPart, Loss, Placement, Step, Team, WholeGraph, place
from polyhop.trace import Trace
from polyhop.train import (
    checkpoint,
    evaluate,
    fingerprint,
    loop,
    loss,
    metrics,
    optim,
    progress,
    scores,
    together,
)
from polyhop.train.config import Config, parse_bytes
from polyhop.train.folder import RunFolder, automatic_name
from polyhop.train.header import first_lines
from polyhop.train.marks import EpochMarks, sent_by
from polyhop.train.parts import keep_quality
from polyhop.train.run import Run
from polyhop.train.signals import StopRequest
from polyhop.train.state import Result, Session
from polyhop.train.task import Task, check_model

__all__ = ["Result", "Trainer"]

_NOTHING_TO_JUDGE = "evaluation is skipped: there are no labelled validation or test nodes"
_LOSSES: dict[bool, Loss] = {False: loss.cross_entropy_sum, True: loss.binary_cross_entropy_sum}


@dataclass(frozen=True)
class Trainer(Config):
    """All options of a run (see ``Config``) and three verbs.

        trainer = polyhop.Trainer(max_epochs=20, num_neighbors=[15, 10], patience=5, run_dir="runs/first")
        result = trainer.fit(model, graph)

    ``fit`` starts from the weights the model has: build it under ``torch.manual_seed`` for repeatable runs. All else is a
    function of ``seed``. torch's global generator is left as it was found.
    """

    def fit(
        self,
        model: nn.Module,
        graph: Graph | SharedGraph,
        *,
        line: Collective | None = None,
        plan: Plan | None = None,
    ) -> Result:
        """Train the model in place; it ends with the weights of the best validation metric.

        On several ranks each calls it with its share of the graph and its ``line`` to the others (``launch.run`` gives
        one); all start from rank 0's weights and end with the same ones, and rank 0 alone writes and reports. Raises
        Interrupted after SIGTERM or Ctrl-C, once the state is saved; DivergedError for a loss that is not finite.
        With ``strategy="auto"`` a plan is made first, and obeyed; a run that goes on keeps the one it has. ``plan``: obey
        and keep this one.
        """
        graph = in_feature_store(graph, self.feature_store)
        if plan is not None:
            if plan.num_ranks != _num_ranks(line):
                raise ConfigError(
                    f"a plan for {plan.num_ranks} ranks, and there are {_num_ranks(line)}: make one for these"
                )
            return self.obeying(plan)._fit(model, graph, line, plan, teaches=False)
        if self.strategy != "auto":
            return self._fit(model, graph, line, None)
        kept, why_not = self._kept_plan(line)
        if kept is not None and kept.num_ranks != _num_ranks(line):
            if kept.asked == "auto":
                return self._fit_elsewhere(kept, model, graph, line)
            kept = None  # a strategy that was given for other ranks was chosen by nobody for these
        if why_not and self._is_told(line):
            _say(f"{why_not}: planned anew")
        made = kept or self._made_plan(model, graph, line)
        return self.obeying(made)._fit(model, graph, line, made)

    def _fit_elsewhere(
        self, kept: Plan, model: nn.Module, graph: Graph | SharedGraph, line: Collective | None
    ) -> Result:
        """Go on in the way that was planned, on another number of ranks."""
        try:
            return self.obeying(kept)._fit(model, graph, line, None)
        except ConfigError as error:
            raise ConfigError(
                f"{self._plan_file()}: the run was planned for {kept.num_ranks} ranks ({kept.chosen.name}) and is to go on "
                f"with {_num_ranks(line)}: {error}. Continue it with {kept.num_ranks}, or start afresh in another run_dir"
            ) from error

    def plan(
        self,
        model: nn.Module,
        graph: Graph,
        num_ranks: int = 1,
        *,
        partition: Partition | None = None,
        options: PlanOptions | None = None,
    ) -> Plan:
        """What training would take on so many ranks, and which way is best; features are not read. See ``polyhop.plan``.

        On several ranks strategy "single" stands for "auto".
        """
        place(self.device, self.precision)
        cut = partition or make_partition(graph, num_ranks, default_method(), seed=self.seed)
        asked = self._as(strategy="auto") if self.strategy == "single" and cut.num_parts > 1 else self
        return plan_graph(model, graph, asked, cut, options or PlanOptions(self._limits))

    def obeying(self, plan: Plan) -> Trainer:
        """This trainer with the strategy and the numbers of a plan."""
        return self._as(**settings_of(plan))

    def _as(self, **changed: Any) -> Trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # said when this trainer was made
            return replace(self, **changed)

    @property
    def _limits(self) -> Limits:
        """Of a plan."""
        return Limits(self.allow_approximate, num_epochs=max(1, self.max_epochs))

    def _foreseen(
        self, model: nn.Module, graph: Graph | SharedGraph, line: Collective | None, run: Run
    ) -> Plan | None:
        """Of a run whose strategy is given, to compare it with; None where nobody will, or where it is not foreseen.

        A run that has begun keeps the plan that it has, or none.
        """
        asked = [self.foresee and self.run_dir is not None, run.session.state.global_step > 0]
        is_kept, is_begun = asked if line is None else together.share_value(asked, line)
        if not is_kept:
            return None
        kept, why_not = self._kept_plan(line)
        if kept is not None and kept.num_ranks != _num_ranks(line):
            why_not = f"{self._plan_file()} is a plan for {kept.num_ranks} ranks, the run goes on with {_num_ranks(line)}"
            kept = None
        if kept is None and is_begun:
            run.notes += [f"no plan to compare with: {why_not}"] if why_not else []
        if kept is not None or is_begun:
            return kept
        try:
            return self._made_plan(model, graph, line, is_given=True)
        except PolyhopError as error:
            if self._is_told(line):
                _say(f"no plan is kept: {error}")
            return None

    def _made_plan(
        self,
        model: nn.Module,
        graph: Graph | SharedGraph,
        line: Collective | None,
        *,
        is_given: bool = False,
    ) -> Plan:
        check_model(model, graph)
        placement = place(self.device, self.precision)
        placement.make_current()
        model.to(placement.device, placement.dtype)
        tell = _say if self._is_told(line) else lambda text: None
        limits = replace(self._limits, allows_approximate=self.allow_approximate or is_given)
        options = PlanOptions(limits, tell=tell, is_given=is_given, trains_here=True)
        if isinstance(graph, Graph) and line is None:
            return self.plan(model, graph, options=options)
        if isinstance(graph, Graph) or line is None:
            raise ConfigError(
                "strategy 'auto' needs a whole graph in one process, or a rank's share of one and its line to the others"
            )
        return plan_together(model, graph, self, line, options)

    def _plan_file(self) -> Path:
        """Of the run that goes on."""
        is_own = self.resume is None or self.resume == "auto"
        folder = Path(str(self.run_dir)) if is_own else checkpoint.run_folder_of(Path(str(self.resume)))
        return folder / PLAN_FILE

    def _kept_plan(self, line: Collective | None) -> tuple[Plan | None, str]:
        """Of a run that goes on; else None, and where there is one that cannot be read, why."""
        if self.resume is None:
            return None, ""
        told: Any = _read_kept(self._plan_file()) if _is_first(line) else None
        plan, why_not = told if line is None else together.share_value(told, line)
        return None if plan is None else Plan.from_json(plan), why_not

    def _is_told(self, line: Collective | None) -> bool:
        """Whether this rank may say something before the first lines."""
        return _is_first(line) and self.progress not in ("none", "json")

    def _fit(
        self,
        model: nn.Module,
        graph: Graph | SharedGraph,
        line: Collective | None,
        plan: Plan | None,
        *,
        teaches: bool = True,
    ) -> Result:
        """``teaches``: what the plan expected was foreseen for this host and its links."""
        task = Task.of(graph, _LOSSES, metrics.METRICS, self.metric, metrics.COUNTS)
        check_model(model, graph)
        placement = place(self.device, self.precision)
        placement.make_current()
        model.to(placement.device, placement.dtype)
        strategy = strategies.find(self.strategy)
        options = strategy.Config(**{f.name: getattr(self, f.name) for f in fields(strategy.Config)})
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            team = None if line is None else Team(line, lambda: stop.name is not None, self.split_groups)
            whole = _held(strategy, graph, placement, team, options)
            judge = scores.Scorer(task, ("val", "test"), None if team is None else team.group)
            if self.patience is not None and not judge.has("val"):
                raise ConfigError("patience needs validation nodes, and the graph has none that are labelled")
            folder = self._open_folder(model, graph, stack) if _is_first(line) else None
            trace = self._trace(folder, line)
            stack.callback(trace.close)
            step = strategy.build(
                model,
                graph,
                options,
                train_ids=task.train_ids() if line is None else task.ids["train"],
                whole=whole,
                loss=task.loss,
                terms_per_row=task.terms_per_row,
                trace=trace,
                team=team,
            )
            stack.callback(getattr(step, "close", lambda: None))
            self._keep_records(step, folder, line)
            rates = {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum}
            session = Session(model, optim.build_optimizer(self.optimizer, model, **rates), step)
            about = {"graph": graph.name, "num_ranks": 1 if line is None else line.num_ranks}
            run = Run(self, session, folder, self._identity(model, graph), about)
            run.notes += getattr(step, "notes", [])
            run.notes += [] if judge.has("val") or judge.has("test") else [_NOTHING_TO_JUDGE]
            run.resume()
            plan = plan or self._foreseen(model, graph, line, run)
            if plan is not None and folder is not None:
                folder.write_plan(plan.to_json())
            if line is not None:
                together.share_session(session, line)
                keep_quality(graph, run, line)
            shown = progress.build_progress(self.progress if _is_first(line) else "none")
            stack.callback(shown.close)
            getattr(step, "watch", lambda tell: None)(shown.live)
            facts = first_lines(
                graph,
                model,
                placement,
                self.num_neighbors,
                None if folder is None else folder.path,
                run.notes,
                1 if line is None else line.num_ranks,
                self.split_groups,
            )
            if plan is not None:
                is_chosen = plan.asked == "auto"
                facts |= (
                    {"plan": plan.why[0], "instead": plan.why[1]} if is_chosen else {"foreseen": plan.why[0]}
                )
            shown.start(facts, self.max_epochs)
            stack.enter_context(_own_random_state(placement.device))
            stack.enter_context(kept_memory())
            tell_notes = _teller(step, shown)
            marks = EpochMarks(trace, partial(sent_by, step, line), placement.device)
            marks.epoch(session.state.epoch)
            tools = self._tools(run, judge, whole, shown, stop, trace, marks, team, tell_notes)
            asked = loop.Options(
                self.max_epochs, self.seed, self.clip, self.eval_every, self.patience, self.checkpoint_every
            )
            loop.train(session, asked, tools)
            _complete(session)
            result = run.finish(task.metric, getattr(step, "summary", dict)())
            if plan is not None and teaches and _is_first(line):
                learn_from(
                    plan, [record["train_seconds"] for record in run.history if "train_seconds" in record]
                )
            tell_notes()
            shown.finish(result.to_json())
            return result

    def evaluate(
        self,
        model: nn.Module,
        graph: Graph | SharedGraph,
        split: str = "test",
        *,
        line: Collective | None = None,
    ) -> dict[str, float]:
        """``{metric: ..., "loss": ...}`` of a split's labelled nodes ("train", "val", "test"): exact, in bounded memory."""
        task = Task.of(graph, _LOSSES, metrics.METRICS, self.metric, metrics.COUNTS)
        team = self._team(line)
        judge = scores.Scorer(task, [split], None if team is None else team.group)
        found = _judged(judge, self._chunks(model, graph, team), team)
        if not found:
            raise ConfigError(f"graph {graph.name!r} has no labelled nodes in its {split} split")
        return {task.metric: found[split], "loss": found[f"{split}_loss"]}

    def predict(
        self,
        model: nn.Module,
        graph: Graph | SharedGraph,
        out: str | Path | None = None,
        *,
        line: Collective | None = None,
    ) -> Tensor | np.ndarray[Any, Any]:
        """Logits of all nodes [N, C]: a CPU tensor, or written to ``out`` (.npy) and returned memory-mapped.

        Rows are in the user's order. On several ranks, rank 0 gets them; the others get an empty tensor.
        """
        path = None if out is None else Path(out)
        if path is not None and path.suffix != ".npy":
            raise ConfigError(f"out={str(out)!r}: predictions are written as .npy")
        team = self._team(line)
        chunks = self._chunks(model, graph, team)
        if team is not None and isinstance(graph, SharedGraph):
            part = graph.stored("prediction")
            if team.group_index > 0:  # the first group has all nodes
                return torch.empty(0)
            own = scores.collect(chunks, part.num_nodes)
            everyone = together.gather_rows_at_first(own, part.user_ids, graph.num_nodes, team.group)
            if team.line.rank != 0 or path is None:
                return everyone
            return scores.write_npy(lambda _: iter([(0, graph.num_nodes, everyone)]), graph.num_nodes, path)
        if path is None:
            return scores.collect(chunks, graph.num_nodes)
        return scores.write_npy(chunks, graph.num_nodes, path)

    def _team(self, line: Collective | None) -> Team | None:
        return None if line is None else Team(line, num_groups=self.split_groups)

    def _chunks(self, model: nn.Module, graph: Graph | SharedGraph, team: Team | None) -> scores.Chunks:
        graph = in_feature_store(graph, self.feature_store)
        check_model(model, graph)
        placement = place(self.device, self.precision)
        placement.make_current()
        model.to(placement.device, placement.dtype)
        memory = evaluate.DEFAULT_MEMORY_BYTES if self.memory is None else parse_bytes(self.memory)
        strategy = strategies.find(self.strategy)
        options = strategy.Config(**{f.name: getattr(self, f.name) for f in fields(strategy.Config)})
        return self._layerwise(model, _held(strategy, graph, placement, team, options), memory)

    def _trace(self, folder: RunFolder | None, line: Collective | None) -> Trace:
        """This rank's own file in the run's folder, where there is one."""
        if folder is not None:
            return Trace(folder.trace)
        if line is None or line.rank == 0 or self.run_dir in (None, "auto"):
            return Trace()
        path = Path(str(self.run_dir))
        with suppress(OSError):  # rank 0 says what is wrong with the folder
            path.mkdir(parents=True, exist_ok=True)
        return Trace(path / f"trace-rank{line.rank}.jsonl", rank=line.rank)

    def _keep_records(self, step: Step, folder: RunFolder | None, line: Collective | None) -> None:
        """A step that has records of its own to keep is told where, on every rank that knows."""
        if not hasattr(step, "keep_records"):
            return
        if folder is not None:
            step.keep_records(folder.path)
        elif not _is_first(line) and self.run_dir not in (None, "auto"):
            step.keep_records(Path(str(self.run_dir)))

    def _layerwise(
        self, model: nn.Module, whole: WholeGraph | HeldPart, memory: int | None, **more: Any
    ) -> scores.Chunks:
        spill = None if self.spill_dir is None else Path(self.spill_dir)
        chunks = partial(evaluate.layerwise, model, whole, memory_bytes=memory, spill_dir=spill, **more)
        return lambda wanted: chunks(wanted=wanted)

    def _open_folder(
        self, model: nn.Module, graph: Graph | SharedGraph, stack: ExitStack
    ) -> RunFolder | None:
        given = self.run_dir
        if given is None and self.resume is not None:
            given = checkpoint.run_folder_of(Path(self.resume))
        if given is None:
            return None
        path = automatic_name(graph.name, type(model).__name__) if given == "auto" else Path(given)
        is_same = (
            self.resume is not None
            and self.resume != "auto"
            and checkpoint.run_folder_of(Path(self.resume)) == path
        )
        folder = RunFolder(path, may_continue=self.resume == "auto" or is_same)
        stack.callback(folder.close)
        return folder

    def _identity(self, model: nn.Module, graph: Graph | SharedGraph) -> dict[str, Any]:
        """What a continuation must agree with."""
        made = {"model": fingerprint.fingerprint_model(model), "graph": fingerprint_graph(graph)}
        return {**made, "config": self.fingerprint()}

    def _tools(
        self,
        run: Run,
        judge: scores.Scorer,
        whole: WholeGraph | HeldPart,
        shown: progress.Progress,
        stop: StopRequest,
        trace: Trace,
        marks: EpochMarks,
        team: Team | None,
        tell_notes: Callable[[], None],
    ) -> loop.Tools:
        session, line = run.session, None if team is None else team.line

        def poll() -> None:
            if line is None and stop.name is not None:
                raise loop.StopAsked

        def stop_name() -> str | None:
            """Ranks stop together: after the step in which they told each other."""
            if line is None:
                return stop.name
            return (stop.name or "a signal to another rank") if session.step.is_stop_agreed else None

        # A run on the full graph holds all its rows anyway; others stay within the budget.
        default = None if self.num_neighbors is None else evaluate.DEFAULT_MEMORY_BYTES
        memory = default if self.memory is None else parse_bytes(self.memory)
        chunks = self._layerwise(session.model, whole, memory, poll=poll)
        steps = session.step.num_steps
        schedule = optim.build_schedule(
            self.schedule,
            warmup=self.warmup,
            total_steps=self.max_epochs * steps,
            decay_steps=(self.decay_every or 0) * steps,
            decay=self.decay,
        )

        def evaluated() -> dict[str, float]:
            with marks.evaluation():
                _complete(session)
                return _judged(judge, chunks, team)

        def on_epoch(record: dict[str, Any]) -> bool:
            if isinstance(whole.graph.x, DiskFeatures):
                record["pages_read"] = whole.graph.x.pages_read  # by this rank, since it opened the file
            run.record(record)
            marks.epoch(record["epoch"])
            shown.epoch(record)
            tell_notes()
            wishes = [
                callback(dict(record)) for callback in self.callbacks
            ]  # all are told, whatever the first wants
            wished = any(wish is True for wish in wishes)
            return bool(together.share_value(wished, line)) if line is not None and self.callbacks else wished

        return loop.Tools(
            set_lr=lambda step: optim.set_factor(session.optimizer, schedule(step)),
            evaluate=evaluated,
            save=run.save if _is_first(line) or self.run_dir is None else partial(_saved_by_first, run),
            on_step=shown.step,
            on_epoch=on_epoch,
            stop=stop_name,
            trace=trace,
        )


def _teller(step: Step, shown: progress.Progress) -> Callable[[], None]:
    """Shows, when called, what the strategy has noted since."""
    told = len(getattr(step, "notes", []))

    def tell() -> None:
        nonlocal told
        for text in getattr(step, "notes", [])[told:]:
            shown.note(text)
            told += 1

    return tell


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _is_first(line: Collective | None) -> bool:
    return line is None or line.rank == 0


def _num_ranks(line: Collective | None) -> int:
    return 1 if line is None else line.num_ranks


def _read_kept(path: Path) -> tuple[dict[str, Any] | None, str]:
    """A run's plan as JSON values; None and why, if it cannot be read."""
    try:
        return (read_plan(path).to_json(), "") if path.exists() else (None, "")
    except ConfigError as error:
        return None, str(error)


def _judged(judge: scores.Scorer, chunks: scores.Chunks, team: Team | None) -> dict[str, float]:
    """Scores of all nodes, the same numbers on every rank: each group holds them all, so the first judges for the others."""
    if team is None or team.num_groups == 1:
        return judge(chunks)
    found = judge(chunks) if team.group_index == 0 else None
    return dict(together.share_value(found, team.line))


def _complete(session: Session) -> None:
    """All weights on every rank, where each trains its own."""
    getattr(session.step, "complete_model", lambda: None)()


def _saved_by_first(run: Run) -> str:
    """Where the state of all ranks is, to the others, who have their share in it."""
    run.save()
    return "the run folder, by rank 0"


def _held(
    strategy: Any, graph: Graph | SharedGraph, placement: Placement, team: Team | None, options: Any
) -> WholeGraph | HeldPart:
    """The graph, or this rank's part of it, as steps and evaluation read it."""
    if isinstance(graph, Graph):
        if team is not None:
            raise ConfigError(
                "a rank trains on its share of a graph, and was given a whole one: cut it "
                "(polyhop.partition.share, or PartitionFolder.share)"
            )
        return WholeGraph(graph, placement)
    if team is None or not hasattr(strategy, "hold"):
        raise ConfigError(
            f"strategy {strategy.NAME!r} trains on a whole graph in one process, and was given one rank's share: "
            "use strategy 'data' on ranks"
        )
    group = team.group
    if graph.part.num_parts != group.num_ranks or graph.part.index != group.rank:
        grouped = f" in {team.num_groups} groups of {group.num_ranks}" if team.num_groups > 1 else ""
        raise PartitionError(
            f"rank {team.line.rank} of {team.line.num_ranks}{grouped} was given part {graph.part.index} of "
            f"{graph.part.num_parts}: every rank needs its own part, and as many parts as ranks"
            + (f" of a group: here part {group.rank} of {group.num_ranks}" if grouped else "")
        )
    held: HeldPart = strategy.hold(graph, placement, team, options)
    return held


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """Whatever is drawn or seeded inside, torch's generators come out as they went in."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
