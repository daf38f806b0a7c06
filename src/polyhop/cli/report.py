"""``polyhop report``: what runs did, from their folders: on the terminal, as a page, as JSON, for other viewers, or live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyhop.cli import console
from polyhop.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from polyhop.report import Explainer

__all__ = ["command"]

_PAGE = "report.html"
_OF_FILES = {
    "out": "--out",
    "no_html": "--no-html",
    "as_json": "--json",
    "trace": "--trace",
    "tensorboard": "--tensorboard",
}
_OF_SERVER = {"host": "--host", "port": "--port"}


def command(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"File of the page; otherwise RUN/{_PAGE}, or {_PAGE} here where there are several runs."
        ),
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no page: only the terminal.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead; no page without --out.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write the whole trace for Perfetto and chrome://tracing (.json, .json.gz)."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write TensorBoard events into this folder.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page while the runs train, until Ctrl-C.")
    ] = False,
    host: Annotated[str, typer.Option(help="With --serve: the address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve: the port; 0 = any.")] = 8642,
) -> None:
    """Explain one run, or compare several.

    \b
    Examples:
      polyhop report runs/mine                       a summary, and the page runs/mine/report.html
      polyhop report runs/a runs/b --out ab.html     both on one page
      polyhop report runs/mine --json
      polyhop report runs/mine --trace trace.json.gz --no-html
      polyhop report --serve runs/mine               the page, live
    """
    _check_used(context)
    if serve:
        _serve(runs, host, port)
        return
    if trace is not None and len(runs) > 1:
        raise ConfigError("--trace takes one run: traces of several cannot share a clock")
    from polyhop.report import Explainer, show

    explainer = Explainer(runs)
    document = explainer.document()
    if as_json:
        told = [
            {name: value for name, value in run.items() if name != "timeline"} for run in document["runs"]
        ]
        console.print_json({**document, "runs": told})
    else:
        show(document, ascii=console.is_ascii())
    _export(runs, explainer, document, trace, tensorboard)
    if not no_html and (out is not None or not as_json):
        _write_page(document, out, runs)


def _check_used(context: typer.Context) -> None:
    """ConfigError for options on the command line of which one would not be used."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    if "serve" in given:
        for name in _OF_FILES:
            if name in given:
                raise ConfigError(
                    f"{_OF_FILES[name]} is not used with --serve, which only answers a browser: leave one of them out"
                )
    else:
        for name in _OF_SERVER:
            if name in given:
                raise ConfigError(
                    f"{_OF_SERVER[name]} is of the server that --serve starts: give both, or leave it out"
                )
    if {"out", "no_html"} <= given:
        raise ConfigError("--out names a page, and --no-html makes none: leave one of them out")


def _export(
    runs: list[Path],
    explainer: Explainer,
    document: dict[str, Any],
    trace: Path | None,
    tensorboard: Path | None,
) -> None:
    from polyhop.report import write_chrome_trace, write_tensorboard

    if trace is not None:
        count = write_chrome_trace(runs[0], trace)
        console.say(f"trace: {trace} ({count:,} events; open it at ui.perfetto.dev)")
    if tensorboard is not None:
        for run, reader in zip(document["runs"], explainer.readers, strict=True):
            console.say(f"TensorBoard: {write_tensorboard(run, reader.tallies, tensorboard)}")


def _write_page(document: dict[str, Any], out: Path | None, runs: list[Path]) -> None:
    from polyhop.report import page, plain, whole_file

    path = out or (runs[0] / _PAGE if len(runs) == 1 else Path(_PAGE))
    try:
        data = page(document, plain(document, ascii=True)).encode()
    except UnsupportedError as error:
        if out is not None:
            raise
        console.say(f"no page: {error}")
        return
    with whole_file(path) as temporary:
        temporary.write_bytes(data)
    console.say(f"page: {path} ({len(data) / 1e6:.1f} MB)")  # a pipe has no size


def _serve(runs: list[Path], host: str, port: int) -> None:
    from polyhop.report import Server

    server = Server(runs, host, port)
    server.start()
    console.say(f"serving {server.address} until Ctrl-C")
    missing = server.missing()
    if missing:
        console.say(f"waiting for {', '.join(map(str, missing))}: not there, or no run yet")
    try:
        while True:
            time.sleep(1.0)
            if missing and not server.missing():
                console.say("the run has begun")
                missing = []
    except KeyboardInterrupt:
        console.say("ended")
    finally:
        server.close()
