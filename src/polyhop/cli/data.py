"""``polyhop data``: what a graph looks like before anything is trained on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A graph; none lists the known names.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder to look for NAME in, before $POLYHOP_DATA.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Describe a graph: degrees, components, homophily, split."""
