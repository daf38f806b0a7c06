"""``polyhop bench``: run a benchmark of the source checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from polyhop.errors import UnsupportedError

__all__ = ["command"]


def command(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Which benchmark; none lists them.")
    ] = None,
) -> None:
    """Run a benchmark against other libraries.

    Works in a source checkout only. Everything after NAME goes to the benchmark; "scripts/bench NAME" does the same
    and sets everything up first.

    \b
    Examples:
      polyhop bench                      list the benchmarks
      polyhop bench kernels              kernels against torch, PyG and DGL
      polyhop bench epoch --json r.json  whole training epochs; flat JSON to a file
    """
    root = _checkout()
    if root is None:
        raise UnsupportedError(
            "the benchmarks are part of the source checkout, not of the installed package: "
            "clone the repository and run scripts/bench there"
        )
    forwarded = [*([name] if name else []), *context.args]
    raise typer.Exit(
        subprocess.run([sys.executable, "-m", "benchmarks", *forwarded], cwd=root, check=False).returncode
    )


def _checkout() -> Path | None:
    """The checkout this package runs from, or the one we stand in; None if neither is one."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "benchmarks" / "__main__.py").is_file() and (root / "pyproject.toml").is_file():
            return root
    return None
