"""``polyhop train``: load a graph, build a model, train it, show what came out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhop.cli import console
from polyhop.cli.recipe import MODELS, Recipe
from polyhop.cli.result import show_result
from polyhop.errors import ConfigError, unknown

if TYPE_CHECKING:
    from torch import nn

    from polyhop.cli.planned import Planned
    from polyhop.graph import Graph
    from polyhop.launch import Launch
    from polyhop.trainer import Trainer

__all__ = ["command"]

_WRITTEN = (
    "config.json",
    "command.json",
    "metrics.jsonl",
    "result.json",
    "model.safetensors",
    "curve.png",
    "bill.json",
    "partition.json",
    "plan.json",
    "report.html",
)


def _model_name(given: str) -> str:
    if given not in MODELS:
        raise typer.BadParameter(unknown("model", given, MODELS))
    return given


def _fan_outs(given: str) -> list[int] | None:
    """None for "full", else one number per layer."""
    if given == "full":
        return None
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{given!r}: expected one number per layer from the seeds outward, such as 15,10 (-1 = all), or full",
            param_hint="--fanout",
        ) from None


def command(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A graph: a known name, a file or folder, or synth:..., rmat:..., sbm:...")
    ],
    model: Annotated[
        str, typer.Option(callback=_model_name, help=" | ".join(MODELS), rich_help_panel="Model")
    ] = "sage",
    layers: Annotated[int, typer.Option(min=1, help="Number of GNN layers.")] = 2,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the hidden layers.")] = 256,
    dropout: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of hidden units dropped in training.")
    ] = 0.5,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads (gat).")] = None,
    norm: Annotated[str | None, typer.Option(help="batch | layer; none unless given.")] = None,
    jk: Annotated[str | None, typer.Option(help="Join all layers: last | cat | max | lstm.")] = None,
    epochs: Annotated[int, typer.Option(min=0, help="Passes over the training nodes.")] = 100,
    fanout: Annotated[
        str, typer.Option(help="Neighbours drawn per layer, from the seeds outward: 15,10; or full.")
    ] = "full",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Seeds per mini-batch (with --fanout) [default: 1024].")
    ] = None,
    sampler: Annotated[str, typer.Option(help="uniform | labor")] = "uniform",
    batch_dependence: Annotated[
        int,
        typer.Option(
            help="Steps over which the draws of labor turn from one to the next, up to 64: mini-batches reach the same "
            "nodes more often (1: each draws anew)."
        ),
    ] = 1,
    optimizer: Annotated[str, typer.Option(help="adam | adamw | sgd")] = "adam",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    schedule: Annotated[str | None, typer.Option(help="constant | cosine | linear")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of linear rise of the learning rate.")] = 0,
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.")] = None,
    precision: Annotated[str, typer.Option(help="32-true | 64-true | bf16-mixed")] = "32-true",
    eval_every: Annotated[int, typer.Option(min=1, help="Epochs between evaluations.")] = 1,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many evaluations without a gain.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to train on; under torchrun its number.", rich_help_panel="Ranks"),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="auto | single | data | macro | halo | pipeline | split | pushpull | serverless "
            "[default: auto where there are ranks].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="A plan that 'polyhop plan --out' wrote: its strategy and numbers are used.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    foresee: Annotated[
        bool,
        typer.Option(
            "--foresee/--no-foresee",
            help="Keep what the run was expected to take, for 'polyhop report' (measures this host, once).",
            rich_help_panel="Run",
        ),
    ] = True,
    allow_approximate: Annotated[
        bool,
        typer.Option(
            "--allow-approximate",
            help="Strategy auto may take ways whose weights are not those of one process.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    parts: Annotated[
        Path | None,
        typer.Option(
            help="Folder of parts: opened if there, else made. Without it every rank loads the graph and cuts its part.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    partitioner: Annotated[
        str,
        typer.Option(
            help="metis | fennel | ldg | hash | block. Strategy split follows the mini-batches it will draw.",
            rich_help_panel="Ranks",
        ),
    ] = "auto",
    feature_dtype: Annotated[
        str,
        typer.Option(
            help="Of rows sent between ranks: auto (as stored) | float32 | bfloat16 | int8.",
            rich_help_panel="Ranks",
        ),
    ] = "auto",
    features: Annotated[
        str,
        typer.Option(
            help="Input rows in a folder of .npy files or parts: memory | mapped | disk (larger than memory) "
            "[default: mapped].",
            show_default=False,
        ),
    ] = "auto",
    cache: Annotated[
        str | None,
        typer.Option(help="Memory for other ranks' hot rows, such as 500MB.", rich_help_panel="Ranks"),
    ] = None,
    device_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory of the device for input rows that are read most, such as 4GB: in strategy split of each rank's "
            "own; in strategy single on a GPU of the graph, where mini-batches are then drawn, too: unasked, where its "
            "lists fit half of the free memory; 0 draws them on the CPU.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    cache_ranks: Annotated[
        int,
        typer.Option(
            help="Strategy data: neighbouring ranks, such as those of a host, that share one cache.",
            rich_help_panel="Ranks",
        ),
    ] = 1,
    per_minibatch_rpc: Annotated[
        bool,
        typer.Option(
            "--per-minibatch-rpc", help="Data as DistDGL does it: a baseline.", rich_help_panel="Ranks"
        ),
    ] = False,
    macro: Annotated[
        str,
        typer.Option(
            help="Mini-batches that strategy macro loads at once: a number, or auto.", rich_help_panel="Ranks"
        ),
    ] = "auto",
    split_depth: Annotated[
        str | None,
        typer.Option(
            help="Layers that strategy split splits, from the inputs: a number, or auto [default: all].",
            rich_help_panel="Ranks",
            show_default=False,
        ),
    ] = None,
    split_sums: Annotated[
        bool,
        typer.Option(
            "--split-sums/--no-split-sums",
            help="Strategy split sends sums of rows where they are fewer bytes than the rows: for slow links.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    split_groups: Annotated[
        int,
        typer.Option(
            min=1,
            help="Groups of ranks (hosts) in strategy split: each holds all parts and splits its slice of every mini-batch.",
            rich_help_panel="Ranks",
        ),
    ] = 1,
    delta: Annotated[
        bool,
        typer.Option(
            "--delta/--no-delta",
            help="Keep rows of one window of macro for the next.",
            rich_help_panel="Ranks",
        ),
    ] = True,
    bits: Annotated[
        str,
        typer.Option(
            help="Of a value that crosses between layers in strategies halo and pipeline: 1 | 2 | 4 | 8 | 16 | 32; in halo "
            "also adaptive | delta (2 bits of what a row has moved; for models without dropout) | random.",
            rich_help_panel="Ranks",
        ),
    ] = "32",
    bits_lambda: Annotated[
        float,
        typer.Option(help="Of adaptive bits: 0 only time counts, 1 only precision.", rich_help_panel="Ranks"),
    ] = 0.5,
    bits_period: Annotated[
        int, typer.Option(help="Epochs between choices of bits.", rich_help_panel="Ranks")
    ] = 50,
    link_costs: Annotated[
        Path | None,
        typer.Option(
            help="File of what messages between ranks cost, for adaptive bits: read if there, else measured and written "
            "[default: all alike].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    halo: Annotated[
        str,
        typer.Option(
            help="Rows of other parts in strategy halo: exact | stale | sampled | skipping | sequential.",
            rich_help_panel="Ranks",
        ),
    ] = "exact",
    halo_share: Annotated[
        float, typer.Option(help="Rows that cross with --halo sampled.", rich_help_panel="Ranks")
    ] = 0.1,
    naive_halo: Annotated[
        bool,
        typer.Option(
            "--naive-halo",
            help="Everything crosses in every epoch, nothing overlaps: a baseline.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    overlap: Annotated[
        bool,
        typer.Option(
            "--overlap/--no-overlap",
            help="Compute while rows of strategy halo are on their way.",
            rich_help_panel="Ranks",
        ),
    ] = True,
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute",
            help="Compute layers of strategies halo and pipeline again in the backward pass: less memory, same weights.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    stages: Annotated[
        int | None,
        typer.Option(
            help="Of layers, in strategy pipeline; ranks of a stage share the graph [default: as many as ranks].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            help="Pieces of the graph that stream through the stages of strategy pipeline [default: 4 a rank].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    chunk_order: Annotated[
        str,
        typer.Option(help="Of an epoch: shuffled | paired | fixed.", rich_help_panel="Ranks"),
    ] = "shuffled",
    history_period: Annotated[
        int,
        typer.Option(
            help="Epochs between refreshes of the rows that chunks read of those after them.",
            rich_help_panel="Ranks",
        ),
    ] = 1,
    history_gamma: Annotated[
        float, typer.Option(help="Factor of gradients between chunks: 1 | 2.", rich_help_panel="Ranks")
    ] = 1.0,
    layer_costs: Annotated[
        str,
        typer.Option(
            help="By which stages of strategy pipeline are balanced: counted | measured at the start | auto.",
            rich_help_panel="Ranks",
        ),
    ] = "auto",
    shared_rows: Annotated[
        str,
        typer.Option(
            help="What a model gives to all layers (GCNII's h0), in strategy pipeline: send | recompute | auto.",
            rich_help_panel="Ranks",
        ),
    ] = "auto",
    history_gradients: Annotated[
        bool,
        typer.Option(
            "--history-gradients",
            help="Where the order of chunks cuts gradients off, add those of the epoch before.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    history_sweeps: Annotated[
        str,
        typer.Option(
            help="Forward passes before an epoch of strategy pipeline, for fresher history; auto: 1 if units are dropped.",
            rich_help_panel="Ranks",
        ),
    ] = "auto",
    history_bound: Annotated[
        float | None,
        typer.Option(
            help="Relative error of history above which more chunks go through a layer together [default: none].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    functions: Annotated[
        str,
        typer.Option(
            help="Functions of each rank of strategy serverless: a number, or auto (as many as are worth most).",
            rich_help_panel="Ranks",
        ),
    ] = "2",
    function_launcher: Annotated[
        str,
        typer.Option(
            help="Where functions run: local, command, aws (AWS Lambda) or ray.", rich_help_panel="Ranks"
        ),
    ] = "local",
    function_command: Annotated[
        str | None,
        typer.Option(
            help="Of launcher command: runs a function, as in 'ssh HOST python -m polyhop.serverless.function'.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    function_host: Annotated[
        str | None,
        typer.Option(
            help="Address of this host at which functions and other ranks reach it [default: as ranks do].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    function_name: Annotated[
        str | None,
        typer.Option(help="Of AWS Lambda: name or ARN.", rich_help_panel="Ranks"),
    ] = None,
    function_memory: Annotated[
        int | None,
        typer.Option(
            help="MB of a function [default: 1769; on AWS as it was made].", rich_help_panel="Ranks"
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            help="Table of prices (JSON) by which functions are billed [default: AWS, 2021].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    server_kind: Annotated[
        str | None,
        typer.Option(
            help="Of those prices, as which a rank with functions is billed [default: c5n.2xlarge].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    intervals: Annotated[
        int,
        typer.Option(
            help="Pieces into which a rank of strategy serverless cuts its part.", rich_help_panel="Ranks"
        ),
    ] = 16,
    staleness: Annotated[
        str,
        typer.Option(
            help="Of strategy serverless: pipe (pieces wait for what they read: exact), or epochs that one may be ahead.",
            rich_help_panel="Ranks",
        ),
    ] = "pipe",
    pipe_epochs: Annotated[
        int | None,
        typer.Option(
            help="First and last epochs of strategy serverless that are exact, whatever --staleness [default: a fifth].",
            rich_help_panel="Ranks",
        ),
    ] = None,
    weight_steps: Annotated[
        int,
        typer.Option(
            help="Steps of the weights an epoch of strategy serverless; more than 1 do not wait for all intervals.",
            rich_help_panel="Ranks",
        ),
    ] = 1,
    edge_functions: Annotated[
        bool,
        typer.Option(
            "--edge-functions",
            help="Functions of strategy serverless compute attention weights too (GAT): more bytes, less work for ranks.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    exact_layers: Annotated[
        bool,
        typer.Option(
            "--exact-layers",
            help="All chunks of strategy pipeline through a layer before any goes on: exact, stages wait.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    share_variates: Annotated[
        bool,
        typer.Option(
            "--share-variates",
            help="LABOR draws alike all over a window: fewer rows, dependent steps.",
            rich_help_panel="Ranks",
        ),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Working memory of windows and evaluation, such as 2GB.",
            rich_help_panel="Ranks",
        ),
    ] = None,
    aggregate_inputs: Annotated[
        bool,
        typer.Option(
            "--aggregate-inputs",
            help="Store the first layer's sums over all neighbours: one hop less (the last fan-out is not used).",
        ),
    ] = False,
    engine: Annotated[
        str, typer.Option(help="auto | local | torchrun | ray.", rich_help_panel="Ranks")
    ] = "auto",
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for all ranks.", rich_help_panel="Ranks")
    ] = 300.0,
    peer_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds without a sign from a rank.", rich_help_panel="Ranks")
    ] = 60.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts after a lost rank.", rich_help_panel="Ranks")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0,
    device: Annotated[str, typer.Option(help="auto | cpu | cuda | cuda:1 ...")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads [default: torch's choice].")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder to look for NAME in, before $POLYHOP_DATA.")
    ] = None,
    nodes: Annotated[Path | None, typer.Option(help="Node table that belongs to a file of edges.")] = None,
    split: Annotated[str, typer.Option(help="Which of the graph's splits: a number or a name.")] = "0",
    run_dir: Annotated[
        str, typer.Option(help="Folder of the run; auto = runs/<date>-<graph>-<model>.")
    ] = "auto",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run that --run-dir holds.")
    ] = False,
    resume: Annotated[
        str | None, typer.Option(help="auto (continue --run-dir) or a run or checkpoint folder.")
    ] = None,
    progress: Annotated[str, typer.Option(help="auto | rich | plain | json | none")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Train a model on a graph, and show test accuracy and a curve.

    Without --fanout every step uses the full graph; with it, mini-batches of sampled neighbours. Results go to standard
    output, progress to standard error. Stop with Ctrl-C or SIGTERM: the state is saved; --resume auto goes on.

    \b
    Examples:
      polyhop train debian-packages
      polyhop train cora --data-dir DATA --model gcn --hidden 16 --epochs 200 --weight-decay 5e-4
      polyhop train synth:products?scale=0.1 --layers 3 --fanout 15,10,5 --epochs 5
      polyhop train edges.csv --nodes nodes.csv --run-dir runs/mine --resume auto
      polyhop train debian-packages --workers 2 --fanout 15,10
      torchrun --nproc-per-node 2 -m polyhop train debian-packages --fanout 15,10
      polyhop train debian-packages --dry-run --json
    """
    fan_outs = _fan_outs(fanout)
    if fan_outs is not None and len(fan_outs) != layers:
        raise typer.BadParameter(
            f"{fanout}: {len(fan_outs)} fan-outs for --layers {layers}", param_hint="--fanout"
        )
    if overwrite and (resume is not None or run_dir == "auto"):
        raise typer.BadParameter(
            "needs --run-dir FOLDER, and does not go with --resume", param_hint="--overwrite"
        )
    recipe = Recipe(
        source=name,
        data_dir=None if data_dir is None else str(data_dir),
        nodes=None if nodes is None else str(nodes),
        split=int(split) if split.isdigit() else split,
        model=model,
        hidden=hidden,
        layers=layers,
        dropout=dropout,
        more={
            key: value for key, value in (("heads", heads), ("norm", norm), ("jk", jk)) if value is not None
        },
    )
    options = {
        "max_epochs": epochs,
        "num_neighbors": fan_outs,
        "batch_size": batch_size,
        "sampler": sampler,
        "labor_dependence": batch_dependence,
        "optimizer": optimizer,
        "lr": lr,
        "weight_decay": weight_decay,
        "schedule": schedule,
        "warmup": warmup,
        "clip": clip,
        "precision": precision,
        "eval_every": eval_every,
        "patience": patience,
        "seed": seed,
        "device": device,
        "resume": resume,
        "progress": progress,
        "feature_dtype": feature_dtype,
        "feature_store": features,
        "cache": cache,
        "cache_ranks": cache_ranks,
        "device_cache": device_cache,
        "per_minibatch_rpc": per_minibatch_rpc,
        "aggregate_inputs": aggregate_inputs,
        "macro": int(macro) if macro.isdecimal() else macro,
        "split_depth": int(split_depth) if split_depth and split_depth.isdecimal() else split_depth,
        "split_sums": split_sums,
        "split_groups": split_groups,
        "delta": delta,
        "share_variates": share_variates,
        "bits": int(bits) if bits.isdecimal() else bits,
        "bits_lambda": bits_lambda,
        "bits_period": bits_period,
        "link_costs": None if link_costs is None else str(link_costs),
        "halo": halo,
        "halo_share": halo_share,
        "naive_halo": naive_halo,
        "overlap": overlap,
        "recompute": recompute,
        "stages": stages,
        "chunks": chunks,
        "chunk_order": chunk_order,
        "history_period": history_period,
        "layer_costs": layer_costs,
        "shared_rows": shared_rows,
        "history_gamma": history_gamma,
        "history_gradients": history_gradients,
        "history_sweeps": int(history_sweeps) if history_sweeps.isdecimal() else history_sweeps,
        "history_bound": history_bound,
        "functions": int(functions) if functions.isdecimal() else functions,
        "function_launcher": function_launcher,
        "function_command": function_command,
        "function_host": function_host,
        "function_name": function_name,
        "function_memory": function_memory,
        "prices": None if prices is None else str(prices),
        "server_kind": server_kind,
        "intervals": intervals,
        "staleness": None if staleness == "pipe" else int(staleness) if staleness.isdecimal() else staleness,
        "pipe_epochs": pipe_epochs,
        "weight_steps": weight_steps,
        "edge_functions": edge_functions,
        "exact_layers": exact_layers,
        "allow_approximate": allow_approximate,
        "foresee": foresee,
        "memory": memory,
    }
    from polyhop.launch import Launch, is_rank_process

    on_ranks = workers is not None or is_rank_process()
    options["strategy"] = strategy or ("auto" if on_ranks else "single")
    obeyed = None
    if plan is not None:
        from polyhop.cli.planned import planned

        sources = {each: context.get_parameter_source(each) for each in context.params}
        given = {
            each for each, source in sources.items() if source is not None and source.name == "COMMANDLINE"
        }
        num_ranks = workers or int(os.environ.get("WORLD_SIZE", "1"))
        obeyed = planned(plan, recipe, options, num_ranks, given, partitioner)
        if not obeyed.plan.fits:
            console.say("; ".join(obeyed.plan.advice))
        options |= obeyed.settings
        partitioner = obeyed.partitioner if partitioner == "auto" and obeyed.partitioner else partitioner
    if on_ranks and not dry_run:
        asked = Launch(
            num_ranks=workers,
            engine=engine,
            threads=threads or 1,
            start_timeout_s=start_timeout,
            peer_timeout_s=peer_timeout,
            max_restarts=max_restarts,
            agreed={
                "graph": name,
                "model": [model, layers, hidden],
                "fan-outs": fan_outs,
                "seed": seed,
                "split groups": split_groups,
            },
        )
        _train_on_ranks(
            recipe, options, run_dir, asked, parts, partitioner, obeyed, overwrite=overwrite, as_json=as_json
        )
        return
    num_ranks = workers or int(os.environ.get("WORLD_SIZE", "1"))
    _train(
        recipe,
        options,
        run_dir,
        obeyed,
        threads=threads,
        overwrite=overwrite,
        dry_run=dry_run,
        num_ranks=num_ranks,
        as_json=as_json,
    )


