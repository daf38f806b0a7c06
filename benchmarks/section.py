"""Runs one section of a bench inside the peers' environment: ``python -m benchmarks.section BENCH SECTION ANSWER QUICK``."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

__all__ = ["main"]


def main(bench: str, section: str, answer: str, quick: str) -> None:
    """Write the section's figures as JSON to ``answer``."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    figures = []
    for figure in importlib.import_module(f"benchmarks.{bench.replace('-', '_')}.{section}").run(
        is_quick=quick == "1"
    ):
        print(f"  = {figure.name} {figure.value:.4g} {figure.unit} {figure.verdict}", flush=True)
        figures.append(figure)
    Path(answer).write_text(json.dumps([asdict(figure) for figure in figures]))


if __name__ == "__main__":
    main(*sys.argv[1:])
