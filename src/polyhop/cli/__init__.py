"""The command line: one file per verb, each a thin translation into one library call. Loads no torch before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from polyhop import __version__
from polyhop.cli import bench, console, data, env, partition, plan, predict, report, train

__all__ = ["app", "main"]

_PLAIN = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    name="polyhop",
    help="Train graph neural networks on one big graph.",
    epilog="Try: polyhop train debian-packages",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: fast, and it survives a copy into an issue
    context_settings=_PLAIN,
)
app.command("train")(train.command)
app.command("predict")(predict.command)
app.command("data")(data.command)
app.command("partition")(partition.command)
app.command("plan")(plan.command)
app.command("report")(report.command)
app.command("env")(env.command)
app.command("bench", context_settings={**_PLAIN, "ignore_unknown_options": True, "allow_extra_args": True})(
    bench.command
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"polyhop {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train graph neural networks on one big graph."""


def main() -> None:
    """Entry point of the command ``polyhop`` and of ``python -m polyhop``."""
    with console.explained():
        app(prog_name="polyhop")