def _train(
    recipe: Recipe,
    options: dict[str, Any],
    run_dir: str,
    obeyed: Planned | None,
    *,
    threads: int | None,
    overwrite: bool,
    dry_run: bool,
    num_ranks: int,
    as_json: bool,
) -> None:
    """The command once its options are read: load, build, train, show."""
    import torch

    from polyhop.train.folder import automatic_name
    from polyhop.trainer import Trainer

    if threads is not None:
        torch.set_num_threads(threads)
    trainer = Trainer(
        **options, run_dir=None if dry_run else run_dir
    )  # checks the options before anything is loaded
    graph = recipe.load()
    if obeyed is not None:
        obeyed.check_graph(graph)
    recipe = recipe.fitted(graph)
    model = recipe.build(trainer.seed)
    if dry_run:
        _show_dry_run(trainer, model, graph, num_ranks, as_json)
        return
    folder = automatic_name(graph.name, type(model).__name__) if run_dir == "auto" else Path(run_dir)
    if overwrite:
        _clear(folder)
    with recipe.kept_in(folder):
        made = None if obeyed is None else obeyed.plan
        result = Trainer(**options, run_dir=folder).fit(model, graph, plan=made)
    show_result(result, folder, as_json)


def _train_on_ranks(
    recipe: Recipe,
    options: dict[str, Any],
    run_dir: str,
    asked: Launch,
    parts: Path | None,
    partitioner: str,
    obeyed: Planned | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """The same on several ranks: check what can be checked here, start them, show what rank 0 came to."""
    from polyhop import launch
    from polyhop.cli.ranks import check_parts, check_procedural, is_first_process, train_rank
    from polyhop.comm import group_size
    from polyhop.datasets import is_procedural
    from polyhop.strategies.pipeline_ways import check_chunks, lay_out
    from polyhop.train.folder import automatic_name
    from polyhop.trainer import Trainer

    Trainer(**options, run_dir=None if options["resume"] is None else run_dir)
    if options["strategy"] in ("data", "macro", "split", "pushpull") and options["num_neighbors"] is None:
        raise ConfigError(
            "ranks train on mini-batches: give --fanout, one number per layer, such as --fanout 15,10 (-1 = all neighbours)"
        )
    groups = options["split_groups"]
    if asked.num_ranks is not None:
        group_size(asked.num_ranks, groups)
        if options["strategy"] == "pipeline":
            layout = lay_out(asked.num_ranks, options["stages"])
            check_chunks(options["chunks"] or asked.num_ranks, layout)
    check_procedural(recipe, parts, partitioner)
    if parts is not None and parts.exists() and not launch.is_rank_process():
        check_parts(parts, recipe, asked.num_ranks, groups, is_whole=asked.engine != "ray")
    folder = automatic_name(Path(recipe.source).name, recipe.model) if run_dir == "auto" else Path(run_dir)
    if asked.engine == "ray":  # its ranks work where Ray was started, not here
        folder, parts = folder.absolute(), None if parts is None else parts.absolute()
    if overwrite and is_first_process():
        _clear(folder)
    result = launch.run(train_rank, (recipe, options, folder, parts, partitioner, obeyed), asked)
    if is_first_process():
        show_result(result, Path(str(result.run_dir)), as_json, can_predict=not is_procedural(recipe.source))


def _show_dry_run(trainer: Trainer, model: nn.Module, graph: Graph, num_ranks: int, as_json: bool) -> None:
    from polyhop.strategies import place
    from polyhop.train.header import first_lines

    placement, groups = place(trainer.device, trainer.precision), trainer.split_groups
    facts = first_lines(graph, model, placement, trainer.num_neighbors, None, (), num_ranks, groups)
    if num_ranks > 1:
        facts["plan"] = f"strategy {trainer.strategy}, {facts['plan']}"
    seeds = 0 if graph.split is None else graph.split.train.numel()
    steps = 1 if trainer.num_neighbors is None else -(-seeds // (trainer.batch_size or 1024))
    facts["plan"] += f"; {trainer.max_epochs} epochs of {steps:,} steps, {seeds:,} training nodes"
    facts["run"] = "none: this is a dry run"
    if as_json:
        console.print_json({"dry_run": True, **facts, "config": trainer.resolved()})
    else:
        console.show_table(list(facts.items()))


def _clear(folder: Path) -> None:
    """Remove a run's own files, and nothing else."""
    import shutil

    from polyhop.train.folder import RunFolder

    if not folder.exists():
        return
    if any(folder.iterdir()) and not any(
        (folder / name).exists() for name in ("config.json", "command.json")
    ):
        raise ConfigError(f"{folder} is not empty and holds no run: --overwrite replaces runs only")
    RunFolder(folder, may_continue=True).close()  # refuses a folder that another process is training in
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for path in [
        *(folder / name for name in _WRITTEN),
        *folder.glob("trace-*.jsonl"),
        *folder.glob("functions-*.jsonl"),
    ]:
        path.unlink(missing_ok=True)
